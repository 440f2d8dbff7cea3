"""A start ends in a running app or in one readable message that says what to do, also after a killed one.

    python launcher.py [options]          set up what is missing, then open the app
    python launcher.py test [pytest ...]  set up, then run the test suite

Set-up makes `.venv` beside this file and installs requirements.txt there. `.venv/*.installed` records what is
installed, so that a later start needs no network; `.venv.incomplete` exists while packages change, so that an
environment which was cut off half-way is never used. Standard library only, and in grammar that Python 3.6
reads: an old Python must get as far as the message about its age.
"""

import sys

MIN_PYTHON = (3, 10)


def python_problem(version):
    """What to do about a Python of this version (a tuple), or None when it will do."""
    if version >= MIN_PYTHON:
        return None
    text = "Outrider needs Python 3.10 or newer; this is Python {}.{}. Install a newer one from python.org."
    return text.format(*version[:2])


if python_problem(sys.version_info):
    sys.exit(python_problem(sys.version_info))

import argparse
import collections
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
REQUIREMENTS, TEST_REQUIREMENTS = "requirements.txt", "requirements-test.txt"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"  # PyTorch's own CUDA builds, for Windows
HUB_ID = r"[\w.-]+/[\w.-]+(@[\w./-]+)?"


class LaunchError(Exception):
    """A step failed; the message says which, why, and what to do."""


class Result(NamedTuple):
    """How a command ended. errors: the last lines of its stderr, when they were asked for."""

    code: int
    errors: str = ""


Runner = Callable[..., Result]


def say(text: str) -> None:
    print("[Outrider] " + text, flush=True)


# Running commands


def run(command: list[str], root: Path, env: dict | None = None, keep_errors: bool = False) -> Result:
    """Run `command` in `root` to its end, output on screen; `keep_errors` also returns its stderr.

    Ctrl-C or a termination signal ends the command before this function raises.
    """
    process = subprocess.Popen(
        command,
        cwd=str(root),
        env={**os.environ, "PYTHONUTF8": "1", **(env or {})},
        stderr=subprocess.PIPE if keep_errors else None,
        encoding="utf-8" if keep_errors else None,
        errors="replace" if keep_errors else None,
        close_fds=False,  # an orphaned command keeps the set-up lock until it ends
    )
    lines: collections.deque[str] = collections.deque(maxlen=60)
    try:
        for line in process.stderr or ():
            sys.stderr.write(line)
            sys.stderr.flush()
            lines.append(line)
        return Result(process.wait(), "".join(lines))
    except BaseException as error:
        _end(process, asked=isinstance(error, KeyboardInterrupt))
        raise


def _end(process: subprocess.Popen, asked: bool) -> None:
    """End `process`. asked: Ctrl-C has already reached it through the terminal."""
    try:
        if not asked:
            process.terminate()
        process.wait(timeout=10)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


@contextlib.contextmanager
def setup_lock(root: Path) -> Iterator[None]:
    """Hold the set-up of this folder, after waiting for any other launcher; a killed one holds nothing."""
    with open(root / ".setup.lock", "a") as handle:
        os.set_inheritable(handle.fileno(), True)
        waited = False
        while not _try_lock(handle.fileno()):
            if not waited:
                say("Another window is setting Outrider up; waiting for it to finish.")
            waited = True
            time.sleep(0.5)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# Why a step failed

CAUSES = (
    (
        r"No space left|Errno 28|not enough space|WinError 112",
        "disk",
        "The disk is full. Free some space (packages need about 8 GB with CUDA, 2 GB without).",
    ),
    (
        r"Permission denied|Access is denied|Errno 13|WinError 5\b|Read-only file system",
        "permission",
        "Files in {root} cannot be written. Close other Outrider windows, or move the folder elsewhere.",
    ),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError"
        r"|ConnectionResetError|Connection refused|name resolution|Network is unreachable|getaddrinfo failed",
        "network",
        "The package index cannot be reached. Check the internet connection (and the proxy settings).",
    ),
    (
        r"No matching distribution|from versions: none|not a supported wheel",
        "platform",
        "A package has no build for this computer. Outrider needs a 64-bit Python 3.10 to 3.14 on Linux, "
        "Windows or a Mac with Apple silicon; this is Python {python} on {machine}.",
    ),
)


