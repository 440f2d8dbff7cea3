@echo off
rem Starts Outrider on Windows with the first Python on this computer that is new enough.
setlocal
title Outrider
cd /d "%~dp0"

set "PYTHON="
for %%P in ("py -3" "python" "python3") do (
    if not defined PYTHON (
        %%~P -c "import sys; sys.exit(sys.version_info < (3, 10))" >nul 2>&1 && set "PYTHON=%%~P"
    )
)

if not defined PYTHON (
    echo Outrider needs Python 3.10 or newer, and this computer has none.
    echo Install it from python.org ^(tick "Add python.exe to PATH"^), then start Outrider again.
    pause
    exit /b 1
)

%PYTHON% launcher.py %*
set "STATUS=%ERRORLEVEL%"
rem 130: the user pressed Ctrl-C. A window opened by a double-click must not close over an error.
if not "%STATUS%"=="0" if not "%STATUS%"=="130" pause
exit /b %STATUS%
