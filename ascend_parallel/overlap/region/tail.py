"""The tail of a row-parallel layer: bias, residual addition and norm, filled chunk by chunk.

s = residual + (y + bias)        n = norm(s)

Both results come from one autograd function. With two functions, autograd would add the gradients of s in another
order, and change bits: a composite norm sends several gradients to s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.operators import rows_of, shaped
from ascend_parallel.ops.record import BESIDE, compute
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.region.rows import LazyRows
from ascend_parallel.overlap.selective_checkpoint import hidden_from_selective_checkpoint

Add = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""``add(y, bias, residual)`` returns ``residual + (y + bias)``, row by row."""
Norm = Callable[[torch.Tensor], torch.Tensor]


class Tail:
    """Adds and normalises the rows of a row-parallel layer as they arrive."""

    def __init__(
        self, add: Add, norm: Norm, parameters: Sequence[torch.Tensor], source: LazyRows, sizes: Sizes
    ) -> None:
        """Describe the tail; `source` finishes the rows of y, `parameters` are those of `norm`."""
        self.add, self.norm, self.parameters = add, norm, tuple(parameters)
        self.source, self.sizes = source, sizes
        self.rows: LazyRows | None = None  # the rows of both results

    def apply(
        self, y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s and n, each of the shape of y [..., N] and unfinished until `rows` are asked for.

        bias [N] or None, residual [..., N]. The gradients of norm weight and bias are one sum over all rows.
        """
        # Megatron-core enables gradients here even in inference mode, whose tensors no function can save.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not torch.is_inference_mode_enabled()):
            results: tuple[torch.Tensor, torch.Tensor] = _Tail.apply(  # type: ignore[no-untyped-call]
                y, bias, residual, self, *self.parameters
            )
        return results


class _Tail(torch.autograd.Function):
    @staticmethod
    @hidden_from_selective_checkpoint
    def forward(
        ctx: Any,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        tail: Tail,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y_m = rows_of(y)
        s_m, n_m = torch.empty_like(y_m), torch.empty_like(y_m)
        chunks = [torch.split_with_sizes(x_m, tail.sizes) for x_m in (y_m, rows_of(residual), s_m, n_m)]
        stops = torch.tensor(tail.sizes).cumsum(0).tolist()

        @hidden_from_selective_checkpoint
        def fill(index: int) -> None:
            tail.source.up_to(stops[index])
            y_c, residual_c, s_c, n_c = (parts[index] for parts in chunks)
            with torch.no_grad():
                compute(BESIDE, "add", _copy, s_c, tail.add, y_c, bias, residual_c)
                compute(BESIDE, "norm", _copy, n_c, tail.norm, s_c)

        tail.rows = LazyRows(tail.sizes, fill)
        # Not views of s_m and n_m: filling these must not count as a change of saved tensors.
        s, n = shaped(s_m, y.shape), shaped(n_m, y.shape)
        ctx.save_for_backward(s, *parameters)
        ctx.norm, ctx.bias_shape = tail.norm, None if bias is None else bias.shape
        return s, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: torch.Tensor, dn: torch.Tensor) -> tuple[Any, ...]:
        s, *parameters = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[4:])
        leaf = s.detach().requires_grad_()
        with torch.enable_grad():
            normed = ctx.norm(leaf)
            # Made after the norm, so that its gradient is the first that autograd adds, as in the plain graph.
            again = leaf.view_as(leaf)
        wanted = [leaf, *(parameter for parameter, needs in zip(parameters, needed, strict=True) if needs)]
        d, *found = torch.autograd.grad([normed, again], wanted, [dn, ds])
        gradients = iter(found)
        dbias = d.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[1] else None
        return d, dbias, d, None, *(next(gradients) if needs else None for needs in needed)


def _copy(out_c: torch.Tensor, function: Callable[..., torch.Tensor], *args: Any) -> None:
    """Write ``function(*args)`` to out_c."""
    out_c.copy_(function(*args))
