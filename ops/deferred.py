"""A product that nobody has multiplied yet, with what was added to it: the next collective multiplies it in chunks.

A low-rank adapter adds its own product to that of the layer before the ranks sum both:

    y = all_reduce(x @ w + a)

`DeferredProduct` stands for ``x @ w``. Adding a tensor gives another deferred product, ``x @ w + a``, in this order; so
does what moves its rows. Every other function, also one that is not known here, multiplies at once and goes on with a
plain tensor. The collective of ops/operators.py that gets a deferred product multiplies chunk by chunk, each under the
last chunk's collective; if it gets a plain tensor, it runs alone, in the same number of pieces. In backward the
gradient of such a sum may come as a `GatheredGradient`, with what the gather has multiplied already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.utils._pytree as pytree

from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.unfinished import UnfinishedTensor, may_write
from ascend_parallel.ops.without_modes import without_grad_and_modes

aten = torch.ops.aten

_ADDS = (aten.add.Tensor, aten.add_.Tensor)
_NEW = (aten.new_empty.default, aten.new_zeros.default)
# They give a tensor of the same memory, or of the same shape.
_SAME = (aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default)
# Views of all elements.
_KEEPS_DX = (*_SAME, aten.t.default, aten.transpose.int)


@dataclass
class _Terms:
    """What is added to a product, and their value once somebody has read it: aliases share it.

    versions
        Of the operands and the addends, when they were taken.
    has_views
        Whether there is a tensor of the same memory with its rows in another order.
    """

    addends: tuple[torch.Tensor, ...]
    versions: list[int] = field(default_factory=list)
    value: torch.Tensor | None = None
    has_views: bool = False


class DeferredProduct(UnfinishedTensor):
    """The product x @ w [..., N] and the sum with `addends`, in their order.

    x               [..., K]
    w               [K, N]
    addends         each [..., N], as the product; aliases (a view of the same shape, detach) share them
    sources         the DTensors whose local tensors x and w are: an operator in place raises their versions alone
    wants_dx        whether backward takes the gradient of x from a `GatheredGradient`
    """

    x: torch.Tensor
    w: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    wants_dx: bool
    _terms: _Terms
    _own: torch.Tensor | None
    _viewed: DeferredProduct | None
    _family: list[ref[DeferredProduct]]

    @staticmethod
    def __new__(
        cls: type[DeferredProduct],
        x: torch.Tensor,
        w: torch.Tensor,
        addends: Sequence[torch.Tensor] = (),
        sources: Sequence[torch.Tensor] = (),
        wants_dx: bool = False,
    ) -> DeferredProduct:
        """Hold the operands, which must stay as they are; the addends lie as x does."""
        size, columns = (*x.shape[:-1], w.shape[1]), w.shape[1]
        strides = tuple(stride // x.shape[-1] * columns for stride in x.stride()[:-1])
        made: DeferredProduct = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=(*strides, 1), dtype=x.dtype, device=x.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.x, made.w, made.sources, made.wants_dx = x, w, tuple(sources), wants_dx
        made._rows = Rows(LazyRows((), lambda index: None), 1, 0)
        made._terms, made._viewed, made._own = _Terms(tuple(addends)), None, None
        made._terms.versions = list(map(version_of, made._operands()))
        made._family = [ref(made)]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Add to the product, or move its rows; run every other function on the product."""
        result = NotImplemented
        if not kwargs or func is aten.clone.default or func in _NEW:
            result = _deferred(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs) if result is NotImplemented else result

    def with_addends(self, addends: Sequence[torch.Tensor], x: torch.Tensor | None = None) -> DeferredProduct:
        """Return the same product, of x with its rows moved, with other addends; `RuntimeError` as of `check`."""
        self.check()
        made = DeferredProduct(self.x if x is None else x, self.w, addends, self.sources, self.wants_dx)
        return made.beside(self._family)

    def beside(self, family: list[ref[DeferredProduct]]) -> DeferredProduct:
        """Return this product, entered into a list: `multiply_kept` looks at all in it."""
        family.append(ref(self))
        self._family = family
        return self

    def view_with_rows_swapped(self) -> DeferredProduct:
        """Return the product with its first two dimensions swapped, of the same memory once somebody reads it."""
        made = self.with_addends([addend.transpose(0, 1) for addend in self.addends], self.x.transpose(0, 1))
        made._viewed, self._terms.has_views = self, True
        return made

    def alias(self) -> DeferredProduct:
        """Return another tensor of the same memory: what is added to one in place, or written, is in both."""
        made = self.with_addends(self.addends)
        made._terms, made._viewed = self._terms, self._viewed
        return made

    def add_in_place(self, other: torch.Tensor) -> bool:
        """Add a tensor, also to the aliases; False: somebody has the rows in another order, so they must be there."""
        if self._terms.has_views or self._viewed is not None:
            return False
        self._terms.addends = (*self._terms.addends, other)
        self._terms.versions.append(version_of(other))
        return True

    def multiply_kept(self, *known: torch.Tensor | None) -> bool:
        """Multiply what somebody keeps beside the product, and may read once operands have changed; tell if any is.

        known: tensors that nobody can read.
        """
        own = {id(self), *map(id, known)}
        kept = [tensor for made in self._family if (tensor := made()) is not None and id(tensor) not in own]
        for tensor in kept:
            if tensor.changed_operand() is None:  # else whoever reads it is told
                tensor.finished()
        return bool(kept)

    @property
    def addends(self) -> tuple[torch.Tensor, ...]:
        """What is added to the product, each [..., N]."""
        return self._terms.addends

    @property
    def multiplied(self) -> bool:
        """Whether somebody has read the product."""
        return self._terms.value is not None or (self._viewed is not None and self._viewed.multiplied)

    @property
    def _value(self) -> torch.Tensor:
        """The product, multiplied whole: of each alias a tensor of its own, whose shape may change in place."""
        if self._own is None:
            with without_grad_and_modes(torch.is_inference_mode_enabled()):
                if self._terms.value is None and self._viewed is not None:
                    self._terms.value = self._viewed._value.transpose(0, 1)
                elif self._terms.value is None:
                    self._terms.value = self._multiply()
                self._own = self._terms.value.detach()
        return self._own

    @_value.setter
    def _value(self, value: torch.Tensor) -> None:
        self._own = value

    def _multiply(self) -> torch.Tensor:
        self.check()
        y = compute(MATMUL, "matmul", torch.matmul, self.x, self.w)
        for addend in self.addends:
            y = compute(BESIDE, "add", torch.add, y, addend)
        return y

    def check(self) -> None:
        """Raise `RuntimeError` if an operand has changed since."""
        if (changed := self.changed_operand()) is not None:
            raise RuntimeError(
                f"an operand of shape {list(changed.shape)} of a linear layer was changed in place before the "
                "layer's product was summed over the ranks: change a copy, or set COC_PARALLEL_NUM=1"
            )

    def changed_operand(self) -> torch.Tensor | None:
        """Return the first operand that has changed since; None: none has."""
        versions = zip(self._operands(), self._terms.versions, strict=True)
        return next((tensor for tensor, version in versions if version_of(tensor) != version), None)

    def _operands(self) -> tuple[torch.Tensor, ...]:
        return (self.x, self.w, *self.sources, *self.addends)


