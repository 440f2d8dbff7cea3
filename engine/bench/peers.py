"""`bench peers`: accelerate's disk offload and the engine on one checkpoint, each in its own process under one memory
limit.

The limit is a memory cgroup (version 1), so this needs root on Linux. Both processes get the same bytes; each loads the
model itself and reports its seconds a token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from engine.bench.measure import Spread, interpreter_rss, machine, print_table
from engine.config import PROJECT_DIR, format_size
from engine.errors import ConfigError
from engine.store.layout import read_info

_CGROUP = Path("/sys/fs/cgroup/memory")
_SLACK = 300 * 2**20  # above interpreter, resident weights and the experts' share: KV, scratch, allocator

_ENGINE = """
import json, sys
from engine.bench.measure import generate
from engine.config import EngineConfig
from engine.engine import Engine
store, share, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Engine(EngineConfig(model=store, expert_memory=share, context=512)) as engine:
    timed = generate(engine, list(range(100, 132)), tokens, warm_up=8)
print(json.dumps({"seconds": timed.seconds, "rss": timed.stats.rss_bytes}))
"""

_ACCELERATE = """
import json, sys, torch, psutil
from transformers import AutoModelForCausalLM
from engine.bench.overhead import _plain_seconds
checkpoint, memory, tokens, offload = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype="auto", device_map="auto", max_memory={"cpu": memory}, offload_folder=offload,
    offload_state_dict=True)
_plain_seconds(model, list(range(100, 132)), 1)
print(json.dumps({"seconds": _plain_seconds(model, list(range(100, 132)), tokens), "rss":
psutil.Process().memory_info().rss}))
"""


def run_peers(name: str, checkpoint: Path, store: Path, share: str, repeats: int, tokens: int) -> dict:
    """Alternate both under the same limit: interpreter + resident weights + `share` of the experts + slack.

    The peer brings a layer's experts in whole to compute it, so it keeps one layer less than its share in memory.
    """
    if not os.access(_CGROUP, os.W_OK):
        raise ConfigError(
            f"{_CGROUP} is not writable: peers are compared under a cgroup v1 memory limit, which needs root on Linux"
        )
    info = read_info(store)
    experts = int(float(share.rstrip("%")) / 100 * info.expert_bytes_total)
    limit = interpreter_rss() + info.resident_bytes + experts + _SLACK
    ours: list[dict] = []
    theirs: list[dict] = []
    with _limited(limit) as group, tempfile.TemporaryDirectory(dir=store.parent) as offload:
        for _ in range(repeats):
            ours.append(_run(group, _ENGINE, [str(store), share, str(tokens)]))
            memory = str(info.resident_bytes + max(0, experts - info.expert_bytes_total // len(info.layers)))
            theirs.append(_run(group, _ACCELERATE, [str(checkpoint), memory, str(max(2, tokens // 8)), offload]))
    seconds = [r["seconds"] for r in ours], [r["seconds"] for r in theirs]
    ratio = Spread.of([t / o for o, t in zip(*seconds, strict=True)])
    print_table(f"{name}: {share} of the experts, processes limited to {format_size(limit)}", [{
        "engine tok/s": Spread.of([1 / s for s in seconds[0]]),
        "accelerate disk offload tok/s": Spread.of([1 / s for s in seconds[1]]),
        "engine is faster by": ratio,
    }])  # fmt: skip
    return {"benchmark": "peers", "model": name, "machine": machine(), "share": share, "limit_bytes": limit,
            "engine": ours, "accelerate": theirs}  # fmt: skip


@contextmanager
def _limited(limit: int):
    """A memory cgroup of `limit` bytes, removed afterwards."""
    group = _CGROUP / f"outrider-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def _run(group: Path, code: str, arguments: list[str]) -> dict:
    """Run `code` in a process inside `group`; its last line of output, as JSON."""
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    result = subprocess.run(
        [sys.executable, "-c", enter + code, *arguments], capture_output=True, text=True, cwd=PROJECT_DIR
    )
    if result.returncode:
        raise ConfigError(
            f"a compared process failed: {result.stderr.strip().splitlines()[-1] if result.stderr else 'killed'}"
        )
    return json.loads(result.stdout.splitlines()[-1])
