"""The Ascend chips that torch_npu's fused operators run on, and the rank counts of each. Data only.

Sources, none of them tried on a chip by this project:

[names]  the chip names in torch_npu 2.13.0 and 2.14.0 (libtorch_npu; ``SocVersion`` in NpuVariables.h)
[docs]   op-plugin 7.3.0, docs/context/torch_npu-npu_{mm_all_reduce_base,mm_reduce_scatter_base,all_gather_base_mm}.md
[master] op-plugin's repository, docs/zh/custom_APIs/torch_npu: the same pages, read at commit 09fca6f6; the page of
         npu_mm_reduce_scatter_base lists Ascend 950
[aclnn]  CANN 8.3: aclnnMatmulAllReduceV2, aclnnMatmulReduceScatter, aclnnAllGatherMatmul; 8.5: aclnnMatmulReduceScatter
[wheel]  the docstrings inside torch_npu 2.13.0 and 2.14.0 (_op_plugin_docs.py)
[cann]   ops-transformer (hicann on GitHub), the pages of aclnnMatmulAllReduceV3, aclnnMatmulReduceScatterV2 and
         aclnnAllGatherMatmulV2 at commits b01d25b2 and 37b9e45d, of 2026; op-plugin's C++ calls them for these chips,
         and admits 2 to 32 ranks for the last two
[vllm]   vllm-ascend, pull requests 6167 and 6168: npu_mm_reduce_scatter_base (called with "aiv") raises on 16 ranks,
         and the operator's developers confirm that it does not work there

The sources disagree about more than 8 ranks on A3: [docs], [master] and [aclnn] allow 32, [wheel] allows 16 under
"ai_cpu" and 8 elsewhere, [vllm] saw 16 fail. So 8 ranks are the default, 16 are taken on request (`fused_ranks`) but
not under "aiv", and more are never taken there. On 950 [cann] allows 64, on request too.
"""

from __future__ import annotations

from ascend_parallel.ops.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL_MATMUL,
    MATMUL_ALL_TO_ALL,
    REDUCE_SCATTER,
)

# Full names, no prefixes: plain "Ascend910B" is a chip of the first generation, which has none of the operators.
_NAMES = {
    "A2": "Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1",
    "A3": "Ascend910_9362 Ascend910_9363 Ascend910_9372 Ascend910_9381 Ascend910_9382 Ascend910_9391 Ascend910_9392",
    "950": (
        "Ascend950DT_950x Ascend950DT_950y Ascend950DT_9571 Ascend950DT_9572 Ascend950DT_9573 Ascend950DT_9574 "
        "Ascend950DT_9575 Ascend950DT_9576 Ascend950DT_9577 Ascend950DT_9578 Ascend950DT_9581 Ascend950DT_9582 "
        "Ascend950DT_9582x Ascend950DT_9583 Ascend950DT_9584 Ascend950DT_9585 Ascend950DT_9586 Ascend950DT_9587 "
        "Ascend950DT_9588 Ascend950DT_9591 Ascend950DT_9592 Ascend950DT_9595 Ascend950DT_9596 Ascend950DT_95A1 "
        "Ascend950DT_95A2 Ascend950PR_950z Ascend950PR_9579 Ascend950PR_957b Ascend950PR_957bx Ascend950PR_957c "
        "Ascend950PR_957d Ascend950PR_9589 Ascend950PR_958b Ascend950PR_9599"
    ),
}
GENERATIONS = {name: generation for generation, names in _NAMES.items() for name in names.split()}

# Rank counts by generation and operator; a generation lacks the operators that are not listed.
# A2: [docs] full mesh of HCCS links. A3: [docs] double ring; [aclnn] marks all-reduce unsupported. 950: [cann].
RANKS: dict[str, dict[str, tuple[int, ...]]] = {
    "A2": {
        ALL_REDUCE: (1, 2, 4, 8),
        REDUCE_SCATTER: (2, 4, 8),
        ALL_GATHER: (2, 4, 8),
    },
    "A3": {
        REDUCE_SCATTER: (2, 4, 8, 16),
        ALL_GATHER: (2, 4, 8, 16),
    },
    "950": {
        ALL_REDUCE: (1, 2, 4, 8, 16, 32, 64),
        REDUCE_SCATTER: (2, 4, 8, 16, 32),
        ALL_GATHER: (2, 4, 8, 16, 32),
    },
}

