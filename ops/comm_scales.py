"""Scales of an all-reduce in int8 (low-bit communication), and its three roundings.

The sum of the ranks' products y_r [M, N], with a scale for each column:

    q_r = int8(y_r / partial)                   on rank r; then an all-to-all of rows
    z   = int8(sum_r q_r * partial / total)     the sum is exact; then an all-gather
    y   = z * total

int8 rounds to the nearest whole number, halves to the even one, and clips to [-128, 127]. Where nothing is clipped, an
element of y is within ``R partial / 2 + total / 2`` of the sum, apart from the rounding of y's dtype.

Source of the formula: xwqtju/ops-transformer, mc2/matmul_all_reduce/docs/aclnnQuantMatmulAllReduceV3.md
(commQuantScale1, commQuantScale2). The page names neither rounding nor clipping; both are assumed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class CommScales:
    """The scales of an all-reduce in int8, of the dtype of its result, the same values on every rank.

    partial  [N], positive: the scale of each rank's product
    total    [N], positive: the scale of the sum over ranks

    No operator computes a gradient for them. Raises `ValueError` otherwise; equality between ranks is not checked.
    """

    partial: torch.Tensor
    total: torch.Tensor

    def __post_init__(self) -> None:
        """Raise `ValueError` unless both scales are floating, [N], alike, finite and positive."""
        for name, scale in (("partial", self.partial), ("total", self.total)):
            if scale.dim() != 1 or not scale.is_floating_point():
                raise ValueError(f"the scale {name} is floating, [N], not {scale.dtype} {list(scale.shape)}")
            if not ((scale > 0) & torch.isfinite(scale)).all():
                raise ValueError(f"the scale {name} is finite and positive; this scale holds other values")
        if _kind(self.partial) != _kind(self.total):
            raise ValueError(
                f"the scales partial and total are alike, not {self.partial.dtype} {list(self.partial.shape)} on "
                f"{self.partial.device} and {self.total.dtype} {list(self.total.shape)} on {self.total.device}"
            )

    def check(self, operator: str, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raise `ValueError` unless the scales fit a result [M, columns] of `dtype` on `device`."""
        if _kind(self.partial) != (torch.Size([columns]), dtype, device):
            raise ValueError(
                f"{operator}: comm_scales are {[columns]}, {dtype} on {device} as the result, not "
                f"{list(self.partial.shape)}, {self.partial.dtype} on {self.partial.device}"
            )

    def round_partial(self, y_m: torch.Tensor) -> torch.Tensor:
        """Return a rank's product y_m [M, N] in int8."""
        return _to_int8(_wide(y_m) / _wide(self.partial))

    def round_total(self, q_r_m: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of q_r_m, int8 [R, m, N], in int8 [m, N]."""
        total = q_r_m.sum(0, dtype=torch.int32)
        return _to_int8(total * (_wide(self.partial) / _wide(self.total)))

    def dequantise(self, z_m: torch.Tensor) -> torch.Tensor:
        """Return ``z_m * total`` [M, N] for z_m in int8, rounded once to the dtype of the scales."""
        return (z_m * _wide(self.total)).to(self.total.dtype)


def _kind(scale: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return scale.shape, scale.dtype, scale.device


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return the values in fp32, or in fp64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    return values.round().clamp_(-128, 127).to(torch.int8)
