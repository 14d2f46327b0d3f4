"""A tensor whose heads are still to be multiplied: some of them can be had before the others, and all at any time.

`UnfinishedHeads` is an `UnfinishedTensor`: it has no storage, and whoever touches it waits, here for a product, and
goes on with the whole tensor. It begins as ``linear(x, weight, bias)`` (`heads_of_product`), whose columns are heads.
Operators that work on each head alone, such as views, rotary embeddings and norms of heads, give another such tensor.
`some` runs them, with the columns of the weight that they need, for the heads that are asked for: so that those of one
group are projected while another group's are on their way (ops/part_exchange.py). Correctness depends on no list of
operators: what is not known to work head by head runs whole.

Autograd records every operator as without heads to come, since all this happens below autograd.

    columns     x [M, K] @ w [K, N D] in groups of columns: only if these keep the bits of the whole on this machine
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch

from ascend_parallel.ops.call import ALL_REDUCE, Matmul
from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.probing import ROW_MAJOR, TRANSPOSED, Pieces, first_with_same_bits, log_time
from ascend_parallel.ops.record import MATMUL, compute, compute_rows
from ascend_parallel.ops.row_operator import CASTS, Constant, Like, listed
from ascend_parallel.ops.row_wise import OPERATORS
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import (
    MATMULS,
    RESHAPES,
    UnfinishedTensor,
    _register_optimizer_step_pre_hook,
    finished,
    settle_around_captures,
)
from ascend_parallel.ops.without_modes import without_grad_and_modes
from ascend_parallel.process_groups.backend import usual_backend

aten = torch.ops.aten

Places = tuple[tuple[int, int], ...]
"""Ranges of heads, each from its first to before its last."""

_LINES = {line.name: line for line in OPERATORS}
# Tensors that heads are made of later, with as many elements at most, are copied: a framework may free a norm's weight.
MOST_COPIED = 1 << 12
# Readers and makers of heads in several threads take turns: none of them waits for a collective.
_LOCK = threading.RLock()


class Axis(NamedTuple):
    """Where the heads of a tensor lie: `heads` heads of `unit` elements along the dimension `dim`."""

    dim: int
    heads: int
    unit: int

    def take(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """Return these heads of a tensor that has them all."""
        parts = [x.narrow(self.dim, first * self.unit, (stop - first) * self.unit) for first, stop in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def all_of(self, places: Places) -> bool:
        """Tell whether these are all heads, in order."""
        return places == ((0, self.heads),)


def merged(places: Sequence[tuple[int, int]]) -> Places:
    """Return ranges of heads without those that begin where the one before ends."""
    found: list[tuple[int, int]] = []
    for first, stop in places:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((first, stop))
    return tuple(found)


class HeadSource(NamedTuple):
    """What heads are made of: head i of `times` heads of the maker, from its head ``offset + i * times`` on."""

    maker: HeadMaker
    times: int = 1
    offset: int = 0

    def places(self, places: Places) -> Places:
        """Return which of the maker's heads these are made of."""
        return tuple((self.offset + first * self.times, self.offset + stop * self.times) for first, stop in places)


