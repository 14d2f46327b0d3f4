"""The three operators of tensor parallelism, the kernels that run them, and the exchange of a mixture of experts.

matmul_all_reduce, matmul_reduce_scatter and all_gather_matmul overlap a matmul with a collective; expert_exchange
overlaps all-to-alls with experts.
Layers and their gradients are in ascend_parallel.overlap, frameworks in ascend_parallel.patches.
"""

if __name__ == "ops":
    raise ImportError(
        "import ascend_parallel.ops instead: a second copy named 'ops' would register the operators twice"
    )

from ascend_parallel.ops.call import Exchange, Matmul
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Decision, Known
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.library import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ascend_parallel.ops.pending import CollectiveError, Pending
from ascend_parallel.ops.registry import Explanation, UnmetRequestError, choose

__all__ = [
    "COUNTS",
    "CollectiveError",
    "Decision",
    "DegreeError",
    "Exchange",
    "Explanation",
    "Known",
    "Matmul",
    "Pending",
    "UnmetRequestError",
    "all_gather_matmul",
    "choose",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
