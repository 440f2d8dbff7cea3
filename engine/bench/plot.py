"""A saved result becomes a picture: `python -m engine.bench.plot RESULT.json PICTURE.svg`, which needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from engine.bench.edge0 import speed_up
from engine.bench.specter import Arm
from engine.bench.specter import speed_up as best_speed_up

_COLOURS = {"on demand": "#0f766e", "gate look-ahead": "#b45309"}  # by baseline


def plot_sweep(result: dict, path: Path) -> None:
    """Edge0's speed-up over both baselines against the read : compute ratio of a `bench edge0` result, with its spread."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    seconds = {(arm["place"], arm["name"]): arm["seconds"] for arm in result["arms"]}
    places = [place for place, name in seconds if name == "Edge0" and place.startswith("link")]
    ratios = [float(place.rpartition(" ")[2]) for place in places]
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for baseline, colour in _COLOURS.items():
        gains = [speed_up(seconds[place, baseline], seconds[place, "Edge0"]) for place in places]
        medians = [statistics.median(gain) for gain in gains]
        spread = [[m - min(g) for m, g in zip(medians, gains)], [max(g) - m for m, g in zip(medians, gains)]]
        axes.errorbar(ratios, medians, spread, marker="o", capsize=3, color=colour, label=f"over {baseline}")
    axes.axhline(1, color="#9ca3af", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.set_xlabel("read : compute on demand")
    axes.set_ylabel("speed-up of Edge0")
    axes.set_title(f"{result['model']}, {result['expert_memory']} of the experts in memory, emulated link", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def plot_specter(result: dict, path: Path) -> None:
    """Specter's speed-up over the faster baseline against the transfer : compute ratio, a line for each memory."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    points = [Arm(**point) for point in result["points"]]
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    linked = [p for p in points if p.name == "Specter" and p.place.startswith("link")]
    ratios = sorted({float(p.place.rpartition(" ")[2]) for p in linked})
    for memory, colour in zip(dict.fromkeys(p.memory for p in linked), ("#0f766e", "#b45309", "#6d28d9")):
        mine = sorted((p for p in linked if p.memory == memory), key=lambda p: float(p.place.rpartition(" ")[2]))
        speed = [best_speed_up(points, p, ("on demand", "gate look-ahead")) for p in mine]
        medians = [statistics.median(s) for s in speed]
        spread = [[m - min(s) for m, s in zip(medians, speed)], [max(s) - m for m, s in zip(medians, speed)]]
        axes.errorbar(ratios, medians, spread, marker="o", capsize=3, color=colour, label=f"{memory} of the experts' bytes")
    axes.axhline(1, color="#9ca3af", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.set_xlabel("transfer : compute on demand")
    axes.set_ylabel("speed-up over the faster baseline")
    axes.set_title(f"Specter, {result['model']}, {result['draft_bits']}-bit draft within that memory, emulated link", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    saved = json.loads(Path(sys.argv[1]).read_text())
    (plot_specter if saved["benchmark"] == "specter" else plot_sweep)(saved, Path(sys.argv[2]))