class HeadMaker:
    """How the heads of a tensor are made: all, or some, from those of other tensors.

    layout
        The whole tensor, without memory.
    some, whole
        Make heads at places, and all, from those of the sources.
    view
        Whether they lie in the memory of the only source.
    product
        What multiplies them, of a maker without sources.
    """

    def __init__(
        self,
        layout: torch.Tensor,
        axis: Axis,
        sources: Sequence[HeadSource],
        some: Callable[..., torch.Tensor],
        whole: Callable[..., torch.Tensor],
        *,
        device: torch.device,
        view: bool = False,
        reads: Sequence[torch.Tensor] = (),
        product: HeadProduct | None = None,
    ) -> None:
        """Hold how heads are made; `reads`: the tensors that must stay as they are until then."""
        self.layout, self.axis, self.device = layout, axis, device
        self.sources, self.product = tuple(sources), product
        self.memory: torch.Tensor | None = None
        self._root: HeadMaker = sources[0].maker._root if view else self  # has the memory
        self._some, self._whole = some, whole
        self._states = [(x, None if x.is_inference() else x._version) for x in reads]
        self._pieces: dict[Places, torch.Tensor] = {}
        self._reads: dict[Places, int] = defaultdict(int)
        self._readers = 0
        self._holder: Callable[[], _Holder | None] = lambda: None
        for source in () if view else self.sources:
            source.maker._root._readers += 1

    def holder(self) -> _Holder:
        """Return an object for a tensor to hold: the heads that are made are kept as long as it exists."""
        holder = self._root._holder() or _Holder()
        self._root._holder = weakref.ref(holder)
        return holder

    def check(self) -> None:
        """Raise `RuntimeError` if what heads are made of has changed, or its memory is gone."""
        for x, version in self._states:
            freed = x.numel() and not x.untyped_storage().nbytes()
            if freed or (version is not None and x._version != version):
                raise RuntimeError(
                    f"heads of attention are still to be made of a tensor of shape {list(x.shape)} that was changed in "
                    "place, or freed, between the projection and the attention: with a hook on the projection's "
                    "module they are made at once"
                )

    def some(self, places: Places, *, for_reader: bool = False) -> torch.Tensor:
        """Return the heads at places, in their order; they are forgotten once the last tensor is made of them."""
        with _LOCK:
            if self.axis.all_of(places):
                return self.whole()
            if self.memory is not None:
                return self.axis.take(self.memory, places)
            if (piece := self._pieces.get(places)) is None:
                self.check()
                given = [each.maker.some(each.places(places), for_reader=for_reader) for each in self.sources]
                piece = self._some(places, *given)
            if self._root is self:
                self._reads[places] += for_reader
                if self._reads[places] < self._readers or not for_reader or self._holder() is not None:
                    self._pieces[places] = piece
                else:
                    self._pieces.pop(places, None)
            return piece

    def whole(self) -> torch.Tensor:
        """Return all heads, in one memory."""
        with _LOCK:
            if self.memory is None:
                ranges = sorted(each for places in self._pieces for each in places)
                if merged(ranges) == ((0, self.axis.heads),):
                    self.memory = self._joined()
                else:
                    self.check()
                    self.memory = self._whole(*(each.maker.whole() for each in self.sources))
                self._pieces.clear()
                self._states, self.sources, self.product = [], (), None
                self._some = self._whole = _gone  # what they hold is freed
            return self.memory

    def _joined(self) -> torch.Tensor:
        """Return one tensor for the heads that have been made in pieces."""
        layout = self.layout
        memory = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self.device)
        for places, piece in self._pieces.items():
            sizes = [(stop - start) * self.axis.unit for start, stop in places]
            for (start, _), size, part in zip(
                places, sizes, torch.split_with_sizes(piece, sizes, self.axis.dim), strict=True
            ):
                memory.narrow(self.axis.dim, start * self.axis.unit, size).copy_(part)
        return memory

    def products(self, places: Places) -> list[tuple[HeadProduct, Places]]:
        """Return which heads of which products heads at places are made of."""
        if self.product is not None:
            return [(self.product, places)]
        return [found for each in self.sources for found in each.maker.products(each.places(places))]


class _Holder:
    """What tensors hold, and drop when they are gone: a tensor that torch alone holds keeps it too."""

    __slots__ = ("__weakref__",)


def _gone(*_: object) -> torch.Tensor:
    """Stand for what has made heads."""
    raise AssertionError("heads are made once")


@dataclass(frozen=True, eq=False)
class HeadProduct:
    """``x @ w (+ bias)``, whose columns are heads of `unit` columns: x [M, K], w [K, F]."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    unit: int
    name: str

    def whole(self) -> torch.Tensor:
        """Return the product [M, F]."""
        return compute(MATMUL, self.name, multiply, self.x, self.w, self.bias)

    def some(self, places: Places) -> torch.Tensor:
        """Return the columns of some heads."""
        return compute(MATMUL, self.name, multiply_columns, self.x, self.w, self.bias, self._columns(places))

    def _columns(self, places: Places) -> Places:
        return tuple((first * self.unit, stop * self.unit) for first, stop in places)

    def keeps_bits(self, groups: Sequence[Places]) -> bool:
        """Tell whether the columns of groups of heads have the bits of the whole product on this machine."""
        (m, k), n = self.x.shape, self.w.shape[1]
        layout = TRANSPOSED if self.w.stride(0) == 1 and n > 1 else ROW_MAJOR
        columns = tuple(map(self._columns, groups))
        of_product = m, k, n, self.x.dtype, self.x.device, layout, columns, self.bias is not None
        return _keeps_bits(*of_product, torch.get_num_threads())


def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ w (+ bias)``, by the call that torch makes of a linear layer."""
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


