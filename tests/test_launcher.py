"""The launcher in a scratch folder: pip installs tiny local packages; the engine and the app are recorded."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import launcher
from launcher import LaunchError, Result

PROJECT = Path(__file__).resolve().parents[1]


class Recorder:
    """A runner that runs `pip` and `venv` for real unless told to fail, and only records everything else."""

    def __init__(self, real: bool = True) -> None:
        self.real, self.commands, self.fail = real, [], {}

    def __call__(self, command, root, env=None, keep_errors=False) -> Result:
        self.commands.append([str(part) for part in command[1:]])
        for word, result in self.fail.items():
            if word in command:
                return result
        if self.real and command[2] in ("pip", "venv"):
            return launcher.run(command, root, env, keep_errors)
        if command[2] == "venv":
            python = launcher.venv_python(root)
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        return Result(0)

    def modules(self) -> list[str]:
        return [command[1] for command in self.commands]


def write_wheel(path: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info/"
    with zipfile.ZipFile(path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A project folder whose requirements are two tiny wheels in a folder, pip's only index."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("first", "second"):
        write_wheel(packages, name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    project = tmp_path / "project"
    project.mkdir()
    (project / "requirements.txt").write_text("first==1.0\n")
    (project / "requirements-test.txt").write_text("second==1.0\n")
    return project


@pytest.fixture
def fake(root) -> tuple[Path, Recorder]:
    """A folder that is set up, but with recorded instead of real commands."""
    recorder = Recorder(real=False)
    launcher.set_up(root, ["requirements.txt"], recorder)
    recorder.commands.clear()
    return root, recorder


def has(root: Path, module: str) -> bool:
    command = [str(launcher.venv_python(root)), "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_old_python_reads_the_message():
    source = (PROJECT / "launcher.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "3.10 or newer; this is Python 3.9" in launcher.python_problem((3, 9, 18))
    assert launcher.python_problem((3, 10, 0)) is None


def test_first_start_installs_second_does_nothing(root):
    recorder = Recorder()
    assert launcher.start(["--no-browser"], root, recorder) == 0
    assert recorder.modules() == ["venv", "pip", "engine", "app"]
    assert has(root, "first") and not has(root, "second")
    store = root / "models" / "default" / "store.json"
    store.parent.mkdir()
    store.touch()
    recorder.commands.clear()
    launcher.start([], root, recorder)
    assert recorder.commands == [["-m", "app"]]


def test_default_model_is_checked_again_after_a_change(fake):
    root, recorder = fake
    store = root / "models" / "default" / "store.json"
    store.parent.mkdir(parents=True)
    store.touch()

    def modules() -> list[str]:
        recorder.commands.clear()
        launcher.start([], root, recorder)
        return recorder.modules()

    assert modules() == ["engine", "app"]
    assert modules() == ["app"]
    (root / "assets").mkdir()
    (root / "assets" / "smolmoe.safetensors").write_bytes(b"new")
    assert modules() == ["engine", "app"]
    recorder.fail["app"] = Result(1)  # it may be the store that is damaged
    assert modules() == ["app"]
    assert modules() == ["engine", "app"]
    recorder.fail.clear()
    store.unlink()
    assert modules() == ["engine", "app"]


def test_changed_requirements_are_installed_again(root):
    recorder = Recorder()
    launcher.set_up(root, ["requirements.txt"], recorder)
    (root / "requirements.txt").write_text("first==1.0\nsecond==1.0\n")
    launcher.set_up(root, ["requirements.txt"], recorder)
    assert recorder.modules() == ["venv", "pip", "pip"]
    assert has(root, "second")


def test_interrupted_install_starts_from_a_new_environment(fake):
    root, recorder = fake
    (root / "requirements.txt").write_text("first==1.0\nsecond==1.0\n")

    def killed(command, *rest, **options):
        raise SystemExit(9)

    with pytest.raises(SystemExit):
        launcher.set_up(root, ["requirements.txt"], killed)
    leftover = root / ".venv" / "leftover"
    leftover.touch()
    launcher.set_up(root, ["requirements.txt"], recorder)
    assert recorder.modules() == ["venv", "pip"]
    assert not leftover.exists()
    launcher.set_up(root, ["requirements.txt"], recorder)
    assert len(recorder.commands) == 2


@pytest.mark.skipif(os.name == "nt", reason="the interpreter is a link only elsewhere")
def test_missing_or_other_interpreter_starts_from_a_new_environment(fake):
    root, recorder = fake
    launcher.venv_python(root).unlink()
    launcher.set_up(root, ["requirements.txt"], recorder)
    assert recorder.modules() == ["venv", "pip"]
    stamp = root / ".venv" / "requirements.txt.installed"
    stamp.write_text("3.9 " + stamp.read_text().split()[1])
    launcher.set_up(root, ["requirements.txt"], recorder)
    assert recorder.modules() == ["venv", "pip"] * 2


@pytest.mark.parametrize(
    "errors, words, kept",
    [
        ("NewConnectionError: [Errno -3] Temporary failure in name resolution", ("internet", "proxy"), True),
        ("ERROR: Could not find a version (from versions: none)", ("64-bit Python", sys.platform), True),
        ("OSError: [Errno 28] No space left on device", ("disk is full", "Free some space"), False),
        ("PermissionError: [Errno 13] Permission denied: 'x'", ("cannot be written", "Close other"), False),
        ("something else", ("lines above",), False),
    ],
)
def test_failed_install_says_what_to_do(root, errors, words, kept):
    recorder = Recorder(real=False)
    recorder.fail["pip"] = Result(1, errors)
    with pytest.raises(LaunchError) as error:
        launcher.start([], root, recorder)
    assert all(word in str(error.value) for word in ("requirements.txt", "start Outrider again", *words))
    recorder.fail.clear()
    recorder.commands.clear()
    launcher.start([], root, recorder)  # the environment itself is made anew only when pip may have broken it
    assert recorder.modules() == (["pip"] if kept else ["venv", "pip"]) + ["engine", "app"]


def test_missing_venv_module(root, monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="python3-venv"):
        launcher.start([], root, Recorder(real=False))


def test_failed_model_step_stops(fake):
    root, recorder = fake
    recorder.fail["engine"] = Result(1)
    with pytest.raises(LaunchError, match="model is not ready"):
        launcher.start([], root, recorder)
    assert "app" not in recorder.modules()


def test_options_reach_the_app(fake):
    root, recorder = fake
    arguments = ["--host", "0.0.0.0", "--port", "7777", "--share", "--no-browser", "--auth", "me:secret"]
    launcher.start(arguments, root, recorder)
    assert recorder.commands[0] == ["-m", "engine", "fetch-default"]
    command = recorder.commands[1]
    assert command[:2] == ["-m", "app"]
    assert sorted(command[2:]) == sorted(arguments)


def test_models(fake, tmp_path):
    root, recorder = fake

    def commands(model: str) -> list[list[str]]:
        recorder.commands.clear()
        launcher.start(["--model", model], root, recorder)
        return recorder.commands

    def app(model: str) -> list[str]:
        return ["-m", "app", "--model", model]

    assert commands("default") == [["-m", "engine", "fetch-default"], app("default")]
    prepared = root / "models" / "org--moe"
    prepare = ["-m", "engine", "prepare", "org/moe", str(prepared), "--experts", "int4"]
    assert commands("org/moe") == [prepare, app("org--moe")]
    prepared.mkdir(parents=True)
    (prepared / "store.json").touch()
    assert commands("org/moe") == [app("org--moe")]
    assert commands("org--moe") == [app("org--moe")]
    assert commands(str(prepared)) == [app(str(prepared))]
    folders = [tmp_path / "a" / "moe", tmp_path / "b" / "moe"]
    for folder in folders:
        folder.mkdir(parents=True)
    (one, app_one), (other, app_other) = (list(commands(str(folder))) for folder in folders)
    assert [one[3], other[3]] == [str(folder) for folder in folders]
    assert one[4] != other[4] and app_one != app_other
    with pytest.raises(LaunchError, match="no-such-model"):
        commands("no-such-model")


def test_test_command_installs_both_files_and_runs_pytest(root):
    recorder = Recorder(real=False)
    recorder.fail["pytest"] = Result(5)
    assert launcher.start(["test", "-k", "nothing"], root, recorder) == 5
    assert recorder.modules() == ["venv", "pip", "pip", "engine", "pytest"]
    assert recorder.commands[-1] == ["-m", "pytest", "-k", "nothing"]


def test_cuda_build_for_windows(root, monkeypatch):
    monkeypatch.setattr(launcher, "wants_cuda_index", lambda: True)
    (root / "requirements.txt").write_text("torch==2.13.0\n")
    recorder = Recorder(real=False)
    launcher.set_up(root, ["requirements.txt"], recorder)
    _, cuda, rest = recorder.commands
    assert cuda[4:] == ["torch==2.13.0", "--index-url", launcher.CUDA_INDEX]
    assert rest[4:] == ["-r", "requirements.txt"]
    monkeypatch.undo()
    monkeypatch.setattr(launcher.shutil, "which", lambda name: "nvidia-smi")
    assert launcher.wants_cuda_index("win32") and not launcher.wants_cuda_index("linux")


def test_second_launcher_waits_for_the_first(root, capsys):
    hold = "import launcher, pathlib, sys, time\nwith launcher.setup_lock(pathlib.Path(sys.argv[1])):\n"
    hold += "    print(1, flush=True)\n    time.sleep(1)"
    command = [sys.executable, "-c", hold, str(root)]
    first = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "1\n"
    with launcher.setup_lock(root):
        assert first.wait(60) == 0
    assert "Another window" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_app_too(fake, number, code):
    root, _ = fake
    (root / "app").mkdir()
    app = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    (root / "app" / "__main__.py").write_text(app)
    (root / "engine.py").touch()
    (root / "launcher.py").write_text((PROJECT / "launcher.py").read_text())
    command = [sys.executable, "launcher.py"]

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite started in the background inherits that they are ignored

    process = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    )
    pid = next(int(line) for line in process.stdout if line.strip().isdigit())
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(90) == code
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_wrapper_finds_a_python_and_passes_options_on(root):
    wrapper = root / "Outrider.command"
    wrapper.write_bytes((PROJECT / wrapper.name).read_bytes())
    (root / "launcher.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    command = ["/bin/sh", str(wrapper), "--port", "1"]
    result = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (3, "['--port', '1']")
