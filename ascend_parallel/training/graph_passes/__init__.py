"""Passes that fuse operators of a traced graph before planning.

matching    finds operators by what they read and who reads them; replaces nodes
matmul_add  a bias's addition is merged into the matmul
attention   matmul, softmax and matmul become scaled_dot_product_attention
rms_norm    an RMS norm of five or six operators becomes torch's rms_norm
"""

from __future__ import annotations

from collections.abc import Callable

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.training.graph_passes.attention import attention
from ascend_parallel.training.graph_passes.matmul_add import matmul_add
from ascend_parallel.training.graph_passes.rms_norm import rms_norm

PASSES: dict[str, Callable[[Graph], Graph]] = {"matmul_add": matmul_add, "attention": attention, "rms_norm": rms_norm}


def fuse_operators(graph: Graph, names: tuple[str, ...]) -> tuple[Graph, dict[str, int]]:
    """Run the passes of these names (PASSES); return the graph and the number of operators that each pass removed."""
    ops_fused = {}
    for name in names:
        before = len(graph.nodes)
        graph = PASSES[name](graph)
        ops_fused[name] = before - len(graph.nodes)
    return graph, ops_fused
