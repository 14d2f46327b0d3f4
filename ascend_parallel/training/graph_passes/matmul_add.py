"""Merge a bias's addition into the matmul before it."""

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

    A linear layer without bias gets the bias; a matmul of two matrices becomes addmm. The matmul must have no other
    reader. Paddle's equivalent pass is called gemm_epilogue.
    """
    readers = graph.readers()
    merged: dict[str, tuple[str, Node]] = {}  # by the addition's name: the matmul's name, and the node for both
    for node in graph.nodes.values():
        match = _matmul_of(graph, node)
        if match is None:
            continue
        matmul, bias = match
        mergeable = len(readers[Value(matmul.name)]) == 1 and Value(matmul.name) not in graph.kept
        mergeable = mergeable and matmul.mark is None and node.mark is None  # a strategy of its own would be lost
        if mergeable and (with_bias := _with_bias(matmul, node, bias, graph)) is not None:
            merged[node.name] = matmul.name, with_bias
    removed = {name for name, _ in merged.values()}
    nodes = {name: node for name, node in graph.nodes.items() if name not in removed}
    return replace(graph, nodes=nodes | {name: node for name, (_, node) in merged.items()})


def _matmul_of(graph: Graph, node: Node) -> tuple[Node, Value] | None:
    """Return the matmul and the bias that a node adds; None for any other node."""
    if node.call is None or node.call.target not in ADDITIONS or node.call.kwargs or len(node.inputs) != 2:
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        matmul, meta = graph.nodes[product.node], graph.meta(bias)
        of_columns = meta.shape == node.outputs[0].shape[-1:] and meta.dtype == node.outputs[0].dtype
        if matmul.kind == CALL and of_columns and graph.meta(product) == node.outputs[0]:
            return matmul, bias
    return None


def _with_bias(matmul: Node, addition: Node, bias: Value, graph: Graph) -> Node | None:
    """Return one node for both, under the addition's name, which readers use; None if the matmul takes no bias."""
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
    """Tell whether the call's only arguments are its two tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves((tuple(call.args), dict(call.kwargs))) if leaf is not None]
    return leaves == [Ref(0), Ref(1)]
