"""Downloads from a hub on loopback, in other processes: huggingface_hub reads its environment at import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from engine.errors import SourceError
from engine.store.hub import _check_disk
from engine.store.layout import read_info
from engine.store.writer import prepare
from tests.store.hub_server import COMMIT, HubServer, Repository
from tests.tiny_models import write_checkpoint

PROJECT = Path(__file__).resolve().parents[2]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WORKER = """
import json, os, sys, threading
from pathlib import Path
from engine.errors import OutriderError
from engine.store.hub import HubSource
from engine.store.writer import prepare

def read_all(source):
    out = {}
    try:
        for name in source.shards:
            out[name] = source.open_shard(name).read_bytes().hex()
            source.release_shard(name)
    finally:
        source.close()
    return out

def show(value):
    print(json.dumps(value), flush=True)

for line in sys.stdin:
    try:
        exec(json.loads(line))
    except OutriderError as error:
        show(str(error))
"""
READ_ALL = "show(read_all(HubSource('org/moe')))"


class Worker:
    """A process that runs snippets with HF_ENDPOINT and HF_HOME set; shared, as importing takes seconds."""

    def __init__(self, endpoint: str, home: Path, **env: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=PROJECT,
            env={**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str):
        """What `code` shows, the message of the OutriderError it raises, or the exit code it ends with."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def content(seed: int, size: int = 3 << 20) -> bytes:
    return bytes((seed + i * 7) % 251 for i in range(256)) * (size // 256)


def repository(**settings) -> Repository:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    files = {
        "README.md": b"not needed",
        "config.json": b'{"model_type": "qwen2_moe"}',
        "tokenizer.json": b"{}" * 1000,
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[1]: content(2),
        SHARDS[0]: content(1),
        "original/model.safetensors": b"another copy",
    }
    return Repository({**files, **settings.pop("files", {})}, **settings)


@pytest.fixture(scope="module")
def server():
    server = HubServer({})
    yield server
    server.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def shared(server, cache):
    with Worker(server.endpoint, cache) as worker:
        yield worker


@pytest.fixture
def hub(server) -> HubServer:
    server.repositories = {"org/moe": repository()}
    server.requests.clear()
    return server


@pytest.fixture
def home(cache) -> Path:
    """HF_HOME, empty."""
    for path in cache.iterdir():
        shutil.rmtree(path)
    return cache


@pytest.fixture
def run(shared, home):
    return shared.run


def expected(hub: HubServer) -> dict[str, str]:
    return {name: hub.repositories["org/moe"].files[name].hex() for name in SHARDS}


def test_shards_come_one_at_a_time_and_leave_nothing_behind(hub, run):
    code = """
source = HubSource("org/moe")
small = sorted(path.name for path in source.config_dir.iterdir())
held, names = [], source.shards
for name in names:
    source.open_shard(name)
    held.append(len(list(source.config_dir.glob("*.safetensors"))))
    source.release_shard(name)
source.close()
show([source.name, names, small, held, source.config_dir.exists()])
"""
    name, shards, small, held, exists = run(code)
    assert name == f"org/moe@{COMMIT}"
    assert shards == list(SHARDS)
    assert small == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert held == [1, 1]
    assert not exists
    assert run(READ_ALL) == expected(hub)
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in hub.requests if "/resolve/" in path)


def test_single_file_and_revision(hub, run):
    files = {"config.json": b"{}", "model.safetensors": content(3), "consolidated.safetensors": content(4)}
    hub.repositories["org/one"] = Repository(files)
    code = f"source = HubSource('org/one@{COMMIT}')\nshow(read_all(source))"
    assert run(code) == {"model.safetensors": content(3).hex()}
    assert "no such revision" in run("HubSource('org/one@v9')")


def test_lost_connection_resumes_within_a_run(hub, run):
    hub.repositories["org/moe"].cut[SHARDS[0]] = 1_500_000
    hub.repositories["org/moe"].status[SHARDS[1]] = [503]
    assert run(READ_ALL) == expected(hub)
    first, second = hub.downloads(SHARDS[0])
    assert first is None and 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 1_500_000
    assert len(hub.downloads(SHARDS[1])) == 2


def test_server_without_ranges_starts_over(hub, run):
    hub.repositories["org/moe"].cut[SHARDS[0]] = 1_500_000
    hub.repositories["org/moe"].ranges = False
    assert run(READ_ALL) == expected(hub)


def test_killed_download_resumes_in_the_next_run(hub, home, run):
    code = f"""
def kill(progress):
    if progress.stage.endswith("{SHARDS[0]}") and progress.done > 2_000_000:
        os._exit(9)
read_all(HubSource("org/moe", progress=kill))
"""
    with Worker(hub.endpoint, home) as doomed:
        assert doomed.run(code) == 9
    partial = next(home.rglob(SHARDS[0] + ".partial")).stat().st_size
    assert partial > 0
    assert run(READ_ALL) == expected(hub)
    assert hub.downloads(SHARDS[0]) == [None, f"bytes={partial}-"]