class GatheredGradient(UnfinishedTensor):
    """Gathered rows dy [..., N] of a gradient, with ``dx = dy @ w.t()`` [..., K], multiplied under their gather.

    dx is right while dy is as it was gathered. A write, as of a hook, moves no version counter where a DTensor holds
    dy: so whatever may write, to a view too, and whoever asks for the memory, forgets dx.
    """

    _dx: list[torch.Tensor]

    @staticmethod
    def __new__(cls: type[GatheredGradient], dy: torch.Tensor, dx: list[torch.Tensor]) -> GatheredGradient:
        """Hold dy and a list of dx, which its views share; it is empty once dx is forgotten."""
        made = UnfinishedTensor.__new__(cls, dy, Rows(LazyRows((), lambda index: None), 1, 0))
        assert isinstance(made, GatheredGradient)
        made._dx = dx
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Hand dx on with the rows of the same shape in another order; forget it where rows may be written."""
        kwargs = kwargs or {}
        if func in _KEEPS_DX and isinstance(args[0], GatheredGradient):
            return GatheredGradient(func(args[0]._value, *args[1:], **kwargs), args[0]._dx)
        if may_write(func):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, GatheredGradient):
                    leaf._dx.clear()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _given_away(self) -> torch.Tensor:
        self._dx.clear()
        return super()._given_away()

    @property
    def dx(self) -> torch.Tensor | None:
        """The gradient of x, if these are all rows in their order, and nobody may have written to them."""
        rows = self._value
        right = self._dx and rows.is_contiguous() and rows.shape[:-1] == self._dx[0].shape[:-1]
        return self._dx[0] if right else None


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which operators in place raise; 0 of an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _deferred(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the deferred result of a function, or NotImplemented."""
    y: Any = args[0]
    if func in _ADDS and len(args) == 2:
        return _sum(func, *args)
    if not isinstance(y, DeferredProduct) or y.multiplied:
        return NotImplemented
    if func in _NEW:
        return func(y.w, *args[1:], **kwargs)
    if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(y.shape)):
        return y.alias()
    if func is aten.transpose.int and {dim % y.dim() for dim in args[1:]} == {0, 1} and y.dim() > 2:
        return y.view_with_rows_swapped()
    if func is aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format:
        return y.with_addends([addend.contiguous() for addend in y.addends], y.x.contiguous())
    return NotImplemented


def _sum(func: Any, left: Any, right: Any) -> Any:
    """Return the sum of two tensors, one of them deferred, or NotImplemented. Two terms commute."""
    y, other = (left, right) if isinstance(left, DeferredProduct) else (right, left)
    if isinstance(other, DeferredProduct) and func is aten.add.Tensor:
        if y.addends and not other.addends:
            y, other = other, y
        other = other.finished()
    if not isinstance(other, torch.Tensor) or isinstance(other, UnfinishedTensor) or y.multiplied:
        return NotImplemented
    if (other.shape, other.dtype, other.stride()) != (y.shape, y.dtype, y.stride()):
        return NotImplemented
    if func is aten.add.Tensor:
        return y.with_addends((*y.addends, other))
    return y if y is left and y.add_in_place(other) else NotImplemented
