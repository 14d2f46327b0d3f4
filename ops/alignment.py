"""Align matmul operands to 512-byte rows, which Ascend's matmul units read fastest.

Source of the rule and of its window: MindSpeed, ``matmul_soc_friendly`` with ``k_min`` and ``k_max``.
Only the chunked kernel on an NPU aligns. On a CPU alignment would cost copies and change the bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LINE_BYTES = 512
BLOCK_BYTES = 32


def align_operands(
    x_m: torch.Tensor, w: torch.Tensor, chunk_rows: int, k_min: int, k_max: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x ``[M, K']`` and w ``[K', N]``, K' >= K, with the product of x ``[M, K]`` and w ``[K, N]``.

    1. K is a multiple of 512 bytes: make both operands contiguous.
    2. `chunk_rows` (the rows of one chunk) and N are multiples of 512 bytes, K is no multiple of 32 bytes, and
       ``k_min <= K <= k_max``: pad K with zeros to the next 512 bytes.
    3. Otherwise: return the operands unchanged.
    """
    line = LINE_BYTES // x_m.element_size()
    k, n = w.shape
    if k % line == 0:
        return x_m.contiguous(), w.contiguous()
    padding_pays = k_min <= k <= k_max and k % (BLOCK_BYTES // x_m.element_size()) != 0
    if padding_pays and chunk_rows % line == 0 and n % line == 0:
        padding = -k % line
        return F.pad(x_m, (0, padding)), F.pad(w, (0, 0, 0, padding))
    return x_m, w
