"""Draw pictures as a PNG with matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascend_parallel.diagnostics.timeline.files import TimelineError
from ascend_parallel.diagnostics.timeline.picture import COLOURS, MEANING, Lanes, Picture

MATPLOTLIB = ("matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.patches")
WIDTH, LANE, DPI = 10.0, 0.32, 150  # inches


def draw(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures in a column with a common time scale; raises `TimelineError` without matplotlib."""
    try:
        figures, agg, patches = map(importlib.import_module, MATPLOTLIB)
    except ImportError as error:
        raise TimelineError(
            f"{path.name} needs matplotlib, which is not installed: pip install 'ascend_parallel[plot]', or give "
            "--no-png"
        ) from error
    sizes = [len(picture.ranks) for picture in pictures]
    figure = figures.Figure(figsize=(WIDTH, 2 * LANE * sum(sizes) + 0.45 * len(sizes) + 0.8), layout="constrained")
    agg.FigureCanvasAgg(figure)
    plots = figure.subplots(len(pictures), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for plot, picture in zip(plots, pictures, strict=True):
        _panel(plot, picture)
    plots[-1].set_xlabel("ms")
    kinds = {bar.kind for picture in pictures for lanes in picture.ranks for bar in (*lanes.compute, *lanes.comm)}
    _legend(figure, patches.Patch, [kind for kind in MEANING if kind in kinds])
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


def _legend(figure: Any, patch: Callable[..., Any], kinds: Sequence[str]) -> None:
    patches = [patch(facecolor=COLOURS[kind], edgecolor="#d0d7de", label=MEANING[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
