"""USE_COC_FUSED_KERNEL=1 on NPUs: the matmul and all-reduce of a row layer as one operator of torch_npu.

vllm-ascend had such a layer until July 2026. What it did not ask, each call asks here: the chip, the ranks, the sizes,
the dtype, and whether a device graph is captured (ops/npu_limits.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_REDUCE, matmul_of
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.operators import with_fused_limits
from ascend_parallel.ops.registry import choose
from ascend_parallel.patches.vllm.operators import is_captured
from ascend_parallel.settings import Settings


def fused_weight(
    layer: Any, x: torch.Tensor, group: dist.ProcessGroup, settings: Settings, known: Known
) -> tuple[torch.Tensor | None, str]:
    """Return the weight [N, K / R] with which torch_npu's operator multiplies x [M, K / R]; or None, and the reason.

    The weight is looked up in each call: it may have been replaced. Raises `UnmetRequestError` with strict settings.
    """
    if is_captured():
        return None, ""  # as asked for: no word in the log
    weight = getattr(layer, "weight", None)
    shape = layer.output_size, layer.input_size_per_partition
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != shape or weight.dtype != x.dtype:
        return None, f"its weight is not {list(shape)} in {x.dtype}"
    matmul = matmul_of(ALL_REDUCE, x, weight.t(), group)
    if matmul.device != "npu":
        return None, f"device {matmul.device}, not npu"
    decision = choose(with_fused_limits(matmul, group), settings, known)
    return (weight, "") if decision.kernel == "npu" else (None, decision.reason)
