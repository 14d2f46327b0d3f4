"""What cuts a layer's passes: the settings that their operators get, with the reason where they are not the user's.

The user's settings never change. A plan speaks of two passes, a measurement takes the place of a request to measure, a
region cuts what a plan keeps whole: each of these is a rule of `Chunks`, and nothing else rewrites settings for a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ascend_parallel.ops.problem import ALL_REDUCE, Problem
from ascend_parallel.ops.registry import Choice, choose
from ascend_parallel.overlap.layer_shape import BACKWARD, COLUMN, FORWARD, LayerShape
from ascend_parallel.settings import ChunkPlan, Settings

# Chunks of rows that stay unfinished, where a plan keeps the layer whole and COC_PARALLEL_NUM gives no number.
CHUNKS_UNLESS_PLANNED = 4


class Chunks(NamedTuple):
    """What cuts a call or a pass of a layer; the same on every rank of its group.

    settings
        Those that its operators get.
    reason
        Why these are not the user's; empty: they are.
    original
        Whether the framework's own layer runs: it was measured to be as fast, or the user asked for it (COC_MODE=0).
    """

    settings: Settings
    reason: str = ""
    original: bool = False

    @classmethod
    def for_call(cls, settings: Settings, shape: LayerShape, direction: str, *, leaves_rows: bool = False) -> Chunks:
        """Return what cuts the "forward" or "backward" of a call of this shape, with the settings of the call.

        leaves_rows: the rows of the pass's result may stay unfinished. A plan may keep the layer whole, which is right
        for the layer alone: such rows are cut all the same.
        """
        chunks = cls.for_pass(settings, shape.kind, direction)
        operator = shape.operator(direction) if leaves_rows and chunks.settings.plan is not None else None
        if operator is not None and choose(operator.problem, chunks.settings).kernel == "reference":
            return _cut_although_planned_whole(chunks.settings)
        return chunks

    @classmethod
    def for_pass(cls, settings: Settings, kind: str, direction: str) -> Chunks:
        """Return what cuts a pass of every "column" or "row" layer; as `for_call`, of rows that are finished."""
        if direction == FORWARD or (settings.plan is None and not settings.fused):
            return cls(settings)
        return _of_backward(settings, kind)

    @classmethod
    def measured(
        cls, settings: Settings, plan: ChunkPlan | None, reason: str = "measured", original: bool = False
    ) -> Chunks:
        """Return what cuts a call with the measured `plan` in the place of COC_TUNE and of "auto".

        plan: None where nothing may be measured. original: the framework's layer runs.
        """
        return cls(replace(settings, tune=None, auto=False, plan=plan, mode=settings.effective_mode), reason, original)

    @classmethod
    def counted(cls, settings: Settings, count: int, reason: str) -> Chunks:
        """Return a number of chunks, or of groups of parts, that was measured or that the caller knows."""
        return cls(
            replace(settings, num_chunks=count, auto=False, tune=None, plan=None, mode=settings.effective_mode), reason
        )

    @classmethod
    def planned(cls, settings: Settings, count: int, reason: str) -> Chunks:
        """Return a number of groups that a plan has, also where the settings ask for no overlap; COC_MODE decides."""
        mode = settings.mode if settings.mode >= 0 else 2
        cut = replace(settings, num_chunks=count, auto=False, tune=None, plan=None, mode=mode)
        return cls(cut, reason)

    def choice(self, problem: Problem) -> Choice:
        """Return kernel and chunks of a problem of this pass; with the reason of these settings before its own."""
        choice = choose(problem, self.settings)
        return replace(choice, reason=f"{self.reason}; {choice.reason}") if self.reason else choice


@lru_cache(maxsize=64)
def _of_backward(settings: Settings, kind: str) -> Chunks:
    """Return what cuts a backward: a plan's entries for it; of a column layer, no fused operator unless asked for.

    The unfused backward overlaps as Megatron-core's: the whole collective runs under the weight gradient.
    """
    if kind == COLUMN and settings.fused and not settings.enable_coc_in_column_backward:
        whole = replace(settings, fused=False, num_chunks=1, customized_coc={}, plan=None, mode=2)
        return Chunks(whole, "a column layer's backward is fused with enable_coc_in_column_backward alone")
    return Chunks(settings if settings.plan is None else replace(settings, plan=settings.plan.of(BACKWARD)))


@lru_cache(maxsize=64)
def _cut_although_planned_whole(settings: Settings) -> Chunks:
    cut = replace(settings, num_chunks=region_chunks(settings), plan=None, strict=False)
    return Chunks(cut, "its rows stay unfinished, so they are cut although the plan keeps them whole")


def region_chunks(settings: Settings) -> int:
    """Return the chunks of rows in a region that no plan has cut."""
    return settings.num_chunks if settings.num_chunks > 1 else CHUNKS_UNLESS_PLANNED


def choices_ahead(
    settings: Settings, shape: LayerShape, *, backward: bool, leaves_rows: bool
) -> Iterator[tuple[Choice, str]]:
    """Yield kernel and chunks of a later call, each with the memory layout of its right operand.

    For the probe of bits, which asks for all calls of a model in one go (ops/bits.py). Nothing where tuning measures
    each shape, or where ranks have to ask whether a fused kernel can run it.

    backward: whether the call has one. leaves_rows: as in `Chunks.for_call`.
    """
    if settings.fused or settings.tunes:
        return
    for operator in shape.operators:
        problem = operator.problem
        if problem.operator != ALL_REDUCE and problem.m % problem.ranks:
            continue  # such rows will not come: those of the call that asks belong to another part of the model
        if operator.direction == FORWARD or backward:
            with suppress(RuntimeError, ValueError):  # the call itself raises it, if it comes
                chunks = Chunks.for_call(settings, shape, operator.direction, leaves_rows=leaves_rows)
                yield choose(problem, chunks.settings), operator.layout
