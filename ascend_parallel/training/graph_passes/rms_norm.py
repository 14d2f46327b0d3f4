"""Fuse an RMS norm of several operators into torch's rms_norm."""

from __future__ import annotations

from dataclasses import replace

import torch

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, Value
from ascend_parallel.training.graph_passes.matching import GraphReader, Replacement, call_arguments, replace_nodes

aten = torch.ops.aten
MUL, ADD, MEAN, RSQRT, POW = aten.mul.Tensor, aten.add.Tensor, aten.mean.dim, aten.rsqrt.default, aten.pow.Tensor_Scalar


def rms_norm(graph: Graph) -> Graph:
    """Merge ``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps) * weight`` into rms_norm.

    The square is a power or a product, the weight [K] the first or the second factor. All have the same dtype: a norm
    computed in another dtype than its input's, as by ``x.float()`` in a bf16 model, is not merged, since rounding would
    change.
    """
    return replace_nodes(graph, _match)


def _match(reader: GraphReader, node: Node) -> Replacement | None:
    """Return the replacement of a norm whose last product is `node`."""
    if not reader.calls(node, MUL) or len(node.inputs) != 2:
        return None
    for normed, weight in (node.inputs, node.inputs[::-1]):
        product, meta = reader.producer(normed, MUL), reader.graph.meta(weight)
        if product is None or meta.shape != node.outputs[0].shape[-1:] or len(product.inputs) != 2:
            continue
        for x, factor in (product.inputs, product.inputs[::-1]):
            reciprocal = _reciprocal(reader, factor, x)
            metas = (reader.graph.meta(x), meta)
            if reciprocal is not None and metas[0] == node.outputs[0] and metas[0].dtype == meta.dtype:
                eps, removed = reciprocal
                args = (Ref(0), list(meta.shape), Ref(1), eps)
                call = OpCall(aten.rms_norm.default, args, {}, metas, node.outputs)
                norm = replace(node, call=call, inputs=(x, weight), module=product.module)
                return Replacement((norm,), removed | {product.name})
    return None


def _reciprocal(reader: GraphReader, factor: Value, x: Value) -> tuple[float, frozenset[str]] | None:
    """Return eps and the nodes of ``rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``."""
    root = reader.producer(factor, RSQRT)
    shifted = None if root is None else reader.producer(root.inputs[0], ADD)
    if root is None or shifted is None or len(shifted.inputs) != 1:
        return None
    eps, mean = call_arguments(shifted)["other"], reader.producer(shifted.inputs[0], MEAN)
    if mean is None or call_arguments(shifted)["alpha"] != 1 or not _over_last(mean):
        return None
    square = reader.producer(mean.inputs[0], POW, MUL)
    if square is None or set(square.inputs) != {x} or not _is_square(square):
        return None
    return float(eps), frozenset(removed.name for removed in (root, shifted, mean, square))


def _over_last(mean: Node) -> bool:
    dims, last = call_arguments(mean)["dim"], len(mean.outputs[0].shape) - 1
    return (
        bool(call_arguments(mean)["keepdim"]) and call_arguments(mean)["dtype"] is None and list(dims) in ([-1], [last])
    )


def _is_square(node: Node) -> bool:
    named = call_arguments(node)
    return isinstance(named["other"], Ref) if "other" in named else named["exponent"] == 2
