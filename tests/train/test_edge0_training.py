"""What is trained is what the engine then runs, and a run that was interrupted ends as one that was not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from engine import ConfigError, Mode
from engine.train.chats import load_chats, save_chats
from engine.train.descent import DescentSettings
from engine.train.edge0.capture import capture
from engine.train.edge0.data import gather, read_jsonl, tokenise
from engine.train.edge0.fit import FitSettings, agreement, fit_head, soft_target
from engine.train.edge0.path import TrainedHead, Turns, features
from engine.train.edge0.recover import RecoverySettings, Student, recover
from engine.train.edge0.run import HEADS_FILE, LORA_FILE, TrainSettings, fit_heads, train
from tests.streaming import error_of, open_engine

SETTINGS = TrainSettings(
    tokens=2000, scored=3, max_tokens=10, fit=FitSettings(inner=8, epochs=2, batch=32),
    recovery=RecoverySettings(rank=4, descent=DescentSettings(batch_tokens=128, save_every=2)),
)  # fmt: skip


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def chats(store, tmp_path_factory):
    """Chats that a tiny model wrote, taught by itself."""
    with open_engine(store("qwen2_moe"), context=1024) as engine:
        return gather(engine, [], 20, tmp_path_factory.mktemp("work"), 0, 10, silent)


def test_conversations_become_positions(store, tmp_path):
    path = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"},
            {"role": "user", "content": "f"}, {"role": "assistant", "content": "g h"}]  # fmt: skip
    path.write_text(json.dumps(talk) + "\n\n" + json.dumps({"messages": talk[:2]}) + "\n" + json.dumps(talk[:1]) + "\n")
    assert list(read_jsonl(path)) == [talk, talk[:2]]
    with open_engine(store("qwen2_moe")) as engine:
        ids, targets = tokenise(engine, talk, 1000)
        end = engine.tokenizer.eos_token_id
        replies = [engine.tokenizer.encode(m["content"], add_special_tokens=False) + [end] for m in (talk[1], talk[3])]
        assert [ids[t + 1] for t in targets] == [*replies[0], *replies[1]]
        assert tokenise(engine, talk, 5) is None
        chat = gather(engine, [path], 0, tmp_path, 0, 10, silent)[0]
        assert chat.ids.tolist() == ids and chat.targets.tolist() == targets
        wanted = engine.force(ids[: targets[0] + 1], replies[0]).log_softmax(-1)
        got = chat.top_log_probs[: len(replies[0])]
        torch.testing.assert_close(wanted.gather(1, chat.top_ids[: len(got)]), got, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("line", ['{"role": "user"}', "[1, 2]", "nonsense", '[{"role": "user"}]'])
def test_a_line_that_is_no_conversation_is_named(line, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('[{"role": "user", "content": "a"}]\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_jsonl(path))


def test_turns_know_what_was_decoded():
    turns = Turns.of_targets([torch.tensor([2, 3, 4, 8, 9])], 12)
    assert torch.nonzero(turns.decoded[0])[:, 0].tolist() == [3, 4, 9]
    assert torch.nonzero(turns.followed[0])[:, 0].tolist() == [4]


def test_features_know_the_experts_of_this_and_of_a_followed_token():
    turns = Turns.of_targets([torch.tensor([0, 1, 2, 3])], 4)
    ran = torch.tensor([[[0, 1], [1, 2], [2, 3], [3, 4]]])
    made = features(torch.zeros(1, 4, 1), ran, turns, 4)[0, :, 1:]
    assert made[2].tolist() == [0, 0, 1, 1, 0, 1, 1, 0]
    assert made[1].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]  # the token before the first decoded one is unknown
    assert made[3].tolist() == [0, 0, 0, 1, 0, 0, 1, 1]  # index 4 means no expert


def test_capture_sees_what_the_routers_see(store, chats, tmp_path):
    with open_engine(store("qwen2_moe"), slots=4) as engine:
        captured = capture(engine, chats[:3], tmp_path / "captured")
        seen = []
        engine.trace(chats[1].ids.tolist(), lambda layer, m, routing: seen.append((m, routing)))
    rows = captured.chat == 1
    for layer, (m, routing) in enumerate(seen):
        got_m, got_logits, got_ids = captured.layer(layer)
        torch.testing.assert_close(got_m[rows].float(), m.float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got_logits[rows].float(), routing.logits.float(), rtol=1e-2, atol=1e-2)
        assert torch.equal(got_ids[rows].long(), routing.ids)


def test_a_head_learns_what_can_be_known(store, chats, tmp_path):
    """Routing that follows from the token before is foreseen; chance would agree in three of eight."""
    with open_engine(store("qwen2_moe")) as engine:
        captured = capture(engine, chats, tmp_path / "captured")
        law, gate = engine.routing_law(), engine.router_weight(1)
    rule = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    logits = captured.layer(0)[0].float() @ rule.T
    logits = torch.cat([logits[:1], logits[:-1]])
    np.save(captured.directory / "logits.1.npy", logits.half().numpy())
    np.save(captured.directory / "ids.1.npy", law.select(logits)[0].short().numpy())
    _, found = fit_head(captured, 0, gate, law, 8, FitSettings(inner=16, epochs=60, batch=32, lr=1e-2))
    assert found["overlap"] > 0.6
    assert found["mass"] > 0.6


def test_agreement_is_one_with_oneself(store):
    with open_engine(store("deepseek_v3")) as engine:
        law = engine.routing_law()
    logits = torch.randn(10, 8)
    ids, _ = law.select(logits)
    found = agreement(logits, soft_target(logits, ids, law), ids, law)
    assert found == {"overlap": 1.0, "mass": pytest.approx(1.0), "top1": 1.0}
    torch.testing.assert_close(soft_target(logits, ids, law).sum(-1), torch.ones(10))


@pytest.mark.parametrize("experts", ["bf16", "int4"])
def test_what_is_trained_is_what_runs(experts, own_store, chats, tmp_path):
    directory, shard = own_store("qwen2_moe", experts), tmp_path / "chats.safetensors"
    save_chats(shard, chats)
    report = train(str(directory), [shard], 0, tmp_path / "work", directory, "auto", True, SETTINGS, silent)
    assert report["after"]["kl"] < report["before"]["kl"]
    assert set(report["after"]["agreement"]) == {1, 2} and set(report["agreement"]) == {1, 2}
    with open_engine(directory, slots=8, mode=Mode.EDGE0) as engine:
        info, law = engine.info, engine.routing_law()
        chat = chats[0]
        first = int(chat.targets[0])
        reply = chat.ids[first + 1 : int(chat.targets[-1]) + 2].tolist()
        got = engine.force(chat.ids[: first + 1].tolist(), reply)
    saved = torch.load(tmp_path / "work" / "heads.pt", weights_only=True)["heads"]
    student = Student(directory, info, {o: TrainedHead(**t) for o, t in saved.items()}, law, SETTINGS.recovery)
    student.load_trained(torch.load(tmp_path / "work" / "recovery.pt", weights_only=True)["trained"])
    one = type(chat)(chat.ids[: first + 1 + len(reply)], chat.targets[: len(reply)], chat.top_ids, chat.top_log_probs)
    with torch.no_grad():
        wanted = student.model.get_output_embeddings()(student.hidden([one], record=False))
    assert error_of(got, wanted) < (0.01 if experts == "bf16" else 0.1)
    with pytest.raises(ConfigError, match="exists"):
        train(str(directory), [shard], 0, tmp_path / "work", directory, "auto", True, SETTINGS, silent)


def test_an_interrupted_recovery_ends_as_if_it_had_not_been(own_store, chats, tmp_path):
    directory = own_store("qwen2_moe")

    def student() -> Student:
        with open_engine(directory) as engine:
            heads, _ = fit_heads(engine, chats, tmp_path, SETTINGS, silent)
            return Student(directory, engine.info, heads, engine.routing_law(), SETTINGS.recovery)

    whole = student()
    recover(whole, chats, SETTINGS.recovery, tmp_path / "whole.pt", lambda _: None)

    class Killed(Exception):  # noqa: N818
        pass

    def kill(step: dict) -> None:
        if step["step"] == 3:
            raise Killed

    with pytest.raises(Killed):
        recover(student(), chats, SETTINGS.recovery, tmp_path / "part.pt", kill)
    rest = student()
    recover(rest, chats, SETTINGS.recovery, tmp_path / "part.pt", lambda _: None)
    for name, tensor in whole.trained().items():
        torch.testing.assert_close(tensor, rest.trained()[name])


def test_heads_alone_need_no_back_propagation(own_store, tmp_path):
    directory = own_store("mixtral")
    report = train(str(directory), [], 6, tmp_path / "work", tmp_path / "out", "auto", False, SETTINGS, silent)
    assert "after" not in report
    assert (tmp_path / "out" / HEADS_FILE).is_file() and not (tmp_path / "out" / LORA_FILE).exists()
    assert load_chats(tmp_path / "work" / "taught-000.safetensors")


def test_nothing_to_train_on_is_an_error(own_store, tmp_path):
    with pytest.raises(ConfigError, match="--self-generate"):
        train(str(own_store()), [], 0, tmp_path / "work", tmp_path / "out", "auto", False, SETTINGS, silent)
