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
from typing import Any

import torch
import torch.utils._pytree as pytree

from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.probing import without_grad_and_modes
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.unfinished import UnfinishedTensor, may_write

aten = torch.ops.aten

_ADDS = (aten.add.Tensor, aten.add_.Tensor)
_NEW = (aten.new_empty.default, aten.new_zeros.default)
# They give a tensor of the same memory, or of the same shape.
_SAME = (aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default)
# Views of all elements.
_KEEPS_DX = (*_SAME, aten.t.default, aten.transpose.int)


class DeferredProduct(UnfinishedTensor):
    """The product x @ w [..., N] and the sum with `addends`, in their order.

    x               [..., K]
    w               [K, N]
    addends         each [..., N], as the product
    sources         the DTensor whose local tensor x is: an operator in place raises its version alone
    wants_dx        whether backward takes the gradient of x from a `GatheredGradient`
    """

    x: torch.Tensor
    w: torch.Tensor
    addends: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    wants_dx: bool
    _versions: list[int]
    _product: torch.Tensor | None

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
        made.x, made.w, made.addends, made.sources = x, w, tuple(addends), tuple(sources)
        made.wants_dx = wants_dx
        made._rows = Rows(LazyRows((), lambda index: None), 1, 0)
        made._versions = list(map(_version, made._operands()))
        made._product = None
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
        return DeferredProduct(self.x if x is None else x, self.w, addends, self.sources, self.wants_dx)

    @property
    def multiplied(self) -> bool:
        """Whether somebody has read the product."""
        return self._product is not None

    @property
    def _value(self) -> torch.Tensor:
        """The product, multiplied whole."""
        if self._product is None:
            with without_grad_and_modes(torch.is_inference_mode_enabled()):
                self.check()
                y = compute(MATMUL, "matmul", torch.matmul, self.x, self.w)
                for addend in self.addends:
                    y = compute(BESIDE, "add", torch.add, y, addend)
                self._product = y
        return self._product

    @_value.setter
    def _value(self, value: torch.Tensor) -> None:
        self._product = value

    def check(self) -> None:
        """Raise `RuntimeError` if an operand has changed since."""
        for tensor, version in zip(self._operands(), self._versions, strict=True):
            if _version(tensor) != version:
                raise RuntimeError(
                    f"an operand of shape {list(tensor.shape)} of a linear layer was changed in place before the "
                    "layer's product was summed over the ranks: change a copy, or set COC_PARALLEL_NUM=1"
                )

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


def _version(tensor: torch.Tensor) -> int:
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
        return y.with_addends(y.addends)
    if func is aten.transpose.int and {dim % y.dim() for dim in args[1:]} == {0, 1} and y.dim() > 2:
        return _moved(y, lambda rows: rows.transpose(0, 1))
    if func is aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format:
        return _moved(y, lambda rows: rows.contiguous())
    return NotImplemented


def _moved(y: DeferredProduct, move: Any) -> DeferredProduct:
    return y.with_addends([move(addend) for addend in y.addends], move(y.x))


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
    if y is not left:
        return NotImplemented
    y.addends = (*y.addends, other)
    y._versions.append(_version(other))
    return y
