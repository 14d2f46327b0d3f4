"""Operators over lists of tensors, and the parts of a mixed-precision step."""

from typing import Any

import torch

from .table import each, kernel


def number(value: Any, i: int) -> Any:
    """Return the i-th of a list or of a tensor, or the number of all."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value[i].item()
    return value[i] if isinstance(value, list) else value


BINARY = {"Mul": torch.mul, "Div": torch.div, "Maximum": torch.maximum, "Minimum": torch.minimum, "Pow": torch.pow}
for name, function in BINARY.items():
    each(f"{name}List", "LLL", lambda i, x, y, function=function: function(x[i], y[i]))
LIMITS = {"Maximum": torch.clamp_min, "Minimum": torch.clamp_max}
SCALED = {"Add": torch.add, "Sub": torch.sub, **BINARY, **LIMITS}
for name, function in SCALED.items():
    for kind, letter in {"Scalar": "t", "ScalarV2": "s", "ScalarList": "S"}.items():
        each(f"{name}{kind}", f"L{letter}L", lambda i, x, s, function=function: function(x[i], number(s, i)))
for name, function in {"Add": torch.add, "Sub": torch.sub}.items():
    for kind, letter in {"List": "t", "ListV2": "s"}.items():
        each(
            f"{name}{kind}", f"LL{letter}L",
            lambda i, x, y, s, function=function: function(x[i], y[i], alpha=number(s, i)),
        )  # fmt: skip
for name, function in {"Addcmul": torch.addcmul, "Addcdiv": torch.addcdiv}.items():
    for kind, letter in {"Scalar": "t", "ScalarV2": "s", "ScalarList": "t"}.items():  # the list is a tensor here
        each(
            f"{name}{kind}", f"LLL{letter}L",
            lambda i, x, y, z, s, function=function: function(x[i], y[i], z[i], value=number(s, i)),
        )  # fmt: skip
each("PowScalarAndTensor", "sLL", lambda i, s, x: torch.pow(s, x[i]))
UNARY = (
    "sqrt",
    "neg",
    "abs",
    "exp",
    "log",
    "reciprocal",
    "sigmoid",
    "tanh",
    "sign",
    "expm1",
    "log1p",
    "cos",
    "sin",
    "erf",
)
for name in UNARY:
    each(name.capitalize(), "LL", lambda i, x, name=name: getattr(torch, name)(x[i]))
each("Copy", "LL", lambda i, x: x[i])
each("LerpScalar", "LLsL", lambda i, x, y, s: torch.lerp(x[i], y[i], number(s, i)))
each("LerpList", "LLLL", lambda i, x, y, z: torch.lerp(x[i], y[i], z[i]))
each("Norm", "LsL", lambda i, x, p: torch.linalg.vector_norm(x[i], p))
kernel("ForeachZeroInplace", "L", lambda tensors: [tensor.zero_() for tensor in tensors])


def unscale(grads: list[torch.Tensor], found: torch.Tensor, reciprocal: torch.Tensor) -> None:
    """Multiply gradients, and say whether one of them was not finite."""
    for grad in grads:
        if not torch.isfinite(grad).all():
            found.fill_(1)
        grad.mul_(reciprocal)


kernel("ForeachNonFiniteCheckAndUnscale", "Ltt", unscale)


def update_scale(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
    *outs: torch.Tensor,
) -> None:
    """Halve the scale after an overflow, double it after enough steps without one."""
    new_scale, new_tracker = scale.clone(), tracker.clone()
    torch._amp_update_scale_(new_scale, new_tracker, found, growth, backoff, interval)
    outs[0].copy_(new_scale)
    outs[1].copy_(new_tracker)


kernel("AmpUpdateScale", "tttdditt", update_scale)