def cause_of(errors: str) -> str:
    """Why pip or venv failed, by its stderr: disk, permission, network, platform or unknown."""
    return next((kind for pattern, kind, _ in CAUSES if re.search(pattern, errors)), "unknown")


def advice(kind: str, root: Path) -> str:
    """What a person can do about a failure of this kind."""
    text = next((text for _, k, text in CAUSES if k == kind), "The lines above say why.")
    machine = f"{sys.platform} {platform.machine()}"
    text = text.format(root=root, python=platform.python_version(), machine=machine)
    return text + " Then start Outrider again: it goes on from here."


# Set-up


def venv_python(root: Path) -> Path:
    return root / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def python_version(python: Path) -> str | None:
    """`3.11` of an interpreter that works, else None."""
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def set_up(root: Path, names: list[str], run: Runner = run) -> None:
    """Bring `.venv` in `root` to the state that the requirements files `names` ask for."""
    with setup_lock(root):
        incomplete = root / ".venv.incomplete"
        version = python_version(venv_python(root))
        if version is None or incomplete.exists() or _made_for(root) not in (None, version):
            incomplete.touch()
            make_venv(root, run)
            version = python_version(venv_python(root))
        for name in names:
            stamp = root / ".venv" / (name + ".installed")
            wanted = f"{version} {hashlib.sha256((root / name).read_bytes()).hexdigest()}"
            if not stamp.is_file() or stamp.read_text() != wanted:
                incomplete.touch()
                install(root, name, run)
                stamp.write_text(wanted)
        if incomplete.exists():
            incomplete.unlink()


def _made_for(root: Path) -> str | None:
    """The Python version `.venv`'s packages were installed for; its interpreter may have changed since."""
    stamp = root / ".venv" / (REQUIREMENTS + ".installed")
    return stamp.read_text().split(" ")[0] if stamp.is_file() else None


def make_venv(root: Path, run: Runner) -> None:
    """Make an empty `.venv`, in place of one that is damaged, cut off or made for another Python."""
    if importlib.util.find_spec("ensurepip") is None:
        raise LaunchError(
            "This Python lacks its venv module. On Debian or Ubuntu: sudo apt install python3-venv. "
            "Then start Outrider again."
        )
    say("Making the environment .venv")
    shutil.rmtree(root / ".venv", ignore_errors=True)
    result = run([sys.executable, "-m", "venv", "--clear", str(root / ".venv")], root, keep_errors=True)
    if result.code:
        raise LaunchError("The environment .venv could not be made. " + advice(cause_of(result.errors), root))