# Engines of the communication by generation and operator. A2 and A3: [docs]; the all-reduce's is [cann]. 950: [cann];
# vllm-ascend's pull request 12689 reports that newer CANN refuses "aiv" there.
_SCATTERS_AND_GATHERS: dict[str, tuple[str, ...]] = {REDUCE_SCATTER: ("ai_cpu", "aiv"), ALL_GATHER: ("ai_cpu", "aiv")}
COMM_MODES: dict[str, dict[str, tuple[str, ...]]] = {
    "A2": {ALL_REDUCE: ("ai_cpu",), **_SCATTERS_AND_GATHERS},
    "A3": _SCATTERS_AND_GATHERS,
    "950": dict.fromkeys((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER), ("ai_cpu", "ccu")),
}

# Most ranks under "aiv" [wheel], [vllm].
AIV_RANKS = 8

# Least megabytes of the group's communication buffer under "aiv" (HCCL_BUFFSIZE): [cann].
AIV_BUFFER = 200

# Generations with int8, and the engine of their reduce-scatter and all-gather of int8 by int8: [docs], [master].
INT8_GENERATIONS = ("A2", "A3")
INT8_ENGINE = "aiv"

# Most bytes on 950 of the product before a reduce-scatter ([master], [cann]), and of what "ccu" gathers ([cann]).
LARGEST_SCATTER_950 = 16 * 256 * 2**20
LARGEST_GATHER_950 = 63 * 256 * 2**20

# Ranks of an exchange whose operators multiply (inference), most experts of a rank and of all ranks, least bytes that a
# rank sends or gets. Sources: op-plugin's pages of npu_alltoallv_gmm and npu_gmm_alltoallv at commit 517f2e7d, and
# CANN's of aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv.
EXPERT_RANKS = {"A3": (8, 16, 32, 64)}
MOST_EXPERTS, MOST_EXPERTS_OF_ALL = 32, 256
LEAST_EXPERT_BYTES = 2 * 2**20
MOST_EXPERT_ROWS = 52428800
LARGEST_EXPERT_SIDE = 65535
EXPERT_TOP_K = range(2, 9)

# Matmuls beside an all-to-all: ranks; the engine that an operator takes where none is named, then others that it can be
# told; K of the way back and its projection, and of the other product, by generation; most columns of the latter's.
# Sources: CANN's pages of aclnnAlltoAllMatmul and aclnnMatmulAlltoAll in ops-transformer, tags v9.0.0 to v9.1.0.pre
# (cannmirror on GitHub), and, for the columns of A2, commit 60266d12 (hicann); op-plugin's pages and C++ at commit
# 517f2e7d. op-plugin's pages name A3, or A3 and 950; CANN's first pages (9.0.0-beta.1) A2 and 950, from 9.0.0 on all.
EXCHANGED_RANKS = {"A2": (2, 4, 8), "A3": (2, 4, 8, 16), "950": (2, 4, 8, 16)}
EXCHANGED_ENGINES = {"A2": ("aiv",), "A3": ("ai_cpu",), "950": ("ai_cpu", "ccu")}
EXCHANGED_CANN = (9, 0)
EXCHANGED_K = {
    ALL_TO_ALL_MATMUL: {"A2": (1, 35000), "A3": (2, 65535), "950": (2, 65535)},
    MATMUL_ALL_TO_ALL: dict.fromkeys(("A2", "A3", "950"), (1, 65535)),
}
EXCHANGED_COLUMNS = {"A2": 368640}
LARGEST_EXCHANGED = 2**31 - 1
