"""Views of unfinished rows: which rows of a tensor a view of its memory has, told from shapes and strides.

A view waits for its own rows alone. It may have each row of the tensor in the same place, the rows of blocks as rows of
one, several rows where the tensor has one, or some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.rows import Sizes


class Layout(NamedTuple):
    """Where the elements of a tensor lie: its shape, its strides, and its offset from the memory of the rows."""

    shape: Sizes
    strides: Sizes
    offset: int = 0


class _Found(NamedTuple):
    """The rows of a view.

    sizes, stops: of rows of the view's own, and up to which of the tensor's rows each chunk of them asks; empty: the
    view has the tensor's chunks.
    """

    blocks: int
    lead: int
    sizes: Sizes = ()
    stops: Sizes = ()


def rows_of_view(value: torch.Tensor, rows: Rows, view: torch.Tensor) -> Rows | None:
    """Return the rows of a view of `value`, whose rows are `rows`; None: the view has no rows of it."""
    progress, blocks, lead = rows
    if view.dtype != value.dtype:
        return None
    layout = Layout(view.shape, view.stride(), int(view.storage_offset()) - int(value.storage_offset()))
    found = _found(Layout(value.shape, value.stride()), blocks, lead, progress.sizes, progress.is_part, layout)
    if found is None:
        return None
    if not found.sizes:
        return Rows(progress, found.blocks, found.lead)
    pull: Callable[[int], object]

    def fill(index: int) -> None:
        pull(found.stops[index])

    part = LazyRows(found.sizes, fill, part_of=progress)
    pull = progress.puller(part)
    if not found.lead:  # one row
        part.finish()
    return Rows(part, found.blocks, found.lead)


@lru_cache(maxsize=4096)
def _found(value: Layout, blocks: int, lead: int, sizes: Sizes, is_part: bool, view: Layout) -> _Found | None:
    """Return the rows of a view of a tensor, of which `lead` dimensions are `blocks` of chunks of `sizes` rows."""
    if 0 in view.shape or 0 in value.shape:
        return None
    length = sum(sizes)
    if (same := _same_rows(value, lead, view)) is not None:
        return _Found(blocks, same)
    if (turned := _turned_blocks(value, lead, blocks, length, view)) is not None:
        return _Found(turned, 1)
    if blocks == 1 and (finer := _finer_rows(value, lead, sizes, view)) is not None:
        return finer
    if (part := _some_rows(value, lead, blocks, length, view)) is None:
        return None
    stop, blocks, lead = part
    rows = prod(view.shape[:lead]) // blocks
    if rows == length and not is_part and lead:
        return _Found(blocks, lead)
    return _Found(blocks, lead, (rows,), (stop,))


def _same_rows(value: Layout, lead: int, view: Layout) -> int | None:
    """Return the number of leading dimensions of a view that has each row of a tensor in the same place, else None."""
    count = prod(value.shape[:lead])
    new = next((n for n in range(len(view.shape) + 1) if prod(view.shape[:n]) == count), None)
    if new is None:
        return None
    step = _row_step(value, lead)
    if step is None or _row_step(view, new) != step:
        return None
    return new if _inside(view, new, view.offset, step) else None


def _turned_blocks(value: Layout, lead: int, blocks: int, length: int, view: Layout) -> int | None:
    """Return the blocks of a view [s, b, ...] of a tensor [b, s, ...], whose rows are those of all b; else None."""
    step = _row_step(value, lead)
    if step is None or len(view.shape) < 2 or view.shape[1] == 1 or blocks % view.shape[1]:
        return None
    blocks //= view.shape[1]
    length *= blocks
    turned = (view.shape[0], *view.strides[:2]) == (length, step, length * step)
    return blocks if turned and _inside(view, 2, view.offset, step) else None


def _finer_rows(value: Layout, lead: int, sizes: Sizes, view: Layout) -> _Found | None:
    """Return the rows of a view in which each row of a tensor has become the same number of rows; else None."""
    step = _row_step(value, lead)
    if step is None or view.offset:
        return None
    for new in range(1, len(view.shape) + 1):
        each, rest = divmod(prod(view.shape[:new]), sum(sizes))
        if not rest and each > 1 and _row_step(view, new) == step // each and _inside(view, new, 0, step // each):
            return _Found(1, new, tuple(each * size for size in sizes), tuple(accumulate(sizes)))
    return None


def _inside(view: Layout, lead: int, first: int, step: int) -> bool:
    """Tell whether the elements of a row of a view lie inside a row of `step` elements, from its element `first` on."""
    extent = sum((size - 1) * stride for size, stride in zip(view.shape[lead:], view.strides[lead:], strict=True))
    return first >= 0 and first + extent < step


def _row_step(tensor: Layout, lead: int) -> int | None:
    """Return the distance of neighbouring rows in memory, the same for all rows; else None."""
    step = expected = None
    for size, stride in zip(reversed(tensor.shape[:lead]), reversed(tensor.strides[:lead]), strict=True):
        if size == 1:
            continue
        if step is None:
            step = expected = stride
        if stride != expected:
            return None
        expected = stride * size
    if step is None:  # a single row: nothing lies behind it
        return max(1, prod(tensor.shape))
    return step


def _some_rows(value: Layout, lead: int, blocks: int, length: int, view: Layout) -> tuple[int, int, int] | None:
    """Return the row of a block behind the last that a view has, and its blocks and leading dimensions; else None.

    The view has neighbouring rows of one block, or the same rows of every block.
    """
    step = _row_step(value, lead)
    if step is None:
        return None
    row, first = divmod(view.offset, step)
    for new in range(len(view.shape) + 1):
        if new and view.shape[new - 1] != 1 and view.strides[new - 1] < step:
            break
        if not _inside(view, new, first, step):
            continue
        if blocks > 1 and new >= 2 and view.shape[0] == blocks and view.strides[0] == length * step:
            inner = Layout(view.shape[1:], view.strides[1:])
            if _row_step(inner, new - 1) in (step, max(1, prod(inner.shape))) and row < length:
                stop = row + prod(inner.shape[: new - 1])
                return (stop, blocks, new) if stop <= length else None
        count = prod(view.shape[:new])
        if count > 1 and _row_step(view, new) != step:
            continue
        start = row % length
        if start + count <= length:
            return start + count, 1, new
    return None


def pieces_of(blocks: torch.Tensor, sizes: Sizes) -> Sequence[torch.Tensor]:
    """Return blocks of rows [blocks, length, ...] chunk by chunk, and each chunk block by block.

    A kernel may depend on whether its operands are contiguous, so an operator runs on each block.
    """
    return [piece for chunk in blocks.split_with_sizes(sizes, 1) for piece in chunk.unbind()]