def multiply_columns(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, columns: Places) -> torch.Tensor:
    """Return some columns of ``x @ w (+ bias)``: one product, of the columns that are copied to lie side by side."""
    axis = Axis(1, w.shape[1], 1)
    w = axis._replace(dim=0).take(w.t(), columns).t() if w.stride(0) == 1 else axis.take(w, columns)
    return multiply(x, w, None if bias is None else Axis(0, len(bias), 1).take(bias, columns))


@lru_cache(maxsize=1024)
def _keeps_bits(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: str,
    groups: tuple[Places, ...],
    bias: bool,
    threads: int,
) -> bool:
    """Ask the machine. No rank needs to know what another answers: no collective depends on it."""
    matmul, backend = Matmul(ALL_REDUCE, m, k, n, dtype, device.type, 2), usual_backend(device.type)
    if not backend.blocks_host and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)  # as `bits` does, and for the same reason
    begin = time.perf_counter()
    cut = ColumnGroups(matmul, groups, bias, backend.launches)
    same = not first_with_same_bits([cut], (layout,), device)
    log_time(f"{matmul.product_in_words} of heads to come", begin)
    return same


@dataclass(frozen=True)
class ColumnGroups:
    """A matmul in groups of columns, as heads are multiplied; `launches` as in `CutProduct`."""

    matmul: Matmul
    groups: tuple[Places, ...]
    bias: bool
    launches: bool

    def pieces(self, x: torch.Tensor, w: torch.Tensor) -> Pieces:
        """Multiply x [m, k] and w [k, n] whole and in groups of columns."""
        bias = w[0] * 1e-6 if self.bias else None  # a larger one would hide the order of the sums
        whole = multiply(x, w, bias)
        for columns in self.groups:
            yield multiply_columns(x, w, bias, columns), Axis(1, w.shape[1], 1).take(whole, columns)