def test_cancelled_download_is_kept(hub, home, run):
    code = """
cancel = threading.Event()
def stop(progress):
    if progress.stage.endswith(".safetensors"):
        cancel.set()
source = HubSource("org/moe", progress=stop, cancel=cancel)
try:
    source.open_shard(source.shards[0])
finally:
    source.close()
"""
    assert "cancelled" in run(code)
    assert list(home.rglob("*.partial"))
    assert run(READ_ALL) == expected(hub)


@pytest.mark.parametrize("name, kind", [(SHARDS[1], "sha256"), ("tokenizer.json", "git id")])
def test_damaged_file_is_refused(hub, run, home, name, kind):
    hub.repositories["org/moe"].corrupt.add(name)
    message = run(READ_ALL)
    assert name in message and f"expected {kind}" in message and "found" in message
    assert not list(home.rglob(name + "*"))
    hub.repositories["org/moe"].corrupt.clear()
    assert run(READ_ALL) == expected(hub)


def test_shard_in_the_hub_cache_is_used_and_left_there(hub, run):
    fetch = f"from huggingface_hub import hf_hub_download\nshow(hf_hub_download('org/moe', '{SHARDS[0]}'))"
    cached = Path(run(fetch))
    downloads = len(hub.downloads(SHARDS[0]))
    assert run(READ_ALL) == expected(hub)
    assert len(hub.downloads(SHARDS[0])) == downloads
    assert cached.is_file()


def test_second_process_is_told_to_wait(hub, home, run):
    with Worker(hub.endpoint, home) as first:
        assert first.run("source = HubSource('org/moe')\nshow(1)") == 1
        assert "by another process" in run(READ_ALL)
    assert run(READ_ALL) == expected(hub)


def test_token(hub, run):
    hub.repositories["org/moe"].token = "hf_secret"
    with_token = "os.environ['HF_TOKEN'] = {!r}\ntry:\n    {}\nfinally:\n    del os.environ['HF_TOKEN']"
    assert "HF_TOKEN" in run(READ_ALL)
    assert "HTTP status 401" in run(with_token.format("hf_wrong", READ_ALL))
    assert run(with_token.format("hf_secret", READ_ALL)) == expected(hub)
    hub.repositories["org/moe"].gated = True
    assert "gated: accept its terms" in run(with_token.format("hf_wrong", READ_ALL))


def test_what_cannot_be_downloaded(hub, run):
    hub.repositories["org/bin"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.repositories["org/data"] = Repository({"README.md": b""})
    hub.repositories["org/hole"] = repository()
    del hub.repositories["org/hole"].files[SHARDS[1]]
    for model, words in {
        "org/bin": ("no safetensors", "pytorch_model.bin", "convert"),
        "org/data": ("no config.json", "another hub id"),
        "org/hole": (SHARDS[1], "another hub id"),
        "org/none": ("HTTP status 401", "check its name", "HF_TOKEN"),
        "org/a b": ("no hub id", "org/name"),
    }.items():
        message = run(f"HubSource({model!r})")
        assert model in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "endpoint, env, words",
    [
        (None, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("http://127.0.0.1:9", {}, "check the internet connection"),
    ],
)
def test_no_network(hub, home, endpoint, env, words):
    with Worker(endpoint or hub.endpoint, home, **env) as worker:
        message = worker.run(READ_ALL)
    assert "org/moe" in message and words in message


def test_full_disk(tmp_path):
    with pytest.raises(SourceError, match="not enough disk.*HF_HOME"):
        _check_disk(tmp_path / "model.safetensors", 1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's file size")
def test_failed_write_names_the_file(hub, home, run):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    with Worker(hub.endpoint, home) as worker:
        message = worker.run(limit + READ_ALL)
    assert "cannot write" in message and SHARDS[0] in message and "HF_HOME" in message
    assert run(READ_ALL) == expected(hub)


def test_prepare_from_the_hub_equals_prepare_from_disk(hub, home, run, tmp_path):
    checkpoint = write_checkpoint("qwen2_moe", tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    names = [f"model-{i:05}-of-00004.safetensors" for i in range(4)]
    index = {key: names[i % 4] for i, key in enumerate(sorted(tensors))}
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix != ".safetensors"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    for name in names:
        files[name] = save({key: tensors[key] for key, shard in index.items() if shard == name})
    hub.repositories["org/tiny"] = Repository(files, cut={names[1]: 5000})

    local = prepare(checkpoint, tmp_path / "local", "bf16")
    remote = tmp_path / "remote"
    assert run(f"show(str(prepare('org/tiny', Path({str(remote)!r}), 'bf16')))") == str(remote)
    for name in ("experts.bin", "resident.safetensors", "config.json"):
        assert (remote / name).read_bytes() == (local / name).read_bytes()
    assert read_info(remote).source == f"org/tiny@{COMMIT}"
    assert not list((home / "outrider").glob("*/*"))
