"""Inputs rounded to int8, for a product of int8 by int8 (W8A8).

The product of an input x [..., K] and an int8 weight w [K, N] is

    y = (x.values @ w.values) * x.scale * w.scale

with a scale for each row of x, and for each column of w or for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_parallel.ops.quantised import QuantisedWeight

INPUT_GRAINS = ("token", "tensor")
LARGEST = 127


@dataclass(frozen=True, eq=False)
class QuantisedRows:
    """An input rounded to int8; equals ``values * scale``.

    values  int8 [..., K]
    scale   fp32 [..., 1], a scale for each row
    dtype   the floating dtype of the products

    Raises `ValueError` otherwise. It stands in for the input in the operators' checks: shape, dtype and device.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Raise `ValueError` unless values, scale and dtype fit together."""
        if self.values.dtype != torch.int8 or not self.values.dim():
            raise ValueError(f"an int8 input has int8 values, not {self.values.dtype} {list(self.values.shape)}")
        allowed = [*self.values.shape[:-1], 1]
        if self.scale.dtype != torch.float32 or list(self.scale.shape) != allowed:
            raise ValueError(
                f"an int8 input {list(self.values.shape)} has a torch.float32 scale of shape {allowed}, "
                f"not {self.scale.dtype} {list(self.scale.shape)}"
            )
        if not self.dtype.is_floating_point:
            raise ValueError(f"the products of an int8 input have a floating dtype, not {self.dtype}")

    @property
    def shape(self) -> torch.Size:
        """Return [..., K]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Return the device of the values."""
        return self.values.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.values.dim()

    def rows(self) -> QuantisedRows:
        """Return the same input as [M, K], its scale as [M, 1]."""
        m = self.values.shape[:-1].numel()
        return QuantisedRows(self.values.reshape(m, self.values.shape[-1]), self.scale.reshape(m, 1), self.dtype)

    def dequantise(self) -> torch.Tensor:
        """Return ``values * scale`` [..., K], rounded once to `dtype`."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return (self.values.to(wide) * self.scale.to(wide)).to(self.dtype)


Input = torch.Tensor | QuantisedRows


def quantise_rows(x: torch.Tensor, grain: str) -> QuantisedRows:
    """Return x [..., K] rounded to int8, with a scale for each "token" (row) or one for the whole "tensor".

    A scale is the largest magnitude divided by 127, so the error of an element is at most half its scale. Values that
    are not finite make their rows' products not finite. Raises `ValueError` for another grain or a dtype that is not
    floating.
    """
    if grain not in INPUT_GRAINS:
        raise ValueError(f"grain={grain!r} is not allowed for an input: give one of {', '.join(INPUT_GRAINS)}")
    if not x.dtype.is_floating_point or not x.dim():
        raise ValueError(f"an input to quantise is floating, [..., K]; it is {x.dtype} {list(x.shape)}")
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.new_zeros(*x.shape[:-1], 1)
    if x.numel():
        largest = wide.abs().amax(-1, keepdim=True)
        largest = largest if grain == "token" else largest.amax().expand(largest.shape)
    scale = (largest / LARGEST).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    values = (wide / scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return QuantisedRows(values, scale, x.dtype)


def check_int8_weight(operator: str, w: object) -> None:
    """Raise `ValueError` unless w is an int8 weight that an int8 input can be multiplied with."""
    if not isinstance(w, QuantisedWeight) or w.grain == "group" or w.offset is not None:
        given = "another one" if not isinstance(w, QuantisedWeight) else f"scales per {w.grain}"
        given += ", and an offset" if isinstance(w, QuantisedWeight) and w.offset is not None else ""
        raise ValueError(
            f"{operator}: an int8 input needs an int8 weight with scales per tensor or channel and no offset, "
            f"not {given}"
        )