class UnfinishedHeads(UnfinishedTensor):
    """A tensor whose heads are still to be made; see the module."""

    _maker: HeadMaker

    @classmethod
    def of(cls, maker: HeadMaker, rows: Rows | None = None) -> UnfinishedHeads:
        """Return the tensor that `maker` makes; rows: of another tensor that it makes."""
        layout = maker.layout
        made: UnfinishedHeads = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.stride(), dtype=layout.dtype, device=maker.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._maker = maker
        made._rows = Rows(LazyRows((1,), partial(_make_whole, maker)), 1, 0) if rows is None else rows
        made._holder = maker.holder()
        return made

    def __getattr__(self, name: str) -> Any:
        """Return `_value`, the whole tensor, which is made now."""
        if name != "_value" or "_maker" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        progress = self._rows.progress
        progress.up_to(progress.count)
        self._value = self._maker.whole()
        return self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of heads to come: head by head if it is known to work so, else on the whole tensors."""
        kwargs = kwargs or {}
        rule = _rule_of(func) if set(types) == _ALONE and not _has_whole(args) else None
        if rule is not None and (result := rule(func, args, kwargs)) is not NotImplemented:
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def some(self, dim: int, places: Places) -> torch.Tensor:
        """Return some heads, those at places of the dimension `dim`, in their order."""
        progress, maker = self._rows.progress, self._maker
        ranges = _heads_at(maker.axis, dim, places)
        if ranges is None or "_value" in vars(self):
            return Axis(dim, self.shape[dim], 1).take(finished(self), places)

        def make() -> torch.Tensor:
            with without_grad_and_modes(progress._inference):
                return maker.some(ranges)

        return progress.make(make)

    def finished_unless_cut(self, dim: int, groups: Sequence[Places]) -> torch.Tensor:
        """Return itself, if its heads can be had in these groups with the bits of the whole; else the whole tensor."""
        ranges = [_heads_at(self._maker.axis, dim, places) for places in groups]
        if None in ranges or "_value" in vars(self):
            return finished(self)
        wanted: dict[HeadProduct, list[Places]] = defaultdict(list)
        for places in ranges:
            assert places is not None
            if not self._maker.axis.all_of(places):
                for product, of_product in self._maker.products(places):
                    wanted[product].append(of_product)
        keeps = all(product.keeps_bits(list(dict.fromkeys(cut))) for product, cut in wanted.items())
        return self if keeps else finished(self)


_ALONE = {UnfinishedHeads}


def _has_whole(args: Sequence[Any]) -> bool:
    """Tell whether one of the arguments has been made whole: who has its memory may have changed it."""
    given = (x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return any(isinstance(x, UnfinishedHeads) and "_value" in vars(x) for x in given)


def _make_whole(maker: HeadMaker, _: int) -> None:
    maker.whole()


def _heads_at(axis: Axis, dim: int, places: Places) -> Places | None:
    """Return the heads of an axis that lie at places of a dimension; None: they are no whole heads."""
    if axis.dim != dim or any(place % axis.unit for each in places for place in each):
        return None
    return merged([(first // axis.unit, stop // axis.unit) for first, stop in places])


def heads_of_product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, unit: int, name: str
) -> UnfinishedHeads:
    """Return ``x @ w (+ bias)`` [M, F], not multiplied yet: x [M, K], w [K, F], whose columns are heads of `unit`."""
    product = HeadProduct(x, w, bias, unit, name)
    layout = torch.empty((len(x), w.shape[1]), dtype=x.dtype, device="meta")
    axis = Axis(1, w.shape[1] // unit, unit)
    reads = [each for each in (x, w, bias) if each is not None]
    maker = HeadMaker(layout, axis, (), product.some, product.whole, device=x.device, reads=reads, product=product)
    _register_optimizer_step_pre_hook()
    settle_around_captures()
    return UnfinishedHeads.of(maker)


# --- Operators that work on each head alone.
Rule = Callable[..., Any]


@lru_cache(maxsize=512)
def _rule_of(func: Any) -> Rule | None:
    """Return the function that runs an operator head by head, or returns NotImplemented; None: there is none."""
    if func in MATMULS:
        return None
    if func in _NEW:
        return lambda func, args, kwargs: func(_like(args[0]), *args[1:], **kwargs)
    if func in (aten.detach.default, aten.alias.default):
        return lambda func, args, kwargs: _alias(args[0])
    if func in RESHAPES:
        return _reshaped
    if func in _MOVES:
        return _moved
    if func in (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default):
        return _parts
    if func in (aten.cat.default, aten.stack.default):
        return _joined
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if func in CASTS or torch.Tag.pointwise in func.tags:
        return _elementwise
    line = _LINES.get(func._schema.name)
    return None if line is None or line.summed else partial(_along_heads, line)


_NEW = (aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


def _like(x: UnfinishedHeads) -> torch.Tensor:
    """Return a tensor of the dtype and device of x."""
    return torch.empty((), dtype=x.dtype, device=x.device)


def _alias(x: UnfinishedHeads) -> UnfinishedHeads:
    made = UnfinishedHeads.of(x._maker, x._rows)
    if "_value" in vars(x):
        made._value = x._value
    return made


def _made(
    func: Any,
    layout: torch.Tensor,
    axis: Axis,
    sources: Sequence[tuple[UnfinishedHeads, int, int]],
    some: Callable[..., torch.Tensor],
    whole: Callable[..., torch.Tensor],
    *,
    view: bool = False,
    reads: Sequence[torch.Tensor] = (),
) -> UnfinishedHeads:
    """Return what an operator makes of heads to come, each with how many of its heads one of these has, and the first.

    Whoever changes one of them has these made before.
    """
    name = func._schema.name
    makers = [HeadSource(x._maker, times, offset) for x, times, offset in sources]
    runs = partial(compute_rows, name, some), partial(compute_rows, name, whole)
    device = sources[0][0].device
    made = UnfinishedHeads.of(HeadMaker(layout, axis, makers, *runs, device=device, view=view, reads=reads))
    for x, *_ in sources:
        x._rows.progress.read_by(made._rows.progress)
    return made


@lru_cache(maxsize=4096)
def _layouts(func: Any, args: tuple[Any, ...], named: tuple[tuple[str, Constant], ...]) -> list[torch.Tensor]:
    """Return what an operator makes of tensors without memory; empty: it has no such form."""
    given = [[each.made() for each in arg] if isinstance(arg, list) else arg.made() for arg in map(_listed, args)]
    with without_grad_and_modes():
        try:
            found = func(*given, **{name: each.made() for name, each in named})
        except (NotImplementedError, RuntimeError):
            return []
    results = listed(found)
    return list(results) if all(isinstance(each, torch.Tensor) for each in results) else []


def _listed(arg: Any) -> Any:
    """Return a list of described tensors, which a key has as a tuple, as a list again."""
    tensors = isinstance(arg, tuple) and not isinstance(arg, (Like, Constant))
    return list(arg) if tensors else arg


def _layouts_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    described: list[Any] = []
    for arg in args:
        tensors = isinstance(arg, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in arg)
        described.append(tuple(map(_described, arg)) if tensors else _described(arg))
    named = [(name, Constant.of(value)) for name, value in kwargs.items()]
    if None in described or any(value is None for _, value in named):
        return []
    return _layouts(func, tuple(described), tuple(named))


def _described(arg: Any) -> Like | Constant | None:
    if isinstance(arg, torch.Tensor):
        return Like(tuple(arg.shape), tuple(arg.stride()), arg.dtype)
    return Constant.of(arg)


def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """View heads in another shape, in which they lie along one dimension again."""
    x, axis = args[0], args[0]._maker.axis
    layouts = _layouts_of(func, args, kwargs)
    if not layouts:
        return NotImplemented
    shape = tuple(layouts[0].shape)
    found = _axis_of_view(axis, tuple(x.shape), shape)
    if found is None:
        return NotImplemented
    new, times = found

    def some(places: Places, piece: torch.Tensor) -> torch.Tensor:
        count = sum(stop - first for first, stop in places)
        return piece.reshape(*shape[: new.dim], count * new.unit, *shape[new.dim + 1 :])

    return _made(func, layouts[0], new, [(x, times, 0)], some, lambda whole: whole.reshape(shape), view=True)


@lru_cache(maxsize=4096)
def _axis_of_view(axis: Axis, old: Sizes, new: Sizes) -> tuple[Axis, int] | None:
    """Return where heads lie in another shape, and how many of the old ones a new one has; None: in no dimension."""
    lead, elements = prod(old[: axis.dim]), axis.unit * prod(old[axis.dim + 1 :])
    for dim in range(len(new)):
        if prod(new[:dim]) != lead or new[dim] == 1 != axis.heads:
            continue
        behind = prod(new[dim + 1 :])
        if behind and elements % behind == 0 and new[dim] == axis.heads * (elements // behind):
            return Axis(dim, axis.heads, elements // behind), 1
        if elements and behind % elements == 0 and new[dim] * (behind // elements) == axis.heads:
            return Axis(dim, new[dim], 1), behind // elements
        return None
    return None


_MOVES = (aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.select.int)


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Move the dimension of the heads, or leave out another."""
    x, axis = args[0], args[0]._maker.axis
    layouts = _layouts_of(func, args, kwargs)
    if not layouts or kwargs:
        return NotImplemented
    dims = list(range(x.dim()))
    if func is aten.transpose.int:
        first, second = args[1] % x.dim(), args[2] % x.dim()
        dims[first], dims[second] = dims[second], dims[first]
    elif func is aten.permute.default:
        dims = [dim % x.dim() for dim in args[1]]
    elif func is aten.unsqueeze.default:
        dims.insert(args[1] % (x.dim() + 1), -1)
    elif dims.pop(args[1] % x.dim()) == axis.dim:
        return NotImplemented
    new = axis._replace(dim=dims.index(axis.dim))
    run = partial(_with_more, func, args[1:])
    return _made(func, layouts[0], new, [(x, 1, 0)], lambda _, piece: run(piece), run, view=True)


