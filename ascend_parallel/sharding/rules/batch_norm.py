"""Batch norm: of whole batches, whose statistics are summed over the ranks, or of each rank's part.

With x [N, C, ...] sharded along the batch or a spatial dimension, each rank has a part of every channel. `batch_norm`
of a training then normalises with the statistics of the whole batch, like one card (synchronised batch norm, as
torch.nn.SyncBatchNorm and Paddle's sync_batch_norm). Per layer a rank sums 2 C numbers in forward and 2 C in backward:

    forward     mean = sum(x) / n, then var = sum((x - mean) ** 2) / n: two sums of C numbers. One sum of x and x ** 2
                would lose the digits that they share, where the mean is large beside the deviation.
    backward    sum(dy) and sum(dy * xhat) of each channel, in one sum; dx = w * rstd * (dy - mean(dy) - xhat *
                mean(dy * xhat)) (Ioffe and Szegedy 2015, arXiv:1502.03167, section 3)

`local_batch_norm` normalises each rank's part with that part's statistics, as DDP without SyncBatchNorm; running
statistics are averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, Layout, Placement, largest_local_shape
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, place, sum_dtype
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Reduction, register_all, register_rule
from ascend_parallel.sharding.tracing.functionalize import FUNCTIONAL_BATCH_NORM

STATISTICS = ("running_mean", "running_var")
CHANNELS = 1  # the dimension of the channels


def _without_statistics(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return torch.batch_norm(input, weight, bias, None, None, True, 0.0, eps, False)


_library: Any = torch.library.Library("ascend_parallel", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "local_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define("local_batch_norm.stateless(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor")
_library.impl("local_batch_norm", FUNCTIONAL_BATCH_NORM, "CompositeImplicitAutograd")
_library.impl("local_batch_norm.stateless", _without_statistics, "CompositeImplicitAutograd")
LOCAL = torch.ops.ascend_parallel.local_batch_norm.default
LOCAL_WITHOUT_STATISTICS = torch.ops.ascend_parallel.local_batch_norm.stateless


def over_channels(call: OpCall) -> list[OpPlacements]:
    """Shard the channels; with given statistics, any dimension."""
    named = arguments(call)
    fixed = "no_training" in call.name or (not named["training"] and place(named.get("running_mean")) is not None)
    no_statistics = all(meta.shape == (0,) for meta in call.outputs[1:])
    others = _others(call) if fixed and no_statistics else ()
    axes = [_channels(call), *(_axis(call, dim, REPLICATE) for dim in others)]
    return cut(call, axes, _without_gradient(call))


def of_whole_batch(call: OpCall) -> list[OpPlacements]:
    """Shard the channels; in training also any other dimension, with the statistics of all ranks."""
    if not arguments(call)["training"]:
        return over_channels(call)
    axes = [_channels(call), *(_axis(call, dim, REPLICATE) for dim in _others(call))]
    return cut(call, axes, _without_gradient(call))


def of_local_batch(call: OpCall) -> list[OpPlacements]:
    """Shard the channels, or the batch; the statistics are then averages."""
    return cut(call, [_channels(call), _axis(call, 0, AVERAGE)], _without_gradient(call))


def reductions(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the sums of the statistics: in forward two of a number per channel, in backward one of two."""
    if not arguments(call)["training"]:
        return []
    x = call.inputs[0]
    channels = largest_local_shape(x.shape, layouts[0], mesh_shape)[CHANNELS]
    nbytes = channels * sum_dtype(x.dtype).itemsize
    found = []
    for dim in _summed(layouts[0], mesh_shape):
        found += [Reduction(dim, nbytes, "sum")] * 2 + [Reduction(dim, 2 * nbytes, "sum", backward=True)]
    return found


