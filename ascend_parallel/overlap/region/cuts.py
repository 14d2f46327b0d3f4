"""The chunks of a region: all its matmuls are cut at the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.operators import choice_for
from ascend_parallel.ops.problem import ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.registry import Choice, choose
from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows
from ascend_parallel.settings import Settings

# Chunks of a region whose last layer a plan keeps whole, if COC_PARALLEL_NUM gives none.
CHUNKS_UNLESS_PLANNED = 4


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
    matmuls: Sequence[RegionMatmul],
    rows: int,
    like: torch.Tensor,
    group: dist.ProcessGroup,
    settings: Settings,
    sequence_parallel: bool = False,
    step: int = 1,
) -> RegionCut:
    """Return the chunks of a region of `rows` rows (one rank's, with sequence parallelism), of like's dtype and device.

    The first of `matmuls` is the last layer's forward: the region takes the chunks that `settings` give its
    collective. If a plan keeps it whole, that is right for the layer alone: the region takes `settings.num_chunks`, or
    `CHUNKS_UNLESS_PLANNED`. No chunk is below `settings.region_rows` rows on average. If these chunks would change the
    bits of another matmul of the region, it takes fewer. Every chunk is a multiple of `step` rows, which divides
    `rows`. All ranks call this; the first call of a shape may communicate.
    """
    key = (tuple(matmuls), rows, like.dtype, like.device, settings, sequence_parallel, step)
    known = _CUTS.setdefault(group, {})
    if key not in known:
        operator, m = (REDUCE_SCATTER, rows * group.size()) if sequence_parallel else (ALL_REDUCE, rows)
        problems = [
            Problem(operator, m, matmul.k, matmul.n, like.dtype, like.device.type, group.size()) for matmul in matmuls
        ]
        known[key] = _cut(problems, [matmul.layout for matmul in matmuls], group, settings, like.device, step)
    return known[key]


def explain_region(choice: Choice, settings: Settings) -> str:
    """Return how a matmul with this choice runs inside a region, in words; "" without `settings.region`."""
    if settings.region is False:
        return ""
    rows = choice.problem.rows
    most = min(len(choice.sizes), rows // settings.region_rows)
    if choice.kernel != "chunked" or settings.deterministic:
        what = "not in a region: its kernel has chunks of its own"
    elif most < 2:
        what = f"not in a region: {rows} rows, at least {settings.region_rows} in a chunk (region_rows)"
    else:
        what = f"in a region up to {most} chunks; which layers can be in one: ascend_parallel.coverage(model)"
    return f"COC_REGION={'auto' if settings.region == 'auto' else 1}: {what}"


def _cut(
    problems: Sequence[Problem],
    layouts: Sequence[str],
    group: dist.ProcessGroup,
    settings: Settings,
    device: torch.device,
    step: int,
) -> RegionCut:
    rows = problems[0].rows
    first = choice_for(problems[0], group, settings, device, layouts[0])
    sizes, reason = first.sizes, first.reason
    if settings.plan is not None and settings.effective_mode == 2 and first.kernel == "reference":
        first = choice_for(problems[0], group, _unplanned(settings), device, layouts[0])
        sizes = first.sizes
        reason = f"{len(sizes)} chunks, because the plan has none for the last layer alone"
    most = rows // settings.region_rows
    if first.kernel != "chunked" or settings.deterministic:
        sizes = (rows,)  # a fused kernel, and the tiles of the deterministic mode, have other matmuls
    elif len(sizes) > most:
        sizes = _split(rows, most, step)
        reason = f"{reason}; {rows} rows allow {len(sizes)} chunks of {settings.region_rows} (region_rows)"
    if any(size % step for size in sizes):
        sizes = _split(rows, len(sizes), step)
    while len(sizes) > 1:
        fixed = _fixed(settings, tuple((problem.m, problem.k, problem.n) for problem in problems), sizes)
        choices = [
            keep_bits(choose(problem, fixed), group, device, layout)
            for problem, layout in zip(problems, layouts, strict=True)
        ]
        if not first.bit_exact or all(choice.bit_exact for choice in choices):
            return RegionCut(sizes, fixed, reason)
        sizes = _split(rows, len(sizes) - 1, step)
        reason = f"{first.reason}; {len(sizes)}, because more chunks change the bits of a matmul of the region"
    return RegionCut((rows,), settings, reason)


def _split(rows: int, count: int, step: int) -> Sizes:
    """Return at most `count` chunks of `rows` rows, all multiples of `step`, and but for the last of ROW_TILE too."""
    return tuple(size * step for size in split_rows(rows // step, count, lcm(ROW_TILE, step) // step))


@lru_cache(maxsize=64)
def _fixed(settings: Settings, shapes: tuple[tuple[int, int, int], ...], sizes: Sizes) -> Settings:
    """Return the settings with these chunks for matmuls of `shapes`."""
    table = dict.fromkeys(shapes, sizes)
    # Matmuls that are not in the table, such as those of proj's backward, lose the plan: they take as many chunks.
    count = len(sizes) if settings.plan is not None else settings.num_chunks
    return replace(settings, customized_coc=table, num_chunks=count, plan=None, tune=None, auto=False, mode=2)


@lru_cache(maxsize=64)
def _unplanned(settings: Settings) -> Settings:
    """Return the settings without their plan. A region that gets no chunks is no unmet request of the layer's."""
    count = settings.num_chunks if settings.num_chunks > 1 else CHUNKS_UNLESS_PLANNED
    return replace(settings, num_chunks=count, plan=None, strict=False)
