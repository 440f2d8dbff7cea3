#!/bin/sh
# Starts Outrider on macOS and Linux with the first Python on this computer that is new enough.
cd "$(dirname "$0")" || exit 1
PATH="$PATH:/opt/homebrew/bin:/usr/local/bin"

python=""
for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
        python="$candidate"
        break
    fi
done

if [ -n "$python" ]; then
    "$python" launcher.py "$@"
    status=$?
else
    echo "Outrider needs Python 3.10 or newer, and this computer has none."
    echo "Install it from python.org or with your system's package manager, then start Outrider again."
    status=1
fi

# 130: the user pressed Ctrl-C. A window opened by a double-click must not close over an error.
if [ "$status" -ne 0 ] && [ "$status" -ne 130 ] && [ -t 0 ]; then
    printf 'Press Enter to close this window. '
    read -r _
fi
exit "$status"
