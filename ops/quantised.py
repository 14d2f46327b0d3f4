"""Weights held in int8: quantise, hold, dequantise.

A weight [K, N] equals ``(values + offset) * scale``, as torch_npu documents antiquant_scale and
antiquant_offset of npu_mm_all_reduce_base. Scales and offsets come in three grains:

    tensor   [1]               one scale for the whole weight
    channel  [N] or [1, N]     one scale for each column
    group    [ceil(K / g), N]  one scale for each column and g elements of K; the last group may be shorter
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch

GRAINS = ("tensor", "channel", "group")
GROUP_MULTIPLE = 32

# Steps between the smallest and the largest value of a grain. Two less than int8 has, so that neither a scale rounded
# down to 8 bits (bf16) nor an offset rounded to a whole number clips a value.
STEPS = 254

Index = EllipsisType | slice | tuple[slice, None]


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """An int8 weight with its scales.

    values      int8 [K, N]
    scale       floating, in the shape of its grain
    offset      shape and dtype of scale, or None for 0
    group_size  elements of K that share a scale, a multiple of 32; 0 for the other grains

    Raises `ValueError` otherwise.
    """

    values: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    group_size: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` unless values, scale, offset and group_size fit together."""
        if self.values.dtype != torch.int8 or self.values.dim() != 2:
            raise ValueError(
                f"an int8 weight has int8 values [K, N], not {self.values.dtype} {list(self.values.shape)}"
            )
        check_group_size(self.group_size)
        k, n = self.values.shape
        allowed = [[-(-k // self.group_size), n]] if self.group_size else [[1], [n], [1, n]]
        if not self.scale.is_floating_point() or list(self.scale.shape) not in allowed:
            shapes = ", ".join(map(str, allowed))
            raise ValueError(
                f"an int8 weight {[k, n]} with group_size={self.group_size} has a floating scale of shape {shapes}, "
                f"not {self.scale.dtype} {list(self.scale.shape)}"
            )
        if self.offset is not None and (self.offset.shape, self.offset.dtype) != (self.scale.shape, self.scale.dtype):
            raise ValueError(
                f"an int8 weight's offset is like its scale, {self.scale.dtype} {list(self.scale.shape)}, "
                f"not {self.offset.dtype} {list(self.offset.shape)}"
            )

    def refuse_gradients(self) -> None:
        """Raise `ValueError` if scale or offset requires a gradient: no operator computes it."""
        for name, tensor in (("scale", self.scale), ("offset", self.offset)):
            if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"the {name} of an int8 weight requires a gradient, but it is frozen: detach() it")

    @property
    def grain(self) -> str:
        """Return "tensor", "channel" or "group"."""
        if self.group_size:
            return "group"
        return "tensor" if self.scale.dim() == 1 and self.scale.shape[0] == 1 else "channel"

    @property
    def shape(self) -> torch.Size:
        """Return [K, N]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Return the device of the values."""
        return self.values.device

    def dequantise(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return ``(values + offset) * scale`` of columns `start` to `stop` as [K, stop - start] of `dtype`.

        Computes in fp32 (fp64 for an fp64 `dtype`) and rounds once: a 16-bit `dtype` also needs the columns
        in fp32 meanwhile. The result has the memory layout of the values.
        """
        wide = torch.promote_types(dtype, torch.float32)
        w = self.values[:, start:stop].to(wide)
        scale = self._columns(self.scale, start, stop).to(wide)
        offset = None if self.offset is None else self._columns(self.offset, start, stop).to(wide)
        for view, index in _group_views(w, self.group_size):
            if offset is not None:
                view.add_(offset[index])
            view.mul_(scale[index])
        return w.to(dtype)

    def _columns(self, scale: torch.Tensor, start: int, stop: int | None) -> torch.Tensor:
        return scale if self.grain == "tensor" else scale[..., start:stop]


Weight = torch.Tensor | QuantisedWeight


def dequantised_weight(w: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a plain weight [K, N] unchanged, or an int8 weight dequantised to `dtype`."""
    return w.dequantise(dtype) if isinstance(w, QuantisedWeight) else w


def quantise_weight(
    w: torch.Tensor, grain: str, *, group_size: int = 0, symmetric: bool = True, dtype: torch.dtype | None = None
) -> QuantisedWeight:
    """Return a weight [K, N] rounded to int8, with a scale for each "tensor", "channel" (column) or "group".

    group_size   elements of K that share a scale, a multiple of 32; only for the grain "group"
    symmetric    True: no offset, values from -127 to 127; False: a whole offset, values from -128 to 127
    dtype        dtype of the scales, None: that of w; values are chosen for the scale after its rounding

    The error of an element is at most half its scale. Layout and device are those of `w`. Raises `ValueError` for an
    option that is not allowed, and for a weight that is empty or not finite.
    """
    _check_request(w, grain, group_size)
    dtype = w.dtype if dtype is None else dtype
    wide = torch.promote_types(torch.promote_types(w.dtype, dtype), torch.float32)
    steps = w.detach().to(wide, copy=True)
    low, high = _range(steps, grain, group_size)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    low.clamp_(max=0)  # the range includes 0, so offsets are small enough to be exact in 8 bits
    high.clamp_(min=0)
    scale = (high / STEPS - low / STEPS).clamp_(min=torch.finfo(dtype).tiny).to(dtype)
    if not torch.isfinite(scale).all():
        raise ValueError(
            f"a weight as large as {w.abs().max().item():.3g} has no scale of dtype={dtype}: give a wider one"
        )
    offset = None if symmetric else torch.round(low / scale.to(wide)).add_(128)
    for view, index in _group_views(steps, group_size):
        view.div_(scale.to(wide)[index]).round_()
        if offset is not None:
            view.sub_(offset[index])
    values = steps.clamp_(-127 if symmetric else -128, 127).to(torch.int8)
    return QuantisedWeight(values, scale, None if offset is None else offset.to(dtype), group_size)


def check_group_size(group_size: int) -> None:
    """Raise `ValueError` unless a group size is 0 (no groups) or a positive multiple of 32."""
    if group_size < 0 or group_size % GROUP_MULTIPLE:
        raise ValueError(
            f"group_size={group_size} is not allowed: give a multiple of {GROUP_MULTIPLE}, or 0 for no groups"
        )


def _check_request(w: torch.Tensor, grain: str, group_size: int) -> None:
    if grain not in GRAINS:
        raise ValueError(f"grain={grain!r} is not allowed: give one of {', '.join(GRAINS)}")
    check_group_size(group_size)
    if (grain == "group") != bool(group_size):
        allowed = f"a multiple of {GROUP_MULTIPLE}" if grain == "group" else "0"
        raise ValueError(f"group_size={group_size} is not allowed with grain={grain!r}: give {allowed}")
    if w.dim() != 2 or not w.is_floating_point() or not w.numel():
        raise ValueError(f"a weight to quantise is floating, [K, N], and not empty; it is {w.dtype} {list(w.shape)}")
    if not torch.isfinite(w).all():
        raise ValueError("a weight to quantise is finite; this weight holds inf or nan")


def _range(w: torch.Tensor, grain: str, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each grain of w [K, N], in the shape of the scales."""
    if grain == "tensor":
        low, high = torch.aminmax(w)
        return low.reshape(1), high.reshape(1)
    if grain == "channel":
        return w.amin(0), w.amax(0)
    groups = [view if view.dim() == 3 else view[None] for view, _ in _group_views(w, group_size) if view.numel()]
    return torch.cat([group.amin(1) for group in groups]), torch.cat([group.amax(1) for group in groups])


def _group_views(w: torch.Tensor, group_size: int) -> list[tuple[torch.Tensor, Index]]:
    """Return views of w [K, N] that broadcast with the scales, and the index of each view's scales.

    Whole groups are a view [groups, g, N]; the shorter last group, possibly of no rows, is a view [rest, N].
    """
    if not group_size:
        return [(w, ...)]
    groups = w.shape[0] // group_size
    rows = groups * group_size
    return [
        (w[:rows].view(groups, group_size, w.shape[1]), (slice(groups), None)),
        (w[rows:], slice(groups, None)),
    ]
