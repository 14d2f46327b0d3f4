"""The chunks of a region: all its matmuls are cut at the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.operators import choice_for
from ascend_parallel.ops.problem import ALL_REDUCE, Problem
from ascend_parallel.ops.registry import choose
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.settings import Settings


@dataclass(frozen=True)
class RegionMatmul:
    """A matmul ``[rows, k] x [k, n]`` of a region; `layout` is the memory layout of its right operand."""

    k: int
    n: int
    layout: str


@dataclass(frozen=True)
class RegionCut:
    """The rows of each chunk of a region, settings with which its all-reduces take these chunks, and the reason.

    A region of a single chunk has nothing to hide: the layers then run one by one.
    """

    sizes: Sizes
    settings: Settings
    reason: str


_CUTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], RegionCut]] = WeakKeyDictionary()


def region_cut(
    matmuls: Sequence[RegionMatmul], x_m: torch.Tensor, group: dist.ProcessGroup, settings: Settings
) -> RegionCut:
    """Return the chunks of a region with the rows, dtype and device of x_m [M, ...].

    The first of `matmuls` is the last layer's forward: the region takes the chunks that `settings` give its
    all-reduce, but no chunk below `settings.region_rows` rows on average. If these chunks would change the bits of
    another matmul of the region, it takes fewer. All ranks call this; the first call of a shape may communicate.
    """
    key = (tuple(matmuls), x_m.shape[0], x_m.dtype, x_m.device, settings)
    known = _CUTS.setdefault(group, {})
    if key not in known:
        known[key] = _cut(matmuls, x_m, group, settings)
    return known[key]


def _cut(matmuls: Sequence[RegionMatmul], x_m: torch.Tensor, group: dist.ProcessGroup, settings: Settings) -> RegionCut:
    rows, device = x_m.shape[0], x_m.device
    problems = [
        Problem(ALL_REDUCE, rows, matmul.k, matmul.n, x_m.dtype, device.type, group.size()) for matmul in matmuls
    ]
    first = choice_for(problems[0], group, settings, device, matmuls[0].layout)
    sizes, reason = first.sizes, first.reason
    most = rows // settings.region_rows
    if first.kernel != "chunked" or settings.deterministic:
        sizes = (rows,)  # a fused kernel, and the tiles of the deterministic mode, have other matmuls
    elif len(sizes) > most:
        sizes = split_rows(rows, most)
        reason = f"{reason}; {rows} rows allow {len(sizes)} chunks of {settings.region_rows} (region_rows)"
    while len(sizes) > 1:
        fixed = _fixed(settings, tuple((rows, matmul.k, matmul.n) for matmul in matmuls), sizes)
        choices = [
            keep_bits(choose(problem, fixed), group, device, matmul.layout)
            for problem, matmul in zip(problems, matmuls, strict=True)
        ]
        if not first.bit_exact or all(choice.bit_exact for choice in choices):
            return RegionCut(sizes, fixed, reason)
        sizes = split_rows(rows, len(sizes) - 1)
        reason = f"{first.reason}; {len(sizes)}, because more chunks change the bits of a matmul of the region"
    return RegionCut((rows,), settings, reason)


@lru_cache(maxsize=64)
def _fixed(settings: Settings, shapes: tuple[tuple[int, int, int], ...], sizes: Sizes) -> Settings:
    """Return the settings with these chunks for matmuls of `shapes`."""
    table = dict.fromkeys(shapes, sizes)
    return replace(settings, customized_coc=table, plan=None, tune=None, auto=False, mode=2)
