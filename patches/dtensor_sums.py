"""What torch computes of sharded DTensors with COC_DETERMINISTIC=tp: sums over ranks and products are errors.

A sum of a sharded DTensor is `Partial`, and one method of that placement has ranks add it, in the backend's order. A
product of sharded DTensors that is no layer of a style is of other shapes at every degree. The layers, and the norms of
dtensor_norm.py, do neither. Written against torch 2.7 to 2.15, torch/distributed/tensor/placement_types.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.patches.base import Function, Patch, PatchSet

# Reductions that round; the others, such as the largest element, are exact in every order.
SUMS = ("sum", "avg", "product")
_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.mv.default, _aten.addmv.default, _aten.linear.default)
# Modules whose functions only carry out what another function asks for.
_BELOW = ("torch.distributed", "torch._", "torch.autograd", "torch.utils", "torch.nn.functional", "ascend_parallel")


def install_refusals() -> None:
    """Have sums over ranks and products of sharded DTensors raise `DegreeError`."""
    _SUMS.apply(str(torch.__version__).partition("+")[0])
    _handlers().update(dict.fromkeys(PRODUCTS, _product))


def remove_refusals() -> None:
    """Have torch compute them."""
    _SUMS.revert()
    for operator in PRODUCTS:
        _handlers().pop(operator, None)


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _refuse_sum(original: Function) -> Function:
    """Make the method that replaces ``Partial._reduce_value``, or its like with another argument."""

    @functools.wraps(original)
    def reduce(self: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int, *more: Any) -> Any:
        rounds = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if self.reduce_op in SUMS and rounds and mesh.size(mesh_dim) > 1:
            raise DegreeError(
                f"{_caller()}: a DTensor {list(tensor.shape)} is a sum over "
                f"{mesh.size(mesh_dim)} ranks (reduce_op={self.reduce_op!r}), which has no tree: compute it of the "
                "whole tensor, full_tensor()"
            )
        return original(self, tensor, mesh, mesh_dim, *more)

    return reduce


def _product(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = [list(x.shape) for x in args if _is_cut(x)]
    if shapes:
        raise DegreeError(
            f"{_caller()}: {operator.overloadpacket.__name__} of a sharded DTensor {shapes[0]} "
            "is no layer of a style, and has other shapes at every degree: compute it of the whole tensor, "
            "full_tensor()"
        )
    # Backward threads may do the same at the same time.
    own = _handlers().pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if own is not None:
            _handlers()[operator] = own


def _is_cut(x: Any) -> bool:
    """Tell whether ranks share the elements of a DTensor."""
    if not isinstance(x, DTensor):
        return False
    cut = [dim for dim, placement in enumerate(x.placements) if isinstance(placement, Shard)]
    return any(x.device_mesh.size(dim) > 1 for dim in cut)


def _caller() -> str:
    """Return the function that asked for what is computed now, for an error: the innermost that is not torch's core."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_below(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "backward" if frame is None else f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


def _is_below(module: str) -> bool:
    return module.startswith(_BELOW)


def _patches(methods: Sequence[tuple[str, tuple[str, ...]]]) -> list[Patch]:
    return [
        Patch(
            target=f"torch.distributed.tensor.placement_types.Partial.{method}",
            replacement=_refuse_sum,
            parameters=("self", "tensor", "mesh", "mesh_dim", *more),
            reason="with COC_DETERMINISTIC=tp a sum over ranks in the backend's order is an error",
        )
        for method, more in methods
    ]


_SUMS = PatchSet(
    "torch",
    ">=2.7,<2.16",
    _patches([("_reduce_value", ()), ("_reduce_shard_value", ("shard_spec",))]),
    newest="2.13.0",
)
