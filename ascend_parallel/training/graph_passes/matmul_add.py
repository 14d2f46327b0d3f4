"""Merge a bias's addition into the matmul before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, Value
from ascend_parallel.training.graph_passes.matching import GraphReader, Replacement, replace_nodes

aten = torch.ops.aten
ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)
MATMULS = (aten.linear.default, aten.mm.default, aten.matmul.default)


def matmul_add(graph: Graph) -> Graph:
    """Merge the addition of a bias [N] into the matmul before it: one kernel, and no tensor between them.

    A linear layer without bias gets the bias; a matmul of two matrices becomes addmm. The matmul must have no other
    reader. Paddle's equivalent pass is called gemm_epilogue.
    """
    reader, replacements = GraphReader(graph), {}
    for node in graph.nodes.values():
        match = _matmul_of(reader, node)
        if match is not None and (with_bias := _with_bias(match[0], node, match[1], graph)) is not None:
            replacements[node.name] = Replacement((with_bias,), frozenset({match[0].name}))
    return replace_nodes(graph, replacements)


def _matmul_of(reader: GraphReader, node: Node) -> tuple[Node, Value] | None:
    """Return the matmul and the bias that a node adds; None for any other node."""
    if node.call is None or not reader.calls(node, *ADDITIONS) or node.call.kwargs or len(node.inputs) != 2:
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        matmul, meta = reader.producer(product, *MATMULS), reader.graph.meta(bias)
        of_columns = meta.shape == node.outputs[0].shape[-1:] and meta.dtype == node.outputs[0].dtype
        if matmul is not None and of_columns and reader.graph.meta(product) == node.outputs[0]:
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
    elif call.target is not aten.linear.default and all(len(meta.shape) == 2 for meta in metas[:2]):
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
