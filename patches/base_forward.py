"""The layer's own product inside a forward of another class: LoRA by class swap.

Such a class computes ``super().forward(x) + B(A(x))``. Its ``super().forward`` is torch.nn.Linear's, which calls
torch.nn.functional.linear with the module's weight. `BaseForward` sees this call and defers the product
(ops/deferred.py) that a collective is to sum: of a row layer the output, of a column layer the input's gradient. What
the class adds to them is added before the sum over ranks, as in a plain run. All else runs as it is.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ascend_parallel.ops.deferred import DeferredProduct, GatheredGradient, version_of
from ascend_parallel.ops.operators import rows_of
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.unfinished import finished
from ascend_parallel.overlap.layer import checked, local
from ascend_parallel.overlap.weight_gradient import WeightGradient

_LINEAR = torch._C._nn.linear


def calls_forward_of(kind: Any, base: Any) -> bool:
    """Tell whether each forward of the classes between `kind` and `base` names the next one, or the linear function.

    A pure function of the classes' code, so alike on all ranks; what a call does is seen when it runs.
    """
    return _forwards_call(kind, base)


@functools.cache
def _forwards_call(kind: Any, base: Any) -> bool:
    between = kind.__mro__[: kind.__mro__.index(base)]
    forwards = (vars(each)["forward"] for each in between if "forward" in vars(each))
    return all(_names_forward(inspect.unwrap(forward), base) for forward in forwards)


def _names_forward(forward: Any, base: type) -> bool:
    names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    of_base = "forward" in names and bool(names & {"super", base.__name__})
    return of_base or {"linear", "weight"} <= names


class BaseForward(TorchFunctionMode):
    """Defers the products with the weight of `module` inside this context: see the module.

    called
        Whether the forward has called the linear function with the module's weight.
    """

    def __init__(self, module: Any, kind: str, x: Any = None, product: torch.Tensor | None = None) -> None:
        """Watch the "column" or "row" layer `module`, whose weight is a DTensor cut as `kind` says.

        product: that of x and the weight, if it has been multiplied, on this rank.
        """
        super().__init__()
        self._module, self._column, self.called = module, kind == "column", False
        self._x, self._product = x, product
        self._products: list[ref[DeferredProduct]] = []  # of this call
        self._versions = None if product is None else _versions(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer the product of the module's weight; run every other function."""
        if func is _LINEAR and len(args) > 1 and args[1] is self._module.weight and not kwargs:
            self.called = True
            if self._defers(args[0], *args[2:]):
                return self._linear(*args)
        return func(*args, **kwargs or {})

    def _defers(self, x: Any, bias: Any = None) -> bool:
        """Tell whether a call's product can be deferred: a row layer's bias belongs to one rank's part of the sum."""
        if not isinstance(x, DTensor) or torch.is_autocast_enabled(x.device.type) or torch.is_inference_mode_enabled():
            return False
        expected = Replicate() if self._column else Shard(x.ndim - 1)
        given = tuple(Shard(p.dim % x.ndim) if type(p) is Shard else p for p in x.placements)
        return given == (expected,) and (self._column or bias is None) and x.dtype == self._module.weight.dtype

    def _linear(self, x: DTensor, weight: DTensor, bias: DTensor | None = None) -> DTensor:
        """Return the output, [..., N] cut along N of a column layer, a part of a sum of a row layer."""
        mesh, last = x.device_mesh, Shard(x.ndim - 1)
        # An operator in place, such as a dropout before the layer, has changed the input since it was multiplied.
        multiplied = x is self._x and self._product is not None and _versions(x) == self._versions
        y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x.to_local(grad_placements=[Partial() if self._column else last]),
            weight.to_local(),
            None if bias is None else bias.to_local(),
            self._column,
            self._product if multiplied else None,
            (x, weight),
            self._products,
        )
        self._product = None
        return DTensor.from_local(y, mesh, [last if self._column else Partial()], run_check=False)


def _versions(x: torch.Tensor) -> tuple[int, ...]:
    """Return the versions of a tensor and of its local tensor: an operator in place raises the one that it is given."""
    return (version_of(x), version_of(x._local_tensor)) if isinstance(x, DTensor) else (version_of(x),)


class _Linear(torch.autograd.Function):
    """``x @ w.t() + b``, of which a row layer defers the product, and a column layer that of backward.

    dtensors: those whose local tensors x and the weight are; autograd saves them, as of `ParallelLinear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        column: bool,
        product: torch.Tensor | None,
        dtensors: tuple[DTensor, DTensor],
        products: list[ref[DeferredProduct]],
    ) -> Any:
        input_grad, weight_grad = ctx.needs_input_grad[:2]
        x_dtensor, weight_dtensor = dtensors
        x = finished(x)
        ctx.save_for_backward(
            checked(x, x_dtensor) if weight_grad else None, checked(weight, weight_dtensor) if input_grad else None
        )
        ctx.column = column
        if product is not None:
            return product if bias is None else product.add_(bias)
        if column:
            return compute(MATMUL, "matmul", torch.nn.functional.linear, x, weight, bias)
        return DeferredProduct(x.contiguous(), weight.t(), (), dtensors, wants_dx=input_grad).beside(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        x, weight = map(finished, map(local, saved))
        dx = dy.dx if isinstance(dy, GatheredGradient) else None
        dy = finished(dy).contiguous()
        dw = db = None
        if weight is not None and dx is None:
            # The weight's own step, as of an optimizer in a hook, may come before the product is read: an error then.
            if ctx.column:
                dx = DeferredProduct(dy, weight, sources=saved[1:])
            else:
                dx = compute(MATMUL, "matmul", torch.matmul, dy, weight)
        if x is not None:
            dw = compute(
                MATMUL, "weight gradient", WeightGradient().compute, rows_of(x.contiguous()), rows_of(dy), None
            )
        if ctx.needs_input_grad[2]:
            db = WeightGradient().bias(rows_of(dy))
        return dx, dw, db, None, None, None, None
