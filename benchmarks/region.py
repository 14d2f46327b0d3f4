"""Time the region between two attention cores: serial, layer by layer, and as a region.

    python benchmarks/region.py --link 1gbit            a few minutes
    python benchmarks/region.py --link 1gbit --graph    the same of a planned GPT, with all-reduces and reduce-scatters

proj, all-reduce, bias, add, norm, fc1, gelu, fc2, all-reduce; fp32, feed-forward 4 H, 2 ranks of one thread. The table
has medians in ms, and the ratios serial / region and layers / region, paired by round, with bootstrap intervals. Two
bounds stand beside: "layers" hides each collective under its own matmul alone, "region" under all computation. They are
sums of the parts' medians, each part timed alone. With --graph the table has whole models of 2 layers, of M tokens in 4
sequences and heads of 64, without bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table
from region_graph import FORMS, check_shape
from torch.nn import functional as F

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops.unfinished import plain_tensor
from ascend_parallel.tuning.bench.results import interval

RANKS = 2
SHAPES = ["1024,768", "2048,1024", "4096,512"]
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=25)
    parser.add_argument("--chunks", type=int, default=4, help="default: 4")
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, help=f"rows and hidden size; default: {' '.join(SHAPES)}"
    )
    parser.add_argument("--backward", action="store_true", help="forward and backward, instead of forward alone")
    parser.add_argument("--graph", action="store_true", help="a planned GPT (parallelize), instead of the raw region")
    options = vars(parser.parse_args())
    graph = options.pop("graph")
    shapes = [tuple(map(int, text.split(","))) for text in options.pop("shapes")]
    for rows, hidden in shapes if graph else []:
        check_shape(rows, hidden, RANKS)
    target, link = "region_graph:rank" if graph else "region:rank", options.pop("link")
    found = on_ranks(target, RANKS, link=link, limit=1800, options=options | {"shapes": shapes})
    heads = ["serial", "layers", "region", "bound layers", "bound region", "serial / region", "95 %"]
    heads += ["layers / region", "95 %"]
    if graph:
        labels = [f"{_text(shape)}, {form}" for shape in shapes for form in FORMS]
        lines = [[label, *_row(times, {})] for label, times in zip(labels, found, strict=True)]
    else:
        lines = [[_text(shape), *_row(*times)] for shape, times in zip(shapes, found, strict=True)]
    print(table(["M, H", *heads], lines))


def _text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _row(times: dict[str, list[float]], parts: dict[str, list[float]]) -> list[object]:
    part = {name: median(of_part) for name, of_part in parts.items()}
    bounds: list[object] = ["", ""]
    if part:
        beside = part["tail"] + part["fc1"] + part["gelu"]
        layers = max(part["proj"], part["all-reduce"]) + beside + max(part["fc2"], part["all-reduce"])
        region = max(part["proj"] + beside + part["fc2"], 2 * part["all-reduce"])
        bounds = [f"{1e3 * layers:.1f}", f"{1e3 * region:.1f}"]
    ratios: list[object] = []
    for name in ("serial", "layers"):
        low, high = interval(np.array(times[name]) / np.array(times["region"]))
        ratios += [f"{gain(times[name], times['region']):.3f}", f"{low:.3f}-{high:.3f}"]
    medians = [milliseconds(times[name]) for name in ("serial", "layers", "region")]
    return [*medians, *bounds, *ratios]


def rank(group: dist.ProcessGroup, options: dict[str, Any]) -> list[Any]:
    """Time every shape on this rank."""
    return [_shape(group, *shape, options) for shape in options["shapes"]]


def _shape(group: dist.ProcessGroup, rows: int, hidden: int, options: dict[str, Any]) -> list[dict[str, list[float]]]:
    """Return the seconds by variant, and by part of the serial forward."""
    graded, wide = options["backward"], 4 * hidden // RANKS
    shapes = {"x": (rows, hidden // RANKS), "proj": (hidden, hidden // RANKS), "bias": (hidden,)}
    shapes |= {"residual": (rows, hidden), "norm": (hidden,), "fc1": (wide, hidden), "fc2": (hidden, wide)}
    p = {name: (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_(graded) for name, shape in shapes.items()}
    chunked = Settings(num_chunks=options["chunks"])
    serial = Settings(mode=1)
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "serial": lambda: _layers(p, group, serial),
        "layers": lambda: _layers(p, group, chunked),
        "region": lambda: _layers(p, group, chunked, leaves_rows=chunked.region_rows),
    }
    if graded:
        runs = {name: functools.partial(_with_backward, forward) for name, forward in variants.items()}
        return [in_turn(runs, options["rounds"]), {}]
    return [in_turn(variants, options["rounds"]), in_turn(_parts(p, group), options["rounds"])]


def _with_backward(forward: Callable[[], torch.Tensor]) -> None:
    y = forward()
    y.backward(torch.ones_like(y))


def _add(y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    assert bias is not None
    return residual + (y + bias)


def _norm(p: Tensors, s: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(s, p["norm"].shape, p["norm"], p["bias"])


def _layers(p: Tensors, group: dist.ProcessGroup, settings: Settings, leaves_rows: int = 0) -> torch.Tensor:
    options: dict[str, Any] = {"group": group, "settings": settings, "leaves_rows": leaves_rows}
    s = _add(row_linear(p["x"], p["proj"], **options), p["bias"], p["residual"])
    h = column_linear(_norm(p, s), p["fc1"], **options)
    return plain_tensor(s + row_linear(F.gelu(h), p["fc2"], **options))


def _parts(p: Tensors, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Return the parts of the serial forward."""
    y, a = torch.empty_like(p["residual"]), p["residual"] @ p["fc1"].t()
    return {
        "proj": lambda: p["x"] @ p["proj"].t(),
        "all-reduce": lambda: dist.all_reduce(y, group=group),
        "tail": lambda: _norm(p, _add(p["residual"], p["bias"], p["residual"])),
        "fc1": lambda: p["residual"] @ p["fc1"].t(),
        "gelu": lambda: F.gelu(a),
        "fc2": lambda: a @ p["fc2"].t(),
    }


if __name__ == "__main__":
    run(main)
