"""Merge a bias's addition into the matmul before it."""

from __future__ import annotations

from dataclasses import replace

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
    return replace_nodes(graph, _match)


def _match(reader: GraphReader, node: Node) -> Replacement | None:
    """Return one node for a matmul and the addition `node`, under the addition's name, which readers use."""
    if not reader.calls(node, *ADDITIONS) or node.call is None or node.call.kwargs or len(node.inputs) != 2:
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        matmul, meta = reader.producer(product, *MATMULS), reader.graph.meta(bias)
        of_columns = meta.shape == node.outputs[0].shape[-1:] and meta.dtype == node.outputs[0].dtype
        if matmul is not None and of_columns and reader.graph.meta(product) == node.outputs[0]:
            merged = _with_bias(matmul, node, bias, reader.graph)
            return None if merged is None else Replacement((merged,), frozenset({matmul.name}))
    return None


def _with_bias(matmul: Node, addition: Node, bias: Value, graph: Graph) -> Node | None:
    """Return one node for both; None if the matmul takes no bias."""
    call, inputs = matmul.call, (*matmul.inputs, bias)
    assert call is not None
    if not _plain(call):
        return None
    target = call.target
    if target is not aten.linear.default:
        if any(len(graph.meta(value).shape) != 2 for value in matmul.inputs):
            return None
        target, inputs = aten.addmm.default, (bias, *matmul.inputs)
    metas = tuple(graph.meta(value) for value in inputs)
    merged = OpCall(target, (Ref(0), Ref(1), Ref(2)), {}, metas, addition.outputs)
    return replace(addition, call=merged, inputs=inputs, module=matmul.module or addition.module)


def _plain(call: OpCall) -> bool:
    """Tell whether the call's only arguments are its two tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves((tuple(call.args), dict(call.kwargs))) if leaf is not None]
    return leaves == [Ref(0), Ref(1)]
