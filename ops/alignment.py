"""Matmul operands brought to 512-byte rows, which Ascend's matmul units read fastest.

Source of the rule and of its window: MindSpeed, ``matmul_soc_friendly`` with ``k_min`` and ``k_max``.
Only the chunked kernel on an NPU uses it (on a CPU it would cost copies and change the bits).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LINE_BYTES = 512
BLOCK_BYTES = 32


def align_operands(
    x_m: torch.Tensor, w: torch.Tensor, chunk_rows: int, k_min: int, k_max: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x ``[M, K']`` and w ``[K', N]`` with the same product, K' >= K, as the rule has it.

    K a multiple of 512 bytes: both operands contiguous. Else, if a chunk's rows and N are multiples of
    512 bytes, K is not one of 32 bytes and ``k_min <= K <= k_max``: K filled up with zeros to the next
    512 bytes. Else unchanged. `chunk_rows` is the rows of one chunk.
    """
    line = LINE_BYTES // x_m.element_size()
    k, n = w.shape
    if k % line == 0:
        return x_m.contiguous(), w.contiguous()
    worth_it = k_min <= k <= k_max and k % (BLOCK_BYTES // x_m.element_size()) != 0
    if worth_it and chunk_rows % line == 0 and n % line == 0:
        missing = -k % line
        return F.pad(x_m, (0, missing)), F.pad(w, (0, 0, 0, missing))
    return x_m, w
