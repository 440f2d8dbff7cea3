"""The command line as scripts see it: one JSON object last on stdout, or one line on stderr and exit code 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import EngineConfig, GenerationConfig, parse_size
from engine.cli import main
from engine.store.layout import read_info
from tests.streaming import open_engine

PROJECT = Path(__file__).resolve().parents[1]
STATS = {
    "prompt_tokens", "completion_tokens", "ttft_s", "tok_s", "prefill_tok_s", "mode", "prefetch", "hit_rate", "late",
    "misses", "dropped", "bytes_read", "read_s", "stall_s", "hidden_io", "expert_budget_bytes", "peak_active_bytes",
    "active_bytes_by_kind", "rss_bytes", "device",
}  # fmt: skip


def run(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "engine", *map(str, arguments)]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, input=stdin, check=False
    )


def last_json(result: subprocess.CompletedProcess) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# -- as processes ----------------------------------------------------------------------------------------------------


def test_prepare_then_chat(checkpoint, tmp_path):
    made = last_json(run("prepare", checkpoint("qwen2_moe"), tmp_path / "store", "--experts", "int8", "--json"))
    assert (made["expert_format"], made["experts"], made["layers"]) == ("int8", 8, 3)
    arguments = ("--prompt", "hello there", "--greedy", "--max-tokens", 7, "--expert-memory", "50%", "--context", 128)
    result = run("chat", tmp_path / "store", *arguments, "--json")
    reply = last_json(result)
    assert set(reply) == {"text", "token_ids", "finish_reason", "stats"}
    assert STATS <= set(reply["stats"])
    assert len(reply["token_ids"]) == reply["stats"]["completion_tokens"] == 7
    assert reply["finish_reason"] == "length"
    assert reply["stats"]["dropped"] == 0
    assert reply["stats"]["expert_budget_bytes"] == parse_size("50%", read_info(tmp_path / "store").expert_bytes_total)
    assert len(result.stdout.splitlines()) == 1
    with open_engine(tmp_path / "store", None) as engine:
        prompt = engine.encode_chat([{"role": "user", "content": "hello there"}])
        chunks = list(engine.complete(prompt, GenerationConfig(max_tokens=7, temperature=0)))
    assert reply["token_ids"] == [token for chunk in chunks for token in chunk.token_ids]
    assert reply["text"] == "".join(chunk.text for chunk in chunks)


def test_an_error_is_one_line(store):
    result = run("chat", store("qwen2_moe"), "--prompt", "hello", "--expert-memory", "1KiB")
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: expert memory 1.0 KiB is below the minimum")
    assert "Traceback" not in line


def test_debug_shows_where_an_error_comes_from(store):
    result = run("plan", store("qwen2_moe"), "--expert-memory", "lots", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "expert memory 'lots' is not a size" in result.stderr


def test_an_interactive_chat(store):
    said = "hello\n\n/new\nhello again\n/quit\n"
    result = run("chat", store("qwen3_5_moe"), "--max-tokens", 4, "--seed", 1, "--expert-memory", "50%", stdin=said)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no word of libraries about what they lack
    assert "12 of 24 experts in memory" in result.stdout
    assert result.stdout.count("[4 tokens, ") == 2


# -- in this process -------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(capsys):
    """cli(arguments) -> (exit code, stdout, lines of stderr)."""

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    return call


def test_plan(cli, store):
    code, out, _ = cli("plan", store("qwen2_moe"), "--expert-memory", "25%", "--context", 4096, "--json")
    plan = json.loads(out.splitlines()[-1])
    assert code == 0
    assert plan["fits"] is True
    assert plan["total_bytes"] == sum(plan[f"{kind}_bytes"] for kind in ("resident", "kv", "scratch", "adapter", "draft")) \
        + plan["expert_budget_bytes"]  # fmt: skip
    code, out, _ = cli("plan", store("qwen2_moe"), "--expert-memory", "25%")
    assert code == 0
    for word in ("resident", "experts", "KV cache", "scratch", "total", "slots               6 for 24 experts", "fits"):
        assert word in out


def test_info(cli, own_store):
    directory = own_store(experts="int4")
    code, out, _ = cli("info", directory, "--json")
    info = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (info["expert_format"], info["experts"], info["top_k"], info["layers"]) == ("int4", 8, 3, 3)
    assert 0.1 < info["quantised_share"] < 1
    code, out, _ = cli("info", directory)
    assert "3 layers x 8, top-3, int4" in out
    assert cli("info", directory, "--verify")[0] == 0
    content = bytearray((directory / "experts.bin").read_bytes())
    content[5000] ^= 1
    (directory / "experts.bin").write_bytes(content)
    code, _, err = cli("info", directory, "--verify")
    assert code == 1
    assert "experts.bin is damaged at byte 4096" in err[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere"], "no model 'nowhere': it is neither"),
        (["plan", "STORE", "--expert-memory", "5 apples"], "expert memory '5 apples' is not a size: write 64MiB"),
        (["plan", "STORE", "--context", "3"], "context 3 is too small: at least 16"),
        (["plan", "STORE", "--context", "many"], "argument --context: invalid int value: 'many'"),
        (["plan", "STORE", "--prefetch", "psychic"], "argument --prefetch: invalid choice: 'psychic'"),
        (["plan", "STORE", "--unheard-of"], "unrecognized arguments: --unheard-of"),
        (["chat", "STORE", "--prompt", "hi", "--top-p", "3"], r"top p 3.0 is outside (0, 1]"),
        (["chat", "STORE", "--prompt", "word " * 99, "--context", "32"], "tokens and the context is 32: shorten"),
        (["prepare", "STORE", "elsewhere"], "is a prepared store already: use it as it is"),
        (
            ["prepare", "no/where/at/all", "elsewhere"],
            "does not exist; give the directory of a Hugging Face checkpoint",
        ),
        (["prepare", "STORE", "elsewhere", "--experts", "int3"], "argument --experts: invalid choice: 'int3'"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_errors_are_one_line_and_say_what_to_do(cli, store, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    places = {"STORE": store("qwen2_moe"), "elsewhere": tmp_path / "elsewhere"}
    code, out, err = cli(*(places.get(argument, argument) for argument in arguments))
    assert code == 1
    assert out == ""
    assert len(err) == 1, err
    assert err[0].startswith("error: ")
    assert message in err[0]


def test_what_nobody_expected_is_one_line_too(cli, store, monkeypatch):
    def explode(*_):
        raise KeyError("first line\nsecond line")

    monkeypatch.setattr("engine.engine.make_plan", explode)
    code, _, err = cli("plan", store("qwen2_moe"))
    assert code == 1
    assert len(err) == 1
    assert "unexpected KeyError" in err[0]
    assert "--debug" in err[0]
    with pytest.raises(KeyError):
        cli("plan", store("qwen2_moe"), "--debug")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in ("prepare", "plan", "chat", "info", "bench", "fetch-default", "train-default"):
        assert command in text


def test_defaults_are_those_of_the_configuration(cli, store, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "engine.engine.plan", lambda config: seen.append(config) or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert cli("plan", store("qwen2_moe"))[0] == 130
    assert seen == [EngineConfig(str(store("qwen2_moe")))]