def _with_more(func: Any, more: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = func(x, *more)
    return result


def _parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Cut heads along another dimension, or take some whole heads."""
    x, axis = args[0], args[0]._maker.axis
    layouts = _layouts_of(func, args, kwargs)
    if not layouts or kwargs:
        return NotImplemented
    slices = func is aten.slice.Tensor
    dim = (args[1] if slices else args[2]) if len(args) > (1 if slices else 2) else 0
    dim %= x.dim()
    if slices and len(args) > 4 and args[4] != 1 and dim == axis.dim:
        return NotImplemented
    made: list[UnfinishedHeads] = []
    begin = 0
    if slices and len(args) > 2 and args[2]:
        begin = min(max(args[2] + x.shape[dim] if args[2] < 0 else args[2], 0), x.shape[dim])
    for index, layout in enumerate(layouts):
        size = layout.shape[dim]

        def part(given: torch.Tensor, index: int = index) -> torch.Tensor:
            result: torch.Tensor = listed(func(given, *args[1:]))[index]
            return result

        if dim != axis.dim:
            made.append(
                _made(func, layout, axis, [(x, 1, 0)], lambda _, piece, part=part: part(piece), part, view=True)
            )
            continue
        if begin % axis.unit or size % axis.unit or not size:
            return NotImplemented
        new, first = axis._replace(heads=size // axis.unit), begin // axis.unit
        made.append(_made(func, layout, new, [(x, 1, first)], lambda _, piece: piece, part, view=True))
        begin += size
    return made[0] if slices else made


def _joined(func: Any, args: Any, kwargs: Any) -> Any:
    """Put heads of several tensors side by side, along another dimension."""
    tensors = args[0]
    layouts = _layouts_of(func, args, kwargs)
    if not layouts or kwargs or not all(isinstance(x, UnfinishedHeads) for x in tensors):
        return NotImplemented
    axis, dims = tensors[0]._maker.axis, layouts[0].dim()
    dim = (args[1] if len(args) > 1 else 0) % dims
    if any(x._maker.axis != axis or x.dim() != tensors[0].dim() for x in tensors):
        return NotImplemented
    if func is aten.stack.default:
        axis = axis._replace(dim=axis.dim + (dim <= axis.dim))
    elif dim == axis.dim:
        return NotImplemented

    def whole(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(given, dim)
        return result

    return _made(func, layouts[0], axis, [(x, 1, 0) for x in tensors], lambda _, *given: whole(*given), whole)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise operator on heads, with other tensors that have the same value for all heads, or all heads."""
    if isinstance(args[0], UnfinishedHeads) and kwargs.get("device") == args[0].device:  # as autograd writes a cast
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if kwargs.get("device") is not None:
        return NotImplemented
    layouts = _layouts_of(func, args, kwargs)
    if len(layouts) != 1:
        return NotImplemented
    heads = [x for x in args if isinstance(x, UnfinishedHeads)]
    ends = {(x._maker.axis.dim - x.dim(), *x._maker.axis[1:]) for x in heads}
    if len(ends) != 1:
        return NotImplemented
    ((end, count, unit),) = ends
    axis = Axis(layouts[0].dim() + end, count, unit)
    given, reads = list(args), []
    cut: list[int] = []  # the places of tensors that have all heads
    for place, x in enumerate(args):
        if not isinstance(x, torch.Tensor) or isinstance(x, UnfinishedHeads):
            continue
        if x.dim() >= -end and x.shape[end] != 1:
            if x.shape[end] != count * unit:
                return NotImplemented
            cut.append(place)
        if x.numel() <= MOST_COPIED:
            given[place] = x.clone()
        elif x.is_inference():
            return NotImplemented
        else:
            reads.append(x)
    return _made_of(func, given, kwargs, layouts[0], axis, cut, end, reads)


def _made_of(
    func: Any,
    given: Sequence[Any],
    kwargs: dict[str, Any],
    layout: torch.Tensor,
    axis: Axis,
    cut: Sequence[int],
    end: int,
    reads: Sequence[torch.Tensor],
) -> UnfinishedHeads:
    """Return the result of an operator whose arguments are heads to come, and others, of which some are cut."""
    places_of_heads = [place for place, x in enumerate(given) if isinstance(x, UnfinishedHeads)]
    sources = [(given[place], 1, 0) for place in places_of_heads]
    others = [None if isinstance(x, UnfinishedHeads) else x for x in given]

    def run(places: Places | None, *pieces: torch.Tensor) -> torch.Tensor:
        arguments = list(others)
        for place, piece in zip(places_of_heads, pieces, strict=True):
            arguments[place] = piece
        for place in cut if places is not None else ():
            x = others[place]
            assert isinstance(x, torch.Tensor) and places is not None
            arguments[place] = axis._replace(dim=x.dim() + end).take(x, places)
        result: torch.Tensor = func(*arguments, **kwargs)
        return result

    return _made(func, layout, axis, sources, run, partial(run, None), reads=reads)


def _along_heads(line: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator of the table along dimensions behind that of the heads, such as a norm of each head."""
    x = args[0]
    layouts = _layouts_of(func, args, kwargs)
    if len(layouts) != 1 or not isinstance(x, UnfinishedHeads):
        return NotImplemented
    if line.dim is None:
        trailing = line.trailing(args) or 0
    else:
        dims = args[line.dim] if line.dim < len(args) else func._schema.arguments[line.dim].default_value
        if not isinstance(dims, int) and not dims:
            return NotImplemented
        trailing = max(x.dim() - dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims))
    axis = x._maker.axis
    others = [each for each in args[1:] if isinstance(each, torch.Tensor)]
    if trailing >= x.dim() - axis.dim or any(isinstance(each, UnfinishedHeads) for each in others):
        return NotImplemented
    given = [each.clone() if isinstance(each, torch.Tensor) and each is not x else each for each in args]
    return _made_of(func, given, kwargs, layouts[0], axis, (), 0, ())
