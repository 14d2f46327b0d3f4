"""A bias's addition as part of the matmul before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, Graph, Node, OpCall, Ref, Value

aten = torch.ops.aten
ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)


def matmul_add(graph: Graph) -> Graph:
    """Merge the addition of a bias [N] into the matmul before it: one kernel, and no tensor between them.

    A linear layer without bias takes it as its bias; a matmul of two matrices becomes addmm. The matmul must have no
    other reader. Paddle's pass of that purpose is called gemm_epilogue.
    """
    readers = graph.readers()
    merged: dict[str, tuple[str, Node]] = {}  # by the addition's name: the matmul's, and what takes both places
    for node in graph.nodes.values():
        found = _matmul_of(graph, node)
        if found is None:
            continue
        matmul, bias = found
        alone = len(readers[Value(matmul.name)]) == 1 and Value(matmul.name) not in graph.kept
        alone = alone and matmul.mark is None and node.mark is None  # a strategy of its own would be lost
        if alone and (one := _with_bias(matmul, node, bias, graph)) is not None:
            merged[node.name] = matmul.name, one
    gone = {name for name, _ in merged.values()}
    nodes = {name: merged[name][1] if name in merged else one for name, one in graph.nodes.items() if name not in gone}
    return replace(graph, nodes=nodes)


def _matmul_of(graph: Graph, node: Node) -> tuple[Node, Value] | None:
    """Return the matmul and the bias that a node adds; None for any other node."""
    if node.call is None or node.call.target not in ADDITIONS or node.call.kwargs or len(node.inputs) != 2:
        return None
    for matmul, bias in (node.inputs, node.inputs[::-1]):
        one, meta = graph.nodes[matmul.node], graph.meta(bias)
        of_columns = meta.shape == node.outputs[0].shape[-1:] and meta.dtype == node.outputs[0].dtype
        if one.kind == CALL and of_columns and graph.meta(matmul) == node.outputs[0]:
            return one, bias
    return None


def _with_bias(matmul: Node, addition: Node, bias: Value, graph: Graph) -> Node | None:
    """Return one node for both, under the addition's name (its readers' word for the result); None if there is none."""
    call = matmul.call
    assert call is not None
    metas = tuple(graph.meta(value) for value in (*matmul.inputs, bias))
    args: tuple[Any, ...]
    inputs: tuple[Value, ...]
    if call.target is aten.linear.default and len(matmul.inputs) == 2:
        args, target, inputs = (Ref(0), Ref(1), Ref(2)), aten.linear.default, (*matmul.inputs, bias)
    elif call.target in (aten.mm.default, aten.matmul.default) and all(len(meta.shape) == 2 for meta in metas[:2]):
        args, target, inputs = (Ref(0), Ref(1), Ref(2)), aten.addmm.default, (bias, *matmul.inputs)
        metas = (metas[2], *metas[:2])
    else:
        return None
    if not _plain(call):
        return None
    merged = OpCall(target, args, {}, metas, addition.outputs)
    return replace(addition, call=merged, inputs=inputs, module=matmul.module or addition.module)


def _plain(call: OpCall) -> bool:
    """Tell whether the call has its two tensors for arguments, and nothing else."""
    leaves = [leaf for leaf in pytree.tree_leaves((tuple(call.args), dict(call.kwargs))) if leaf is not None]
    return leaves == [Ref(0), Ref(1)]