def install(root: Path, name: str, run: Runner) -> None:
    """pip install -r `name` into `.venv`."""
    say(f"Installing {name}. The first time this takes some minutes.")
    pip = [str(venv_python(root)), "-m", "pip", "install", "--disable-pip-version-check"]
    temporary = root / ".venv" / "tmp"  # the system's own may be a small RAM disk
    temporary.mkdir(exist_ok=True)
    env = {"TMPDIR": str(temporary), "DISABLE_CUDA": "1"}  # the latter: hqq builds no kernels, none are used
    torch = re.search(r"^torch==\S+", (root / name).read_text(), re.MULTILINE)
    if torch and wants_cuda_index():
        say("NVIDIA GPU found: installing the CUDA build of PyTorch")
        if run([*pip, torch[0], "--index-url", CUDA_INDEX], root, env, keep_errors=True).code:
            say("It could not be installed; going on with the CPU build. To try again later, delete .venv.")
    result = run([*pip, "-r", name], root, env, keep_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    if result.code:
        kind = cause_of(result.errors)
        if kind in ("network", "platform"):  # pip fetches everything before it changes anything
            (root / ".venv.incomplete").unlink()
        raise LaunchError(f"{name} could not be installed. " + advice(kind, root))


def wants_cuda_index(system: str = sys.platform) -> bool:
    """pip's torch has CUDA on Linux but not on Windows: there an NVIDIA GPU calls for PyTorch's own index."""
    return system == "win32" and shutil.which("nvidia-smi") is not None


# The model and the app


def engine(root: Path, *arguments: str, run: Runner) -> None:
    """`python -m engine ...`, which prints its own progress and errors. Raises LaunchError when it fails."""
    if run([str(venv_python(root)), "-m", "engine", *arguments], root).code:
        raise LaunchError("The model is not ready: the line above says why. A new start goes on from there.")


def fetch_default(root: Path, run: Runner) -> None:
    """`python -m engine fetch-default`, unless what it depends on is as it was when it last succeeded."""
    digest = hashlib.sha256()
    for path in [*sorted(root.glob("assets/*.safetensors")), *sorted(root.glob("engine/**/*.py"))]:
        digest.update(path.read_bytes())
    stamp = default_stamp(root)
    ready = stamp.is_file() and stamp.read_text() == digest.hexdigest()
    if not ready or not (root / "models" / "default" / "store.json").is_file():
        engine(root, "fetch-default", run=run)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


def default_stamp(root: Path) -> Path:
    return root / "models" / ".default.ready"


def ready_model(root: Path, model: str | None, run: Runner) -> str | None:
    """Make `model` (name, store, folder, hub id; None: the default) usable; returns what the app loads."""
    if model in (None, "default"):
        fetch_default(root, run)
        return model
    models, path = root / "models", Path(model).expanduser().resolve()
    if (models / model / "store.json").is_file():
        return model
    if (path / "store.json").is_file():
        return str(path)
    if path.exists():
        source = str(path)
        digest = hashlib.sha256(source.encode()).hexdigest()
        name = f"{path.stem}-{digest[:6]}"  # two folders of one name stay apart
    elif re.fullmatch(HUB_ID, model):
        source, name = model, re.sub(r"[/@]", "--", model)
    else:
        raise LaunchError(
            f"--model {model}: neither a folder, nor a name under {models}, nor a hub id such as org/name."
        )
    if not (models / name / "store.json").is_file():
        say(f"Preparing {model}. This is done once.")
        engine(root, "prepare", source, str(models / name), "--experts", "int4", run=run)
    return name


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launcher.py", description="Set up and start Outrider. `launcher.py test` runs the test suite."
    )
    parser.add_argument("--model", metavar="PATH_OR_HUB_ID", help="folder, prepared store or hub id")
    parser.add_argument("--mode", help="on-demand, edge0 or specter")
    parser.add_argument("--no-lora", action="store_true", help="edge0: leave the recovery LoRA off")
    parser.add_argument("--depth", help="specter: draft tokens a window, or auto")
    parser.add_argument("--draft-bits", type=int, help="specter: bits of the draft, 4, 3 or 2")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask for this user name and password")
    parser.add_argument("--share", action="store_true", help="make a public link, protected by a password")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    return parser.parse_args(arguments)


def app_command(root: Path, options: argparse.Namespace) -> list[str]:
    """The command that starts the app with the options that were given."""
    command = [str(venv_python(root)), "-m", "app"]
    for name, value in vars(options).items():
        option = "--" + name.replace("_", "-")
        if value is True:
            command.append(option)
        elif value not in (None, False):
            command += [option, str(value)]
    return command


def start(arguments: list[str], root: Path = ROOT, run: Runner = run) -> int:
    """Do what the command line says; the exit code of the app or of pytest. Raises LaunchError."""
    if arguments[:1] == ["test"]:
        set_up(root, [REQUIREMENTS, TEST_REQUIREMENTS], run)
        ready_model(root, None, run)
        return run([str(venv_python(root)), "-m", "pytest", *arguments[1:]], root).code
    options = parse(arguments)
    set_up(root, [REQUIREMENTS], run)
    options.model = ready_model(root, options.model, run)
    say("Starting. Press Ctrl-C here to stop.")
    code = run(app_command(root, options), root).code
    if code:
        say(f"The app ended with an error (exit code {code}): the lines above say why.")
        if default_stamp(root).exists():  # should the default model be damaged, the next start repairs it
            default_stamp(root).unlink()
    return code


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running command is ended too
    try:
        return start(arguments)
    except LaunchError as error:
        print(f"\n[Outrider] {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\n[Outrider] {error}. {advice(cause_of(str(error)), ROOT)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("Stopped.")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
