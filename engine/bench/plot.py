"""A saved result becomes a picture: `python -m engine.bench.plot RESULT.json PICTURE.svg`, which needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from engine.bench.measure import speed_up
from engine.bench.specter import Arm, baseline

_COLOURS = ("#0f766e", "#b45309", "#6d28d9")


def plot_sweep(result: dict, path: Path) -> None:
    """Edge0's speed-up over both baselines against the read : compute ratio of a `bench edge0` result, with its spread."""
    seconds = {(arm["place"], arm["name"]): arm["seconds"] for arm in result["arms"]}
    places = [place for place, name in seconds if name == "Edge0" and place.startswith("link")]
    lines = {f"over {name}": {_ratio(place): speed_up(seconds[place, name], seconds[place, "Edge0"]) for place in places}
             for name in ("on demand", "gate look-ahead")}  # fmt: skip
    title = f"{result['model']}, {result['expert_memory']} of the experts in memory, emulated link"
    _draw(lines, "read : compute on demand", "speed-up of Edge0", title, path)


def plot_specter(result: dict, path: Path) -> None:
    """Specter's speed-up over the faster baseline against the transfer : compute ratio, a line for each memory."""
    points = [Arm(**point) for point in result["points"]]
    lines: dict[str, dict[float, list[float]]] = {}
    for arm in points:
        if arm.name == "Specter" and arm.place.startswith("link"):
            line = lines.setdefault(f"{arm.memory} of the experts' bytes", {})
            line[_ratio(arm.place)] = speed_up(baseline(points, arm), arm.seconds)
    title = f"Specter, {result['model']}, {result['draft_bits']}-bit draft within that memory, emulated link"
    _draw(lines, "transfer : compute on demand", "speed-up over the faster baseline", title, path)


def _ratio(place: str) -> float:
    return float(place.rpartition(" ")[2])


def _draw(lines: dict[str, dict[float, list[float]]], across: str, up: str, title: str, path: Path) -> None:
    """A line for each label: ratio -> what was measured in each repeat, drawn as median and spread."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for (label, line), colour in zip(lines.items(), _COLOURS):
        ratios = sorted(line)
        medians = [statistics.median(line[ratio]) for ratio in ratios]
        spread = [[m - min(line[r]) for m, r in zip(medians, ratios)], [max(line[r]) - m for m, r in zip(medians, ratios)]]
        axes.errorbar(ratios, medians, spread, marker="o", capsize=3, color=colour, label=label)
    axes.axhline(1, color="#9ca3af", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({ratio for line in lines.values() for ratio in line})
    axes.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    saved = json.loads(Path(sys.argv[1]).read_text())
    (plot_specter if saved["benchmark"] == "specter" else plot_sweep)(saved, Path(sys.argv[2]))