def run(part: Part) -> Any:
    """Normalise this rank's part with the statistics of the whole batch."""
    named, dims = arguments(part.call), _summed(part.input_layouts[0], part.mesh_shape)
    if not named["training"] or not dims:
        return part.run()
    given = {name: place(named.get(name)) for name in ("weight", "bias", *STATISTICS)}
    tensors = {name: None if index is None else part.inputs[index] for name, index in given.items()}
    shape = part.call.inputs[0].shape
    count = prod(shape) // shape[CHANNELS]
    over = _Over(part, tuple(dims), count, float(named["eps"]))
    y, mean, var = _SyncBatchNorm.apply(part.inputs[0], tensors["weight"], tensors["bias"], over)  # type: ignore[no-untyped-call]
    if len(part.call.outputs) == 1:
        return y
    rstd = torch.rsqrt(var + over.eps)
    running_mean, running_var = tensors["running_mean"], tensors["running_var"]
    assert running_mean is not None and running_var is not None
    momentum = float(named["momentum"])
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, (var * (count / (count - 1))).to(running_var.dtype), momentum)
    return y, mean, rstd, new_mean, new_var


@dataclass(frozen=True)
class _Over:
    """A part of a batch norm, the mesh dimensions over which its channels are summed, and n of the module."""

    part: Part
    dims: tuple[int, ...]
    count: int
    eps: float

    def total(self, tensor: torch.Tensor, direction: str) -> torch.Tensor:
        """Return the sum over all ranks that have a part of the same channels."""
        for dim in self.dims:
            tensor = self.part.reduced(tensor, dim, "sum", direction)
        return tensor


class _SyncBatchNorm(torch.autograd.Function):
    """y, mean [C] and variance [C] of the whole batch, from this rank's part; weight and bias [C] or None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, over: _Over
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        along = [dim for dim in range(x.dim()) if dim != CHANNELS]
        wide = x.to(sum_dtype(x.dtype))
        mean = over.total(wide.sum(along), "forward") / over.count
        centred = wide - _spread(mean, x)
        var = over.total(centred.square().sum(along), "forward") / over.count
        rstd = torch.rsqrt(var + over.eps)
        y = centred.mul_(_spread(rstd if weight is None else rstd * weight, x))
        if bias is not None:
            y += _spread(bias, x)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.over, ctx.bias_dtype = over, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, _mean: Any, _var: Any) -> tuple[Any, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        along = [dim for dim in range(x.dim()) if dim != CHANNELS]
        dy_wide = dy.to(rstd.dtype)
        xhat = (x.to(rstd.dtype) - _spread(mean, x)).mul_(_spread(rstd, x))
        sums = torch.stack([dy_wide.sum(along), (dy_wide * xhat).sum(along)])
        db = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        dw = None if weight is None else sums[1].to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None
        means = ctx.over.total(sums.clone(), "backward") / ctx.over.count
        dx = dy_wide - _spread(means[0], x) - xhat.mul_(_spread(means[1], x))
        dx = dx.mul_(_spread(rstd if weight is None else rstd * weight, x))
        return dx.to(x.dtype), dw, db, None


def _spread(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return numbers per channel in a shape that is broadcast to x."""
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _summed(layout: Layout, mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh dimensions of size > 1 that shard x elsewhere than along the channels."""
    pairs = enumerate(zip(layout, mesh_shape, strict=True))
    return [at for at, (each, size) in pairs if each.kind == "shard" and each.dim != CHANNELS and size > 1]


def _channels(call: OpCall) -> Axis:
    return Axis((CHANNELS, *(0 for _ in call.inputs[1:])), _outputs(call, CHANNELS, 0), REPLICATE)


def _axis(call: OpCall, dim: int, of_statistics: Placement) -> Axis:
    return Axis((dim, *(None for _ in call.inputs[1:])), _outputs(call, dim, None), of_statistics)


def _others(call: OpCall) -> list[int]:
    return [dim for dim in range(len(call.inputs[0].shape)) if dim != CHANNELS]


def _without_gradient(call: OpCall) -> list[int]:
    return [index for name in STATISTICS if (index := place(arguments(call).get(name))) is not None]


def _outputs(call: OpCall, dim: int, of_statistics: int | None) -> tuple[int | None, ...]:
    """Return an axis's dimension of each output: the normalised tensor, then the statistics, which may be empty."""
    return (dim, *(None if meta.shape == (0,) else of_statistics for meta in call.outputs[1:]))


def register() -> None:
    """Register this file's rules."""
    register_all("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", over_channels)
    for target in ("aten.batch_norm", "aten._native_batch_norm_legit_functional"):
        register_rule(target, of_whole_batch, run, reductions)
    register_rule("ascend_parallel.local_batch_norm", of_local_batch)
