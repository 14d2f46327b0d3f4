"""An RMS norm written out as torch's one operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, Value
from ascend_parallel.training.graph_passes.matching import Merged, Reading, given, merge, read

aten = torch.ops.aten
MUL, ADD, MEAN, RSQRT, POW = aten.mul.Tensor, aten.add.Tensor, aten.mean.dim, aten.rsqrt.default, aten.pow.Tensor_Scalar


def rms_norm(graph: Graph) -> Graph:
    """Merge ``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps) * weight`` into rms_norm.

    The square is a power or a product, the weight [K] the first or the second factor. All are of one dtype: what is
    computed in another than its input, as by ``x.float()`` under a bf16 model, stays as it is, rounding with it.
    """
    reading, found = Reading(graph), {}
    for node in graph.nodes.values():
        one = _match(reading, node) if reading.calls(node, MUL) and len(node.inputs) == 2 else None
        if one is not None:
            found[node.name] = one
    return merge(graph, found)


def _match(reading: Reading, node: Node) -> Merged | None:
    """Return the norm whose last product a node is."""
    for normed, weight in (node.inputs, node.inputs[::-1]):
        product, meta = reading.inner(normed, MUL), reading.graph.meta(weight)
        if product is None or meta.shape != node.outputs[0].shape[-1:] or len(product.inputs) != 2:
            continue
        for x, factor in (product.inputs, product.inputs[::-1]):
            found = _reciprocal(reading, factor, x)
            metas = (reading.graph.meta(x), meta)
            if found is not None and metas[0] == node.outputs[0] and metas[0].dtype == meta.dtype:
                eps, gone = found
                args = (Ref(0), list(meta.shape), Ref(1), eps)
                call = OpCall(aten.rms_norm.default, args, {}, metas, node.outputs)
                made = replace(node, call=call, inputs=(x, weight), module=product.module)
                return Merged((made,), gone | {product.name})
    return None


def _reciprocal(reading: Reading, factor: Value, x: Value) -> tuple[float, frozenset[str]] | None:
    """Return eps and the nodes of ``rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``."""
    root = reading.inner(factor, RSQRT)
    shifted = None if root is None else reading.inner(root.inputs[0], ADD)
    if root is None or shifted is None or len(shifted.inputs) != 1:
        return None
    eps, mean = given(shifted)["other"], reading.inner(shifted.inputs[0], MEAN)
    if mean is None or given(shifted)["alpha"] != 1 or not _over_last(mean):
        return None
    square = reading.inner(mean.inputs[0], POW, MUL)
    if square is None or set(square.inputs) != {x} or not _is_square(square):
        return None
    return float(eps), frozenset(one.name for one in (root, shifted, mean, square))


def _over_last(mean: Node) -> bool:
    dims, last = given(mean)["dim"], len(mean.outputs[0].shape) - 1
    return bool(given(mean)["keepdim"]) and given(mean)["dtype"] is None and list(dims) in ([-1], [last])


def _is_square(node: Node) -> bool:
    named: dict[str, Any] = given(node)
    return read(node, named["other"]) is not None if "other" in named else named["exponent"] == 2
