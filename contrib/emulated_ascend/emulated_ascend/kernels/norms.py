"""Layer norm, RMS norm, rotary positions."""

from typing import Any

import torch

from .table import kernel, result, results

aten = torch.ops.aten


def as_type(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return x in another tensor's type; None if there is none, or it has no elements."""
    return None if x is None or not x.numel() else x.to(like.dtype)


def layer_norm(x: torch.Tensor, shape: tuple[int, ...], weight: Any, bias: Any, epsilon: float) -> Any:
    """Return the normalised values, the means and the reciprocal deviations."""
    return torch.native_layer_norm(x, shape, as_type(weight, x), as_type(bias, x), epsilon)


def layer_norm_grad(
    grad: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], mean: torch.Tensor, deviation: torch.Tensor,
    weight: Any, bias: Any, mask: tuple[int, ...],
) -> Any:  # fmt: skip
    """Return the gradients of input, weight and bias, computed in fp32."""
    wide = grad if grad.dtype == torch.float64 else grad.float()
    return aten.native_layer_norm_backward(
        wide.contiguous(), x.to(wide.dtype).contiguous(), shape, mean.to(wide.dtype), deviation.to(wide.dtype),
        as_type(weight, wide), as_type(bias, wide), [bool(item) for item in mask],
    )  # fmt: skip


results("LayerNorm", "tIoodttt", 3, layer_norm)
results("FastLayerNorm", "tIoodttt", 3, layer_norm)
results("LayerNormBackward", "ttIttooBooo", 3, layer_norm_grad)


def group_norm(x: torch.Tensor, weight: Any, bias: Any, *sizes: Any) -> Any:
    """Return the normalised values, the means and the reciprocal deviations of each group of channels."""
    return torch.native_group_norm(x, as_type(weight, x), as_type(bias, x), *sizes)


def group_norm_grad(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, weight: Any, *given: Any
) -> Any:
    """Return the gradients of input, weight and bias."""
    *sizes, mask = given
    return aten.native_group_norm_backward(
        grad.contiguous(), x.contiguous(), mean, deviation, as_type(weight, x), *sizes, [bool(item) for item in mask]
    )


results("GroupNorm", "tooiiiidttt", 3, group_norm)
results("GroupNormBackward", "ttttoiiiiBooo", 3, group_norm_grad)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
    """Return the normalised values and the reciprocal roots of the mean squares."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, True) + epsilon)
    return wide * reciprocal * weight.float(), reciprocal


def rms_norm_grad(grad: torch.Tensor, x: torch.Tensor, reciprocal: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return the gradients of input and weight."""
    wide = x.float()
    normed = wide * reciprocal.reshape((*wide.shape[:-1], 1))
    weighted = grad.float() * weight.float()
    dx = reciprocal.reshape((*wide.shape[:-1], 1)) * (weighted - normed * (weighted * normed).mean(-1, True))
    return dx, (grad.float() * normed).reshape(-1, wide.shape[-1]).sum(0)


results("RmsNorm", "ttdtt", 2, rms_norm)
results("RmsNormGrad", "tttttt", 2, rms_norm_grad)


def add_rms_norm(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
    """Return the norm of a sum, the reciprocal roots, the sum."""
    total = a.float() + b.float()
    return (*rms_norm(total, weight, epsilon), total)


results("AddRmsNorm", "tttdttt", 3, add_rms_norm)


def turned(x: torch.Tensor, mode: int) -> torch.Tensor:
    """Turn pairs by a quarter: halves of the vector (mode 0) or neighbours (mode 1)."""
    if mode == 0:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """Rotate pairs by their position's angle."""
    wide = x.float()
    return wide * cos.float() + turned(wide, mode) * sin.float()


def summed_to(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum over the dimensions along which `shape` was broadcast."""
    return x.sum_to_size(shape)


def rotary_grad(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, x: Any, mode: int) -> Any:
    """Return the gradients of input, cosines and sines; the latter two only with the input."""
    wide = grad.float()
    dx = wide * cos.float() - turned(wide * sin.float(), mode)
    if x is None or not x.numel():
        return dx, None, None
    return dx, summed_to(wide * x.float(), cos.shape), summed_to(wide * turned(x.float(), mode), sin.shape)


result("RotaryPositionEmbedding", "tttit", rotary)
results("RotaryPositionEmbeddingGrad", "tttoiooo", 3, rotary_grad)
kernel(
    "RotaryPositionEmbeddingV2", "tttiot", lambda x, cos, sin, mode, matrix, out: out.copy_(rotary(x, cos, sin, mode))
)
