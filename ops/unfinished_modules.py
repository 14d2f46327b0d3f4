"""Modules that work row by row, run on the rows that have arrived, whatever kernel is inside.

The operators of ops/unfinished.py are torch's, by name. A module may call any kernel: a fused norm, a quantised matmul,
an operator of a vendor. If each row of its results depends on the same row of its inputs alone, `by_rows` runs it chunk
by chunk as the rows come. Who calls `by_rows` vouches for that (ops/row_wise.py); all else waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ascend_parallel.ops.lazy_rows import LazyRows, RowPieces, Rows
from ascend_parallel.ops.record import RECORDING, compute_rows
from ascend_parallel.ops.row_operator import Unchanged
from ascend_parallel.ops.rows import stops_of
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished, given_away, is_unfinished, may_be_filled_later
from ascend_parallel.ops.without_modes import without_grad_and_modes

# Rows of the first call of a module, with zeros, which tells the shapes and dtypes of its results.
TRIED_ROWS = 16


@dataclass(frozen=True)
class _Result:
    """A result of a module without its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Results:
    """The results of a module: of a tuple or a list, `kind`, or one tensor alone."""

    each: tuple[_Result, ...]
    kind: type | None

    @staticmethod
    def of(made: Any) -> _Results:
        """Describe what a module has returned; raises `TypeError` if that is not made of tensors."""
        each, kind = [], type(made) if isinstance(made, (tuple, list)) else None
        for result in (made,) if kind is None else made:
            if not isinstance(result, torch.Tensor) or not result.dim():
                raise TypeError(f"expected a tensor of rows or several, found {type(made).__name__}")
            each.append(_Result(tuple(result.shape[1:]), result.dtype))
        return _Results(tuple(each), kind)


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], _Results]] = WeakKeyDictionary()


def rows_to_come(inputs: Sequence[torch.Tensor]) -> list[UnfinishedTensor]:
    """Return the inputs whose rows are still to come, on which `by_rows` can run as they arrive; none: it cannot."""
    unfinished = [x for x in inputs if isinstance(x, UnfinishedTensor) and is_unfinished(x)]
    if not unfinished or not may_be_filled_later():
        return []
    for x in inputs:
        if not _has_rows(x, inputs[0].shape[0]):
            return []
    return unfinished


def by_rows(
    module: Any,
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    writes: bool = False,
    keeps: bool = True,
    name: str = "",
) -> Any:
    """Return ``function(*inputs)``, unfinished where an input is: it runs on the rows that have arrived.

    inputs    [M, ...] each, with the same M
    returns   [M, ...], a tensor or a tuple or list of tensors

    module: what the function belongs to; its results have the same shapes and dtypes for the same inputs. The function
    gives each row what it would give it alone. writes: it may change its inputs; it then gets copies, and theirs stay.
    keeps: finished inputs may change before the other rows have come, and are copied; else a change is an error.
    name: for errors and records.

    Results lie in pieces, a chunk each, until a function of torch, or who else reads memory, asks for the whole tensor:
    of a chain of modules a chunk is freed once the next module has read it.
    """
    if not (unfinished := rows_to_come(inputs)):
        return function(*map(given_away if writes else finished, inputs))
    results = _results_of(module, function, inputs)
    sizes, m = unfinished[0]._rows.progress.sizes, inputs[0].shape[0]
    device = unfinished[0].device
    written = [RowPieces((m, *each.shape), each.dtype, device, sizes) for each in results.each]
    stops, name = stops_of(sizes), name or type(module).__name__
    read: list[Sequence[torch.Tensor]] = []
    in_pieces: list[RowPieces] = []
    pulls: list[Callable[[int], object]] = []

    def fill(index: int) -> None:
        for pull in pulls:
            pull(stops[index])
        if (made_here := itself()) is None or made_here.filled >= stops[index]:
            return  # work beside a wait has asked for it, and somebody may have changed it
        rows = [chunks[index].clone() if writes else chunks[index] for chunks in read]
        run = function if RECORDING.recorder is None else partial(compute_rows, name, function)
        made = run(*rows)
        if (found := _Results.of(made)) != results:
            raise RuntimeError(f"{name} was expected to return {results.each}, and returned {found.each}")
        for result, part in zip(written, (made,) if results.kind is None else made, strict=True):
            if part.shape[0] != sizes[index]:
                raise RuntimeError(f"{name} was given {sizes[index]} rows, and returned {part.shape[0]}")
            if result.memory is not None:
                result.rows[index].copy_(part)
            else:  # a copy, since the module may return memory that it writes again
                result.rows[index] = part.clone(memory_format=torch.contiguous_format)
        for source in in_pieces:
            source.was_read(index)

    read_later = [] if keeps else [x for x in inputs if not isinstance(x, UnfinishedTensor)]
    check = Unchanged(name, [(x, x) for x in read_later]).check if read_later else None
    progress = LazyRows(sizes, fill, check=check)
    itself = weakref.ref(progress)  # rows that nobody reads go at once
    for x in inputs:
        pieces = x.pieces if isinstance(x, UnfinishedTensor) else None
        if not isinstance(x, UnfinishedTensor) or (pieces is None and x._rows.progress.finished):
            read.append((_kept(x) if keeps else finished(x)).split_with_sizes(sizes))
            continue
        progress_of_x = x._rows.progress
        pull = progress_of_x.read_by(progress)
        pulls.append(pull)
        if pieces is not None and pieces.sizes == sizes and pull == progress_of_x.pull:
            read.append(pieces.read_by_one_more())
            in_pieces.append(pieces)
        else:  # memory that is read in another stream is freed with all its rows
            read.append(x._value.split_with_sizes(sizes))
    tensors = [UnfinishedTensor.in_pieces(result, Rows(progress, 1, 1)) for result in written]
    return tensors[0] if results.kind is None else results.kind(tensors)


def _has_rows(x: torch.Tensor, m: int) -> bool:
    """Tell whether x is [M, ...] with its rows along the first dimension, in one block."""
    if x.dim() < 2 or x.shape[0] != m:
        return False
    if not isinstance(x, UnfinishedTensor) or x._rows.progress.finished:
        return True
    return x._rows.lead == 1 and x._rows.blocks == 1 and sum(x._rows.progress.sizes) == m


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Return finished rows as they are now: who has them may change them before the other rows have come."""
    return finished(x).clone()


def _results_of(module: Any, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> _Results:
    """Return the results' shapes and dtypes; at the first call with such inputs the function runs on zeros."""
    known = _KNOWN.setdefault(module, {})
    key = tuple((x.shape[1:], x.dtype, x.device) for x in inputs)
    if key not in known:
        with without_grad_and_modes(torch.is_inference_mode_enabled()):
            zeros = [torch.zeros((TRIED_ROWS, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in inputs]
            known[key] = _Results.of(function(*zeros))
    return known[key]
