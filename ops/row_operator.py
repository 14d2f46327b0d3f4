"""An operator that runs row by row: how it does so, from shapes alone, and its operands and results in chunks.

Whatever follows from the operator and the shapes of its arguments is found once, in `plan_of`, and kept. What is left
for a call is to cut memory; for a chunk, torch's operator: the host should pay for a chunk little more than for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ascend_parallel.ops.lazy_rows import LazyRows
from ascend_parallel.ops.record import RECORDING, compute_rows
from ascend_parallel.ops.row_views import pieces_of
from ascend_parallel.ops.rows import Sizes, stops_of
from ascend_parallel.ops.without_modes import without_grad_and_modes

aten = torch.ops.aten

# Elementwise operators that torch does not tag so.
CASTS = (aten._to_copy.default, aten.clone.default)


class Like(NamedTuple):
    """A tensor among the arguments of an operator; of unfinished rows also where they lie, else there are no blocks."""

    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    blocks: int = 0
    lead: int = 0
    sizes: Sizes = ()

    def made(self) -> torch.Tensor:
        """Return a tensor without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Constant(NamedTuple):
    """Another argument, or a list of them as a tuple."""

    kind: Any  # 1, 1.0 and True are equal, and promote other dtypes; of a list a tuple of kinds
    value: Any

    def made(self) -> Any:
        """Return the argument."""
        return list(self.value) if isinstance(self.kind, tuple) else self.value

    @classmethod
    def of(cls, value: Any) -> Constant | None:
        """Describe an argument; None if it is a tensor, or a list with tensors: no operator by rows has such a list."""
        if not isinstance(value, (list, tuple)):
            return None if isinstance(value, torch.Tensor) else cls(type(value), value)
        for each in value:
            if isinstance(each, (torch.Tensor, list, tuple)):
                return None
        return cls(tuple(map(type, value)), tuple(value))


Argument = Like | Constant
Named = tuple[tuple[str, Constant], ...]


class Cut(NamedTuple):
    """An argument that has the rows: its place, its blocks [length, ...] or [blocks, length, ...], and whether rows of
    it are to come."""

    place: int
    blocks: Sizes
    unfinished: bool


class Result(NamedTuple):
    """A result: its shape, its blocks as of `Cut`, and its dtype."""

    shape: Sizes
    blocks: Sizes
    dtype: torch.dtype


@dataclass(frozen=True)
class RowPlan:
    """How an operator runs by rows.

    run       what runs on a chunk
    like      the place of the argument whose rows the results have, in `blocks` blocks and `lead` leading dimensions
    cut       the arguments with these rows
    small     the places of arguments as small as a row, with their shapes without leading dimensions
    kept      the places of other tensors, which may not change before the rows come
    results   none: it changes its first argument
    several   whether the results come as a list
    outs      the names of the arguments of `run` to which it writes its results; empty: it returns them
    copies    whether its result is its argument in the dtype of the result
    """

    run: Callable[..., Any]
    like: int
    blocks: int
    lead: int
    cut: tuple[Cut, ...]
    small: tuple[tuple[int, Sizes], ...] = ()
    kept: tuple[int, ...] = ()
    results: tuple[Result, ...] = ()
    several: bool = False
    outs: tuple[str, ...] = ()
    copies: bool = False


@lru_cache(maxsize=4096)
def plan_of(func: Any, args: tuple[Argument, ...], named: Named, trailing: int | None = None) -> RowPlan | None:
    """Return how an operator runs by rows: elementwise, or along the last `trailing` dimensions of its first argument.

    None: no rows are to come, or its results do not have them.
    """
    if not any(isinstance(each, Like) and each.blocks for each in args):
        return None
    found = results_of(func, args, named)
    if found is None:
        return None
    shapes, several = found
    dims = len(shapes[0][0]) if trailing is None else len(args[0].shape) if isinstance(args[0], Like) else 0
    place = next((place for place, each in enumerate(args) if _leads(each, shapes[0][0], dims)), None)
    if place is None:
        return None
    like = args[place]
    assert isinstance(like, Like)
    if trailing is not None and (place or trailing > dims - like.lead):
        return None
    operands = _operands(args, like, dims)
    if operands is None or not all(_same_lead(like, shape) for shape, _ in shapes):
        return None
    results = tuple(Result(shape, _blocks(like, shape), dtype) for shape, dtype in shapes)
    run, outs = _writing(func)
    cut, small = operands
    return RowPlan(
        run=run,
        like=place,
        blocks=like.blocks,
        lead=like.lead,
        cut=cut,
        small=small,
        results=results,
        several=several,
        outs=outs,
        copies=func in CASTS and not outs,
    )


