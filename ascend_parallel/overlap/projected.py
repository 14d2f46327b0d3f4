"""Attention's output with its projection, multiplied before the model asks for it: under the exchange of heads.

A model projects attention's output o by a linear layer, ``y = linear(o, weight, bias)``. Who exchanges heads knows the
weight beforehand, multiplies while the last heads come back, and returns o as a `ProjectedTensor`. It is o in every
respect, but for one: where ``linear`` gets all rows of this o and this weight, unchanged, y is there. A layer that asks
for something else, such as an adapter, gets what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from ascend_parallel.ops.deferred import version_of
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.weight_gradient import Begin, WeightGradient


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The linear layer that reads attention's output.

    weight             [F, N D]
    bias               [F] or None
    on_use             called where the model's own layer has asked for the product
    weight_gradient    returns where the gradients of weight and bias go
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    on_use: Callable[[], object] | None = None
    weight_gradient: Callable[[Begin | None], WeightGradient] = WeightGradient

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
        """Return the linear layer of a weight and maybe a bias."""
        return cls(weight=weight, bias=bias)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias as ``linear`` would multiply them here: cast where autocast casts."""
        return cast_by_autocast(self.weight), None if self.bias is None else cast_by_autocast(self.bias)


def project(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``linear(rows, weight, bias)`` [M, F], by the calls that torch makes of it: rows [M, K]."""
    w = weight.t()
    return torch.mm(rows, w) if bias is None else torch.addmm(bias, rows, w)


def projection_gradients(
    to: WeightGradient, d_y: torch.Tensor, o: torch.Tensor | None, of_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias, as autograd gets them: d_y [M, F], o [B, s, N, D], contiguous.

    o: None: nobody wants the weight's.
    """
    d_weight = None if o is None else compute(MATMUL, "weight gradient", to.compute, o.view(len(d_y), -1), d_y)
    return d_weight, to.bias(d_y) if of_bias else None


@dataclass
class _Product:
    """A product that the aliases of a `ProjectedTensor` share.

    y         [B, s, F], or [s, B, F] of an output [s, B, N, D]; None: it was handed out
    state     of the operands, when they were multiplied
    """

    y: torch.Tensor | None
    projection: Projection
    state: tuple[Any, ...]


class ProjectedTensor(torch.Tensor):
    """Attention's output, with what a projection made of all its rows."""

    _product: _Product

    @staticmethod
    def of(o: torch.Tensor, y: torch.Tensor, projection: Projection) -> ProjectedTensor:
        """Return o, contiguous, with the product of its rows: o [B, s, N, D] and y [B, s, F], or [s, B] of both."""
        return _with_product(o, _Product(y, projection, _state_of(o, projection)))

    @property
    def projected(self) -> torch.Tensor | None:
        """The product, [B, s, F] or [s, B, F]; None: it was handed out."""
        return self._product.y

    def product_of(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``linear(self, weight, bias)`` if that is the product, which is handed out once; else None.

        Who watches the gradient of this tensor gets it: no product goes past it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            product, y = self._product, self._product.y
            own = product.projection
            if y is None or weight is not own.weight or bias is not own.bias or product.state != _state_of(self, own):
                return None
            features = own.weight.shape[1]
            all_rows = self.numel() == y.shape[:-1].numel() * features
            if not all_rows or self.shape[-1] != features or not self.is_contiguous():
                return None
            if self._backward_hooks or self.retains_grad:
                return None
            product.y = None
            if own.on_use is not None:
                own.on_use()
            return y if y.shape[:-1] == self.shape[:-1] else y.view(*self.shape[:-1], y.shape[-1])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the product where ``linear`` asks for it; run every other function on o, a plain tensor."""
        x = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in LINEAR and isinstance(x, ProjectedTensor) and not kwargs:
                return x._linear(*args[1:])
            result = func(*args, **(kwargs or {}))
            if func in _VIEWS and isinstance(x, ProjectedTensor) and result.data_ptr() == x.data_ptr():
                return _with_product(result, x._product)
            return result

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.product_of(weight, bias)
        return linear(self, weight, bias) if y is None else y


def _with_product(o: torch.Tensor, product: _Product) -> ProjectedTensor:
    made = o.as_subclass(ProjectedTensor)
    made._product = product
    return made


# As models call them, and as planned models do.
LINEAR = (linear, torch.ops.aten.linear.default)
_VIEWS = (
    torch.Tensor.reshape,
    torch.Tensor.view,
    torch.Tensor.flatten,
    torch.Tensor.contiguous,
    torch.Tensor.permute,
    torch.Tensor.transpose,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
)


def _state_of(o: torch.Tensor, projection: Projection) -> tuple[Any, ...]:
    """Return what must stay as it is until the product is asked for."""
    kind, weights = o.device.type, (projection.weight, projection.bias)
    versions = [version_of(x) for x in (o, *weights) if x is not None]
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return o.data_ptr(), *versions, autocast, torch.is_grad_enabled()
