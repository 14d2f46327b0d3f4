"""The Ascend chips that torch_npu's fused operators run on, and the rank counts of each. Data only.

Sources, none of them tried on a chip by this project:

[names]  the chip names in torch_npu 2.13.0 (libtorch_npu, ``SocVersion`` in NpuVariables.h)
[docs]   op-plugin 7.3.0, docs/context/torch_npu-npu_{mm_all_reduce_base,mm_reduce_scatter_base,all_gather_base_mm}.md
[aclnn]  CANN 8.3: aclnnMatmulAllReduceV2, aclnnMatmulReduceScatter, aclnnAllGatherMatmul; 8.5: aclnnMatmulReduceScatter

The docstrings inside torch_npu 2.13.0 differ: at most 16 ranks on A3. [docs] and [aclnn] say 32, and the
operators' C++ admits 32.
"""

from __future__ import annotations

from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# Full names, no prefixes: plain "Ascend910B" is a chip of the first generation, which has none of the operators.
_NAMES = {
    "A2": (
        "Ascend910B1",
        "Ascend910B2",
        "Ascend910B2C",
        "Ascend910B3",
        "Ascend910B4",
        "Ascend910B4-1",
    ),
    "A3": (
        "Ascend910_9362",
        "Ascend910_9363",
        "Ascend910_9372",
        "Ascend910_9381",
        "Ascend910_9382",
        "Ascend910_9391",
        "Ascend910_9392",
    ),
}
GENERATIONS = {name: generation for generation, names in _NAMES.items() for name in names}

# Rank counts by generation and operator; a generation lacks the operators that are not listed.
# A2: [docs] full mesh of HCCS links. A3: [docs] double ring; [aclnn] marks all-reduce unsupported.
RANKS: dict[str, dict[str, tuple[int, ...]]] = {
    "A2": {
        ALL_REDUCE: (1, 2, 4, 8),
        REDUCE_SCATTER: (2, 4, 8),
        ALL_GATHER: (2, 4, 8),
    },
    "A3": {
        REDUCE_SCATTER: (2, 4, 8, 16, 32),
        ALL_GATHER: (2, 4, 8, 16, 32),
    },
}
