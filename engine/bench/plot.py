"""A saved result becomes a picture: `python -m engine.bench.plot RESULT.json PICTURE.svg`, which needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from engine.bench.edge0 import speed_up

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


if __name__ == "__main__":
    plot_sweep(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
