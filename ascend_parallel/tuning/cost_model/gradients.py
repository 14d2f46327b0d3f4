"""Bytes of device memory that gradients and the optimizer move, for each parameter, outside of matmuls.

Sources: Megatron-core 0.12.1, distributed/distributed_data_parallel.py (a micro-batch's gradient is added to the fp32
main_grad), optimizer/clip_grads.py (norm, then scale), optimizer/optimizer.py (masters are copied to the weights).
"""

from __future__ import annotations

from ascend_parallel.tuning.step_time.rank_bytes import ADAM_STATES

WIDE = 4


def accumulated_bytes(itemsize: int) -> int:
    """Return the bytes of adding a micro-batch's gradient to its fp32 sum: read both, write the sum."""
    return itemsize + 2 * WIDE


def clipped_bytes() -> int:
    """Return the bytes of clipping by the norm: read for the norm, then read and write for the scale."""
    return 3 * WIDE


def adam_bytes(itemsize: int) -> int:
    """Return the bytes of Adam: read the gradient, read and write both states and the fp32 weight, write the weight.

    With a 16-bit weight the fp32 weight is a master copy, which is read once more for the cast.
    """
    copied = WIDE + itemsize if itemsize < WIDE else 0
    return WIDE + 2 * WIDE * (ADAM_STATES + 1) + copied
