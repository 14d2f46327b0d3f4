"""What is known of a layer's passes beside the user's settings, which nothing rewrites.

A plan speaks of two passes, a column layer's backward is fused on request alone, a region cuts what a plan keeps whole:
each of these is a rule here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ascend_parallel.ops.call import ALL_REDUCE
from ascend_parallel.ops.decision import Decision, Known, because
from ascend_parallel.ops.registry import choose, would_choose
from ascend_parallel.overlap.layer_shape import BACKWARD, COLUMN, FORWARD, LayerShape
from ascend_parallel.settings import Settings

# Chunks of rows that stay unfinished, where a plan keeps the layer whole and COC_PARALLEL_NUM gives no number.
CHUNKS_UNLESS_PLANNED = 4


def known_of(settings: Settings) -> Known:
    """Return what is known at first: the user's plan."""
    return Known(plan=settings.plan)


def known_in_call(
    settings: Settings, known: Known, shape: LayerShape, direction: str, *, leaves_rows: bool = False
) -> Known:
    """Return what is known of the "forward" or "backward" of a call of this shape.

    leaves_rows: the rows of the pass's result may stay unfinished. A plan may keep the layer whole, which is right
    for the layer alone: such rows are cut all the same.
    """
    known = known_in_pass(settings, known, shape.kind, direction)
    operator = shape.operator(direction) if leaves_rows and known.plan is not None else None
    if operator is not None and would_choose(operator.matmul, settings, known).kernel == "reference":
        return known._replace(plan=None, number=region_chunks(settings), because=because("rows_left"))
    return known


def known_in_pass(settings: Settings, known: Known, kind: str, direction: str) -> Known:
    """Return what is known of a pass of every "column" or "row" layer whose rows are finished in it."""
    if direction == FORWARD or (known.plan is None and not settings.fused):
        return known
    if kind == COLUMN and settings.fused and not settings.enable_coc_in_column_backward:
        # The unfused backward overlaps as Megatron-core's: the whole collective runs under the weight gradient.
        return known._replace(plan=None, number=1, because=because("column_backward"), alone=True)
    return known if known.plan is None else known._replace(plan=known.plan.of(BACKWARD))


def region_chunks(settings: Settings) -> int:
    """Return the chunks of rows in a region that no plan has cut."""
    return settings.num_chunks if settings.num_chunks > 1 else CHUNKS_UNLESS_PLANNED


def decisions_ahead(
    settings: Settings, known: Known, shape: LayerShape, *, backward: bool, leaves_rows: bool
) -> Iterator[tuple[Decision, str]]:
    """Yield kernel and chunks of a later call, each with the memory layout of its right operand.

    For the probe of bits, which asks for all calls of a model in one go (ops/bits.py). Nothing where tuning measures
    each shape, or where ranks have to ask whether a fused kernel can run it.

    backward: whether the call has one. leaves_rows: as in `known_in_call`.
    """
    if settings.fused or (settings.tunes and known.because is None):
        return
    for operator in shape.operators:
        matmul = operator.matmul
        if matmul.operator != ALL_REDUCE and matmul.m % matmul.ranks:
            continue  # such rows will not come: those of the call that asks belong to another part of the model
        if operator.direction == FORWARD or backward:
            with suppress(RuntimeError, ValueError):  # the call itself raises it, if it comes
                passes = known_in_call(settings, known, shape, operator.direction, leaves_rows=leaves_rows)
                yield choose(matmul, settings, passes), operator.layout
