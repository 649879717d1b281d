"""Draws the medians and ranges of a comparison as bars, one group for each batch size."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from benchmarks.measurement import Run, summarize


def draw(runs: Sequence[Run], file: Path) -> None:
    """Writes a PNG."""
    matplotlib.use("agg")
    sizes = sorted({run.batch_size for run in runs})
    figure, panels = pyplot.subplots(1, len(sizes), squeeze=False, figsize=(6 * len(sizes), 4))
    for size, axes in zip(sizes, panels[0], strict=True):
        systems = sorted({run.system for run in runs if run.batch_size == size})
        groups = [[r for r in runs if (r.system, r.batch_size) == (s, size)] for s in systems]
        summaries = [summarize(group) for group in groups]
        speeds = [one.tokens_per_second for one in summaries]
        ranges = [
            [one.tokens_per_second - one.slowest for one in summaries],
            [one.fastest - one.tokens_per_second for one in summaries],
        ]
        bars = axes.barh([str(one.system) for one in summaries], speeds, xerr=ranges, capsize=3)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
        axes.set(title=f"batch {size}", xlabel="tokens/s: median and range")
        axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
