"""The recipe's parts agree with one another on a tiny random llama: what is trained is what is built."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.errors import SourceError
from engine.train.asset import load_asset, save_asset, student_tensors
from engine.train.build import assemble, build_default_model
from engine.train.chats import Chat, generate_chats, load_chats, save_chats
from engine.train.descent import DescentSettings, make_batches
from engine.train.distil import DistilSettings, distil
from engine.train.loss import top_kl
from engine.train.prompts import Prompt, make_prompts
from engine.train.refine import refine
from engine.train.repair import repair_down
from engine.train.router import fit_router, ridge_router, routed_error, routing_weights
from engine.train.score import Comparison, Score, compare
from engine.train.split import SplitShape, mlp_inputs, split_model
from engine.train.student import Student

SHAPE = SplitShape(shared=16, experts=4, size=8, active=2)
RANK = 3


@pytest.fixture(scope="module")
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=True, initializer_range=0.2, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def chats(teacher) -> list[Chat]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in (12, 20, 9, 15, 15, 18, 11, 14):
        ids = torch.randint(3, 97, (length,), generator=generator)
        targets = torch.arange(4, length - 1)
        log_probs, top_ids = teacher(ids[None]).logits[0, targets].log_softmax(-1).topk(8)
        made.append(Chat(ids, targets, top_ids, log_probs))
    return made


@pytest.fixture(scope="module")
def splits(teacher, chats):
    return split_model(teacher, mlp_inputs(teacher, chats), SHAPE, RANK)


@pytest.fixture
def student(teacher, splits) -> Student:
    """A student whose corrections are not zero."""
    student = Student(teacher, splits, SHAPE, RANK, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in student.trained().items():
            # Values that bfloat16 holds exactly, because that is how an asset stores them.
            noise = 0.05 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_((tensor + noise if name.endswith(".b") else tensor).bfloat16())
    student.merge()
    return student


def asset_of(student: Student, path, **metadata: str):
    save_asset(path, student.shape, student_tensors(student), metadata)
    return load_asset(path)


def test_a_split_covers_every_neuron_exactly_once(splits):
    for split in splits:
        assert split.order.sort().values.tolist() == list(range(SHAPE.neurons))
        assert split.router.shape == (SHAPE.experts, 24)
    assert SHAPE.active_share == (16 + 2 * 8) / 48


def test_a_split_of_another_size_is_refused(teacher, chats):
    with pytest.raises(ValueError, match="covers 40 neurons, the layer has 48"):
        split_model(teacher, mlp_inputs(teacher, chats[:1]), SplitShape(8, 4, 8, 2), RANK)


def test_the_fitted_router_beats_the_ridge_router():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(512, 24, generator=generator)
    hidden = (
        torch.randn(512, 4, 24, generator=generator) * (x @ torch.randn(24, 4, generator=generator)).exp()[..., None]
    )
    grams = hidden @ hidden.mT
    ridge, fitted = ridge_router(x, grams), fit_router(x, grams, 2)
    error = [routed_error(grams, routing_weights(x, router, 2)).item() for router in (ridge, fitted)]
    assert error[1] < error[0]


def test_routing_weights_sum_to_the_number_selected():
    weights = routing_weights(torch.randn(5, 24), torch.randn(4, 24), 2)
    assert_close(weights.sum(1), torch.full((5,), 2.0))
    assert ((weights > 0).sum(1) == 2).all()


def test_a_repair_of_full_rank_is_the_least_squares_solution():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(200, 12, generator=generator)
    routed = hidden * (torch.rand(200, 12, generator=generator) > 0.3)
    down = torch.randn(6, 12, generator=generator)
    a, b = repair_down(hidden, routed, down, 6, ridge=0.0)
    best = torch.linalg.lstsq(routed, hidden @ down.T).solution.T
    assert_close(down + b @ a, best, rtol=1e-3, atol=1e-3)
    a, b = repair_down(hidden, routed, down, 2)
    repaired = (routed @ (down + b @ a).T - hidden @ down.T).norm()
    assert repaired < (routed @ down.T - hidden @ down.T).norm()


def test_with_every_expert_active_the_student_is_the_teacher(teacher, splits):
    dense = SplitShape(SHAPE.shared, SHAPE.experts, SHAPE.size, active=SHAPE.experts)
    student = Student(teacher, splits, dense, RANK, seed=0)
    for layer in student.lm.model.layers:
        layer.mlp.router.data.zero_()
        layer.mlp.down_proj.b.data.zero_()
    student.merge()
    ids = torch.arange(3, 17)[None]
    assert_close(student.logits(ids), teacher(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_student_computes_what_the_built_checkpoint_computes(student, teacher, tmp_path):
    model = assemble(teacher, asset_of(student, tmp_path / "asset.safetensors"), torch.float32)
    model.save_pretrained(tmp_path / "model")
    built = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert built.config.model_type == "qwen2_moe"
    ids = torch.randint(3, 97, (3, 21), generator=torch.Generator().manual_seed(5))
    assert_close(built(ids).logits, student.logits(ids), rtol=1e-4, atol=1e-4)


def test_the_built_checkpoint_has_the_hub_layout(student, teacher, tmp_path):
    from safetensors import safe_open

    model = assemble(teacher, asset_of(student, tmp_path / "asset.safetensors"), torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("model.layers.1.mlp.experts.3.down_proj.weight").shape == (24, 8)
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "model.layers.0.mlp.shared_expert_gate.weight" in names
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names


def test_gradients_are_those_of_plain_autograd(student, chats):
    chat = chats[0]
    names = [
        "layers.0.mlp.router",
        "layers.0.self_attn.q_proj.a",
        "layers.0.mlp.gate_proj.b",
        "layers.1.mlp.down_proj.b",
    ]
    parameters = [student.trained()[name] for name in names]
    hidden = student.hidden(chat.ids[None])[0, chat.targets]
    loss = top_kl(hidden, student.lm.lm_head.weight, chat.top_ids, chat.top_log_probs, chunk=4)
    gradients = torch.autograd.grad(loss, parameters)

    def value() -> float:
        student.merge()
        log_q = student.logits(chat.ids[None])[0, chat.targets].double().log_softmax(-1)
        kept, p = log_q.gather(1, chat.top_ids), chat.top_log_probs.double().exp()
        tail, q_tail = 1 - p.sum(1), 1 - kept.exp().sum(1)
        inner = (p * (p.log() - kept)).sum(1) + tail * (tail.log() - q_tail.log())
        return inner.mean().item()

    assert loss.item() == pytest.approx(value(), rel=1e-4)
    step = 1e-3
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            flat = parameter.view(-1)
            at = gradient.abs().flatten().argmax()
            values = []
            for sign in (1, -1):
                flat[at] += sign * step
                values.append(value())
                flat[at] -= sign * step
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient.flatten()[at].item(), rel=0.05)


def test_batches_cover_every_chat_once():
    lengths = [5 + i % 50 for i in range(300)]
    batches = make_batches(lengths, 200, seed=0)
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 200 for batch in batches)


def test_distillation_lowers_the_loss_and_resumes_identically(teacher, splits, chats, tmp_path):
    settings = DistilSettings(3e-3, 3e-3, DescentSettings(batch_tokens=40, save_every=2))
    losses: dict[str, list[float]] = {"whole": [], "parts": []}

    def fresh() -> Student:
        return Student(teacher, splits, SHAPE, RANK, seed=0)

    whole, first, second = fresh(), fresh(), fresh()
    before = Score.of(compare(lambda ids: teacher(ids).logits, fresh_logits(fresh()), chats))
    report = {name: (lambda step, kept=kept: kept.append(step["kl"])) for name, kept in losses.items()}
    repeated = chats * 4
    distil(whole, repeated, settings, tmp_path / "whole.pt", report["whole"])
    distil(first, repeated, settings, tmp_path / "parts.pt", report["parts"], stop_after=4)
    distil(second, repeated, settings, tmp_path / "parts.pt", report["parts"])
    assert losses["whole"] == losses["parts"]
    for name, tensor in whole.trained().items():
        assert torch.equal(tensor, second.trained()[name])
    after = Score.of(compare(lambda ids: teacher(ids).logits, whole.logits, chats))
    assert after.kl < before.kl
    with pytest.raises(ValueError, match="another run"):
        distil(fresh(), chats, settings, tmp_path / "parts.pt")


def fresh_logits(student: Student):
    student.merge()
    return student.logits


def test_refining_changes_nothing_at_first(student, teacher, chats):
    finer = refine(student, teacher, chats, 2, seed=0, push=0.0)
    assert finer.shape == SplitShape(16, 8, 4, 4)
    assert finer.shape.active_share == student.shape.active_share
    ids = torch.arange(3, 17)[None]
    assert_close(finer.logits(ids), student.logits(ids), rtol=1e-3, atol=1e-3)
    for old, new in zip(student.lm.model.layers, finer.lm.model.layers):
        assert torch.equal(old.mlp.order.sort().values, new.mlp.order.sort().values)
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        refine(student, teacher, chats, 3, seed=0)


def test_a_model_agrees_with_itself(teacher, chats):
    same = Score.of(compare(lambda ids: teacher(ids).logits, lambda ids: teacher(ids).logits, chats))
    assert same.kl == same.kl_error == pytest.approx(0, abs=1e-6)
    assert same.top1 == 1
    assert same.tokens == sum(len(chat.targets) for chat in chats)


def test_the_error_of_a_score_is_that_of_chats_not_of_tokens():
    def chat_of(*divergence: float) -> Comparison:
        return Comparison(*[torch.tensor(divergence)] * 4)

    # Equally long chats: the standard error of their means, 0.1 and 0.5 around 0.3, by hand 0.2 * sqrt(2) / 2.
    assert Score.of([chat_of(0.1, 0.1), chat_of(0.5, 0.5)]).kl_error == pytest.approx(0.2 * 2**0.5 / 2, rel=1e-5)
    # As many tokens that scatter as much within chats say nothing of how chats differ.
    assert Score.of([chat_of(0.1, 0.5), chat_of(0.5, 0.1)]).kl_error == pytest.approx(0, abs=1e-6)


class ByteTokenizer:
    """A chat template over letters, enough to render prompts."""

    eos_token, eos_token_id = "\x02", 2

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"[{m['role']}]{m['content']}\x02\n" for m in messages)
        return text + ("[assistant]" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [min(ord(c), 96) for c in text]}


def test_generated_chats_hold_the_teachers_own_distribution(teacher, tmp_path):
    prompts = [Prompt(None, ("Hi", "More"), 0.0), Prompt("Be kind", ("Hello you",), 0.7), Prompt(None, ("Yo",), 0.0)]
    chats = generate_chats(teacher, ByteTokenizer(), prompts, max_new=9, top_k=5, slots=2, seed=0)
    save_chats(tmp_path / "shard.safetensors", chats)
    for chat in load_chats(tmp_path / "shard.safetensors"):
        log_probs = teacher(chat.ids[None]).logits[0, chat.targets].log_softmax(-1)
        assert_close(log_probs.gather(1, chat.top_ids), chat.top_log_probs, rtol=0, atol=1e-2)
    greedy = chats[2]
    assert torch.equal(greedy.ids[greedy.targets + 1], greedy.top_ids[:, 0].long())


def test_prompts_are_distinct_and_reproducible():
    prompts = make_prompts(500, seed=7)
    assert prompts == make_prompts(600, seed=7)[:500]
    assert prompts != make_prompts(500, seed=8)
    assert len({prompt.turns[0] for prompt in prompts}) == 500
    assert not any("{" in turn.replace("{d}", "") for prompt in prompts for turn in prompt.turns)


def test_a_wrong_source_is_named(student, tmp_path):
    gguf, asset = tmp_path / "dense.gguf", tmp_path / "asset.safetensors"
    asset_of(student, asset, source_sha256="0" * 64, source="the wheel")
    with pytest.raises(SourceError, match="dense.gguf is missing"):
        build_default_model(gguf, asset, tmp_path / "out")
    gguf.write_bytes(b"GGUF, but not the one")
    with pytest.raises(SourceError, match="not the file that .* was trained on"):
        build_default_model(gguf, asset, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_or_foreign_asset_is_named(student, tmp_path):
    gguf, asset = tmp_path / "dense.gguf", tmp_path / "asset.safetensors"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="cannot read the asset"):
        build_default_model(gguf, asset, tmp_path / "out")
    asset_of(student, asset)
    asset.write_bytes(asset.read_bytes()[:-100])
    with pytest.raises(SourceError, match="cannot read the asset"):
        build_default_model(gguf, asset, tmp_path / "out")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, asset, metadata={"format": json.dumps("other")})
    with pytest.raises(SourceError, match="belongs to another version"):
        build_default_model(gguf, asset, tmp_path / "out")
