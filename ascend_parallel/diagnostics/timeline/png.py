"""Draw pictures as a PNG with matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascend_parallel.diagnostics.timeline.files import TimelineError
from ascend_parallel.diagnostics.timeline.picture import COLOURS, MEANING, Lanes, Picture

WIDTH, LANE, DPI = 10.0, 0.32, 150  # inches


def draw(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures in a column with a common time scale; raises `TimelineError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise TimelineError(
            f"{path.name} needs matplotlib, which is not installed: pip install 'ascend_parallel[plot]', or give "
            "--no-png"
        ) from error
    sizes = [len(picture.ranks) for picture in pictures]
    figure = Figure(figsize=(WIDTH, 2 * LANE * sum(sizes) + 0.45 * len(sizes) + 0.8), layout="constrained")
    plots = figure.subplots(len(pictures), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for plot, picture in zip(plots, pictures, strict=True):
        _panel(plot, picture)
    plots[-1].set_xlabel("ms")
    kinds = {bar.kind for picture in pictures for lanes in picture.ranks for bar in (*lanes.compute, *lanes.comm)}
    legend = [
        Patch(facecolor=COLOURS[kind], edgecolor="#d0d7de", label=words)
        for kind, words in MEANING.items()
        if kind in kinds
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(new, dpi=DPI, format="png")
    new.replace(path)


def _panel(plot: Any, picture: Picture) -> None:
    plot.set_title(picture.headline, loc="left", fontsize=10)
    plot.set_yticks([-row for row in range(2 * len(picture.ranks))])
    plot.set_yticklabels(
        [f"rank {lanes.rank} {lane}" for lanes in picture.ranks for lane in ("compute", "comm.")], fontsize=8
    )
    plot.set_ylim(-2 * len(picture.ranks) + 0.5, 0.5)
    plot.tick_params(axis="y", length=0)
    plot.grid(axis="x", color="#d0d7de", linewidth=0.5)
    plot.set_axisbelow(True)
    for side in ("top", "right", "left"):
        plot.spines[side].set_visible(False)
    for number, lanes in enumerate(picture.ranks):
        _rank(plot, lanes, -2 * number)


def _rank(plot: Any, lanes: Lanes, row: int) -> None:
    for place, bars in ((row, lanes.compute), (row - 1, lanes.comm)):
        for bar in bars:
            low, high = place + 0.4 - 0.8 * bar.high, place + 0.4 - 0.8 * bar.low
            width = bar.end - bar.begin
            edge = {"edgecolor": "white", "linewidth": 0.4}
            plot.broken_barh([(bar.begin, width)], (low, high - low), facecolor=COLOURS[bar.kind], **edge)