@lru_cache(maxsize=4096)
def plan_of_change(func: Any, args: tuple[Argument, ...]) -> RowPlan | None:
    """Return how an elementwise operator changes its first argument, whose rows alone are to come, else None."""
    like = args[0]
    if [place for place, each in enumerate(args) if isinstance(each, Like) and each.blocks] != [0]:
        return None
    assert isinstance(like, Like)
    operands = _operands(args, like, len(like.shape))
    return None if operands is None else RowPlan(func, 0, like.blocks, like.lead, *operands)


def _leads(each: Argument, shape: Sizes, dims: int) -> bool:
    """Tell whether a result has the rows of an unfinished argument."""
    return isinstance(each, Like) and bool(each.blocks) and len(each.shape) == dims and _same_lead(each, shape)


def _operands(
    args: Sequence[Argument], like: Like, dims: int
) -> tuple[tuple[Cut, ...], tuple[tuple[int, Sizes], ...]] | None:
    """Return `RowPlan.cut` and `RowPlan.small`, of a result with `dims` dimensions; None: an argument is neither."""
    cut: list[Cut] = []
    small: list[tuple[int, Sizes]] = []
    for place, each in enumerate(args):
        if not isinstance(each, Like):
            continue
        inner = max(0, len(each.shape) - (dims - like.lead))
        if len(each.shape) == dims and _same_lead(like, each.shape):
            if each.blocks and (each.blocks, sum(each.sizes)) != (like.blocks, sum(like.sizes)):
                return None
            blocks = _blocks(like, each.shape)
            if not _can_be_viewed(each, blocks):  # its rows are not evenly spaced
                return None
            cut.append(Cut(place, blocks, bool(each.blocks)))
        elif each.blocks or any(size != 1 for size in each.shape[:inner]):
            return None
        else:
            # With a dimension, unless it has none: torch promotes a tensor without dimensions as a number.
            small.append((place, each.shape[inner:] or each.shape[-1:]))
    return tuple(cut), tuple(small)


def _same_lead(like: Like, shape: Sizes) -> bool:
    return tuple(shape[: like.lead]) == tuple(like.shape[: like.lead])


def _blocks(like: Like, shape: Sizes) -> Sizes:
    """Return the shape of a tensor's blocks, as of `Cut`."""
    rows = (sum(like.sizes), *shape[like.lead :])
    return rows if like.blocks == 1 else (like.blocks, *rows)


def _can_be_viewed(each: Like, shape: Sizes) -> bool:
    with without_grad_and_modes():
        try:
            each.made().view(shape)
        except RuntimeError:
            return False
    return True


@lru_cache(maxsize=4096)
def results_of(
    func: Any, args: tuple[Argument, ...], named: Named
) -> tuple[list[tuple[Sizes, torch.dtype]], bool] | None:
    """Return shape and dtype of each result, and whether there are several; None if they are no contiguous tensors."""
    if any(str(result.type) != "Tensor" for result in func._schema.returns):
        return None
    with without_grad_and_modes():
        try:
            found = func(*(each.made() for each in args), **{name: each.made() for name, each in named})
        except (NotImplementedError, RuntimeError):  # no meta kernel; or the call is wrong, which the whole call says
            return None
    results = listed(found)
    if not all(isinstance(result, torch.Tensor) and result.is_contiguous() for result in results):
        return None
    return [(tuple(result.shape), result.dtype) for result in results], not isinstance(found, torch.Tensor)


def listed(results: Any) -> Sequence[torch.Tensor]:
    """Return the results of a function, one or several, as a sequence."""
    return (results,) if isinstance(results, torch.Tensor) else results


