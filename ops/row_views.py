"""Views of unfinished rows: which rows of a tensor a view of its memory has, told from shapes and strides.

A view waits for its own rows alone. It may have each row of the tensor in the same place, the rows of blocks as rows of
one, several rows where the tensor has one, or some of the rows.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch

from ascend_parallel.ops.lazy_rows import LazyRows, Rows


def rows_of_view(value: torch.Tensor, rows: Rows, view: torch.Tensor) -> Rows | None:
    """Return the rows of a view of `value`, whose rows are `rows`; None: the view has no rows of it."""
    if view.dtype != value.dtype or not view.numel() or not value.numel():
        return None
    if (lead := _same_rows(value, rows.lead, view)) is not None:
        return Rows(rows.progress, rows.blocks, lead)
    if (blocks := _turned_blocks(value, rows, view)) is not None:
        return Rows(rows.progress, blocks, 1)
    if (finer := _finer_rows(value, rows, view)) is not None:
        return finer
    if (part := _some_rows(value, rows, view)) is None:
        return None
    stop, blocks, lead = part
    length, source = prod(view.shape[:lead]) // blocks, rows.progress
    if length == sum(source.sizes) and not source.is_part and lead:
        return Rows(source, blocks, lead)
    progress = LazyRows((length,), lambda _: source.up_to(stop), part_of=source)
    if not lead:  # one row
        progress.finish()
    return Rows(progress, blocks, lead)


def _same_rows(value: torch.Tensor, lead: int, view: torch.Tensor) -> int | None:
    """Return the number of leading dimensions of a view that has each row of a tensor in the same place, else None."""
    count = prod(value.shape[:lead])
    new = next((n for n in range(view.dim() + 1) if prod(view.shape[:n]) == count), None)
    if new is None:
        return None
    step = _row_step(value, lead)
    if step is None or _row_step(view, new) != step:
        return None
    first = int(view.storage_offset()) - int(value.storage_offset())
    return new if _inside(view, new, first, step) else None


def _turned_blocks(value: torch.Tensor, rows: Rows, view: torch.Tensor) -> int | None:
    """Return the blocks of a view [s, b, ...] of a tensor [b, s, ...], whose rows are those of all b; else None."""
    step = _row_step(value, rows.lead)
    if step is None or view.dim() < 2 or view.shape[1] == 1 or rows.blocks % view.shape[1]:
        return None
    blocks = rows.blocks // view.shape[1]
    length = blocks * sum(rows.progress.sizes)
    first = int(view.storage_offset()) - int(value.storage_offset())
    turned = (view.shape[0], *view.stride()[:2]) == (length, step, length * step)
    return blocks if turned and _inside(view, 2, first, step) else None


def _finer_rows(value: torch.Tensor, rows: Rows, view: torch.Tensor) -> Rows | None:
    """Return the rows of a view in which each row of a tensor has become the same number of rows; else None."""
    step, source = _row_step(value, rows.lead), rows.progress
    if step is None or rows.blocks > 1 or view.storage_offset() != value.storage_offset():
        return None
    stops = list(accumulate(source.sizes))
    for lead in range(1, view.dim() + 1):
        each, rest = divmod(prod(view.shape[:lead]), sum(source.sizes))
        if not rest and each > 1 and _row_step(view, lead) == step // each and _inside(view, lead, 0, step // each):
            sizes = tuple(each * size for size in source.sizes)
            return Rows(LazyRows(sizes, lambda index: source.up_to(stops[index]), part_of=source), 1, lead)
    return None


def _inside(view: torch.Tensor, lead: int, first: int, step: int) -> bool:
    """Tell whether the elements of a row of a view lie inside a row of `step` elements, from its element `first` on."""
    extent = sum((size - 1) * stride for size, stride in zip(view.shape[lead:], view.stride()[lead:], strict=True))
    return first >= 0 and first + extent < step


def _row_step(tensor: torch.Tensor, lead: int) -> int | None:
    """Return the distance of neighbouring rows in memory, the same for all rows; else None."""
    step = expected = None
    for size, stride in zip(reversed(tensor.shape[:lead]), reversed(tensor.stride()[:lead]), strict=True):
        if size == 1:
            continue
        if step is None:
            step = expected = stride
        if stride != expected:
            return None
        expected = stride * size
    if step is None:  # a single row: nothing lies behind it
        return max(1, tensor.numel())
    return step


def _some_rows(value: torch.Tensor, rows: Rows, view: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the row of a block behind the last that a view has, and its blocks and leading dimensions; else None.

    The view has neighbouring rows of one block, or the same rows of every block.
    """
    step, length = _row_step(value, rows.lead), sum(rows.progress.sizes)
    if step is None:
        return None
    offset = int(view.storage_offset()) - int(value.storage_offset())
    row, first = divmod(offset, step)
    for lead in range(view.dim() + 1):
        if lead and view.shape[lead - 1] != 1 and view.stride(lead - 1) < step:
            break
        if not _inside(view, lead, first, step):
            continue
        if rows.blocks > 1 and lead >= 2 and view.shape[0] == rows.blocks and view.stride(0) == length * step:
            inner = view[0]
            if _row_step(inner, lead - 1) in (step, max(1, inner.numel())) and row < length:
                stop = row + prod(inner.shape[: lead - 1])
                return (stop, rows.blocks, lead) if stop <= length else None
        count = prod(view.shape[:lead])
        if count > 1 and _row_step(view, lead) != step:
            continue
        start = row % length
        if start + count <= length:
            return start + count, 1, lead
    return None


def blocks_of(tensor: torch.Tensor, rows: Rows, lead: int) -> tuple[torch.Tensor, ...]:
    """Return each block of a tensor with its rows as the first dimension: [length, ...].

    A kernel may depend on whether its operands are contiguous, so an operator runs on each block.
    """
    return tensor.view(rows.blocks, sum(rows.progress.sizes), *tensor.shape[lead:]).unbind()
