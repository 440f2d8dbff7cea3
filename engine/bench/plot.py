"""A saved result becomes a picture: `python -m engine.bench.plot RESULT.json PICTURE.svg`, which needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

_COLOURS = {"over on demand": "#0f766e", "over gate look-ahead": "#b45309"}


def plot_sweep(result: dict, path: Path) -> None:
    """Edge0's speed-up over both baselines against the read : compute ratio of a `bench edge0` result, with its spread."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    arms = [arm for arm in result["arms"] if arm["name"] == "Edge0" and arm["place"].startswith("link")]
    ratios = [float(arm["place"].rpartition(" ")[2]) for arm in arms]
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for label, key in (("over on demand", "speed_up"), ("over gate look-ahead", "over_gate")):
        medians = [statistics.median(arm[key]) for arm in arms]
        spread = [[m - min(arm[key]) for m, arm in zip(medians, arms)], [max(arm[key]) - m for m, arm in zip(medians, arms)]]
        axes.errorbar(ratios, medians, spread, marker="o", capsize=3, color=_COLOURS[label], label=label)
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
