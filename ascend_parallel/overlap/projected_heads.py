"""Queries, keys and values whose heads are multiplied once the exchange asks for them.

A model projects its hidden states x by ``linear(x, weight, bias)``. Who exchanges heads hands x to the model's
attention as an `AttentionInput`. It is x in every respect, but for one: where ``linear`` gets this x and the weight of
one of the named layers, the result is `UnfinishedHeads` (ops/unfinished_heads.py), of which the exchange makes one
group's while another's are on their way. Autograd sees one whole linear layer, whose backward makes torch's own calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from ascend_parallel.ops.unfinished import may_be_filled_later
from ascend_parallel.ops.unfinished_heads import heads_of_product
from ascend_parallel.overlap.choices import cast_by_autocast


class AttentionInput(torch.Tensor):
    """Hidden states that attention's projections read."""

    _x: torch.Tensor
    _weights: tuple[torch.Tensor, ...]
    _unit: int

    @staticmethod
    def of(x: torch.Tensor, weights: Sequence[torch.Tensor], unit: int) -> torch.Tensor:
        """Return x [..., K], to be projected by these weights [F, K], whose rows are heads of `unit` rows.

        x itself, where its heads cannot be made later.
        """
        if type(x) is not torch.Tensor or x.dim() not in (2, 3) or not x.numel() or not x.is_contiguous():
            return x
        if not may_be_filled_later() or torch.compiler.is_compiling():
            return x
        made = x.as_subclass(AttentionInput)  # with a graph: for who passes by torch's functions
        made._x, made._weights, made._unit = x, tuple(weights), unit
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Project heads later where ``linear`` asks for them; run every other function on x itself."""
        x = args[0] if args else None
        if func is linear and isinstance(x, AttentionInput) and not kwargs and x._projects(*args[1:]):
            return _project(x._x, x._unit, *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(_itself, args), **{name: _itself(value) for name, value in (kwargs or {}).items()})

    def _projects(self, weight: Any, bias: Any = None) -> bool:
        """Tell whether heads of a linear layer can be multiplied later, as torch multiplies them."""
        if not any(weight is each for each in self._weights):
            return False
        operands = [cast_by_autocast(x) for x in (self._x, weight, bias) if x is not None]
        return len({(x.dtype, x.device) for x in operands}) == 1 and operands[0].is_floating_point()


def _itself(arg: Any) -> Any:
    """Return an argument with the tensors that hidden states stand for."""
    if isinstance(arg, (list, tuple)) and any(isinstance(each, AttentionInput) for each in arg):
        return type(arg)(map(_itself, arg))
    return arg._x if isinstance(arg, AttentionInput) else arg


def _project(x: torch.Tensor, unit: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    operands = cast_by_autocast(x), cast_by_autocast(weight), None if bias is None else cast_by_autocast(bias)
    with torch.autocast(x.device.type, enabled=False):
        y: torch.Tensor = _HeadProjection.apply(*operands, unit)  # type: ignore[no-untyped-call]
    return y


class _HeadProjection(torch.autograd.Function):
    """``linear(x, weight, bias)``, whose heads come later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, unit: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y_m = heads_of_product(x.view(-1, x.shape[-1]), weight.t(), bias, unit, "projection")
        return y_m.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        d_y_m = d_y.reshape(-1, d_y.shape[-1])
        d_x = d_y_m.mm(weight).view(x.shape) if of_x else None
        d_weight = d_y_m.t().mm(x.view(-1, x.shape[-1])) if of_weight else None
        return d_x, d_weight, d_y_m.sum(0) if of_bias else None, None