@lru_cache(maxsize=512)
def _writing(func: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the form of an operator with one result that writes it to an argument, and its name; else the operator."""
    if not isinstance(func, torch._ops.OpOverload) or len(func._schema.returns) != 1:
        return func, ()
    arguments = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        *same, last = other._schema.arguments
        if last.is_out and [(argument.name, str(argument.type)) for argument in same] == arguments:
            return other, (last.name,)
    return func, ()


class Unchanged:
    """Tensors that rows are made of later: they have to be then as they are now."""

    def __init__(self, reader: str, tensors: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Note tensors, each with its memory, which is another tensor if its rows are to come; name their reader.

        None: who asks for the memory, or changes it, has the reader read first.
        """
        self._reader = reader
        self._states: list[tuple[torch.Tensor, torch.Tensor | None, int | None, int]] = []
        for tensor, memory in tensors:
            version = None if tensor.is_inference() else tensor._version
            self._states.append((tensor, memory, version, 0 if memory is None else memory.untyped_storage().nbytes()))

    def check(self) -> None:
        """Raise `RuntimeError` if a tensor has changed, or its memory is gone."""
        for tensor, memory, version, size in self._states:
            freed = memory is not None and memory.untyped_storage().nbytes() != size
            if freed or (version is not None and tensor._version != version):
                raise RuntimeError(
                    f"{self._reader} of a region reads a tensor of shape {list(tensor.shape)} that was changed in "
                    "place, or freed, before the rows of its other operand had come; COC_REGION=0 runs the layers one "
                    "by one"
                )


class CutRows(NamedTuple):
    """The memory of a tensor with rows, viewed as `blocks`, of `Cut`, and cut into chunks of `sizes` rows."""

    blocks: Sizes
    sizes: Sizes
    pieces: Sequence[torch.Tensor]


class RowOperator:
    """An operator of unfinished rows: its operands and the memory of its results, cut into chunks.

    results   the memory, not filled yet
    cuts      the results' chunks
    sources   the progress of operands whose rows are to come
    pulls     what finishes these rows up to a row, for whoever knows the progress of the results to fill in
    """

    def __init__(
        self,
        name: str,
        plan: RowPlan,
        args: Sequence[Any],
        memory: Sequence[Any],
        kwargs: dict[str, Any],
        sizes: Sizes,
    ) -> None:
        """Cut the operands into chunks of `sizes` rows.

        args: an operand of which rows are to come has `_rows`. memory: the arguments, each tensor as torch's own.
        Operands as small as a row are copied: FSDP may free a norm's weight before the rows are there.
        """
        self._name, self._plan, self._stops = name, plan, stops_of(sizes)
        self._args, self._kwargs = list(memory), dict(kwargs)
        self.results: list[torch.Tensor] = []
        self.sources: list[LazyRows] = []
        self.pulls: list[Callable[[int], object]] = []
        self.cuts: list[CutRows] = []
        self._done = 0  # pieces
        self._cut: list[tuple[int, Sequence[torch.Tensor]]] = []
        self._places: list[Sequence[torch.Tensor]] = []
        in_pieces: Callable[[torch.Tensor, Sizes], Sequence[torch.Tensor]]
        in_pieces = torch.Tensor.split_with_sizes if plan.blocks == 1 else pieces_of
        read: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for place in plan.kept:
            read.append((args[place], args[place]))
        for place, shape, unfinished in plan.cut:
            tensor, operand, cut = args[place], memory[place], None
            if unfinished:
                cut = tensor._cut
                if plan.results or place:  # else the operator changes it
                    read.append((tensor, None))
                    self.sources.append(tensor._rows.progress)
            elif tensor.is_inference():
                operand = operand.clone()  # it has no version that would tell of a change
            else:
                read.append((tensor, operand))
            if cut is None or cut[:2] != (shape, sizes):
                rows = operand if operand.shape == shape else operand.view(shape)
                cut = CutRows(shape, sizes, in_pieces(rows, sizes))
                if unfinished:
                    tensor._cut = cut
            self._cut.append((place, cut.pieces))
        for place, shape in plan.small:
            small = memory[place].clone()
            self._args[place] = small if small.shape == shape else small.reshape(shape)
        for shape, blocks, dtype in plan.results:
            result = torch.empty(shape, dtype=dtype, device=args[plan.like].device)
            self.results.append(result)
            self._places.append(in_pieces(result if shape == blocks else result.view(blocks), sizes))
            self.cuts.append(CutRows(blocks, sizes, self._places[-1]))
        self.check = Unchanged(name, read).check

    def fill(self, index: int) -> None:
        """Run on a chunk, once its operands' rows are there.

        What has run does not run again, after an error or from work beside a wait: it may have changed its operand, or
        somebody its result.
        """
        for pull in self.pulls:
            pull(self._stops[index])
        plan, args, kwargs = self._plan, self._args, self._kwargs
        run = plan.run if RECORDING.recorder is None else partial(compute_rows, self._name, plan.run)
        copies = plan.copies and RECORDING.recorder is None  # the copy of a result to its place casts it
        for piece in range(max(self._done, index * plan.blocks), (index + 1) * plan.blocks):
            for place, pieces in self._cut:
                args[place] = pieces[piece]
            for out, places in zip(plan.outs, self._places, strict=False):
                kwargs[out] = places[piece]
            found = args[plan.like] if copies else run(*args, **kwargs)
            if not plan.outs:
                for places, result in zip(self._places, found if plan.several else (found,), strict=False):
                    places[piece].copy_(result)
            self._done = piece + 1
