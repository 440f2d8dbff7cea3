"""A report names its conditions, shows the reference and chance beside every figure, and never replaces another one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from engine.bench.measure import print_table
from engine.errors import ConfigError
from engine.eval.arms import Arm
from engine.eval.run import ArmScore

SCORING = ("tokens forced one at a time through the decode path; an option's score is the sum of its tokens' "
           "log-probabilities, not normalised by length")  # fmt: skip


def check_free(path: Path | None) -> None:
    """Raises ConfigError when `path` exists: better before the run than after it."""
    if path is not None and path.exists():
        raise ConfigError(f"{path} exists already, and results are never overwritten: give another name with --out")


def as_dict(conditions: dict, arms: list[Arm], scores: list[ArmScore]) -> dict:
    """The JSON object of a run. An arm names the model and not its store, which may be a temporary one: the label says
    the format."""
    measured = [
        {"label": score.label, "config": asdict(replace(arm.config, model=conditions["model"])), "chats": asdict(score.chats),
         "choices": {choice.name: asdict(choice) for choice in score.choices}}
        for arm, score in zip(arms, scores)
    ]  # fmt: skip
    return {**conditions, "scoring": SCORING, "arms": measured}


def write(result: dict, path: Path) -> None:
    """Write the JSON object into a new file. Raises ConfigError when another process has made it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(result, file, indent=1, default=str)
    except FileExistsError:
        check_free(path)


def print_report(reference: str, scores: list[ArmScore]) -> None:
    """Two tables: the chats, an arm a row, and the choice sets, a set a row."""
    chats = scores[0].chats
    print_table(
        f"{chats.tokens} reply tokens of {chats.chats} held-out chats against {reference} "
        f"(perplexity {chats.reference_perplexity:.3f}); ± standard error by chat",
        [chat_row(score) for score in scores],
    )
    print_table(
        f"accuracy [95 % interval], and = the share of items answered like {reference}",
        [choice_row(index, scores) for index in range(len(scores[0].choices))],
    )


def chat_row(score: ArmScore) -> dict[str, str]:
    chats = score.chats
    return {
        "arm": score.label,
        "KL": _with_error(chats.kl, chats.kl_error),
        "top-1 agreement": _with_error(chats.top1, chats.top1_error),
        "perplexity": _with_error(chats.perplexity, chats.perplexity_error),
    }


def choice_row(index: int, scores: list[ArmScore]) -> dict[str, str]:
    """All arms on one set."""
    own = scores[0].choices[index]
    row = {"set": own.name, "items": str(own.items), "chance": f"{own.chance:.2f}", "reference": f"{own.reference:.3f}"}
    for score in scores:
        choice = score.choices[index]
        row[score.label] = f"{choice.accuracy:.3f} [{choice.low:.2f}, {choice.high:.2f}] = {choice.alike:.3f}"
    return row


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
