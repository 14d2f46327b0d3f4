"""Attention in matmuls and a softmax as torch's one operator, which keeps no scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, TensorMeta, Value
from ascend_parallel.training.graph_passes.matching import Merged, Reading, given, merge

aten = torch.ops.aten
MATMUL, SOFTMAX = aten.matmul.default, aten.softmax.int
ATTENTION = aten.scaled_dot_product_attention.default


def attention(graph: Graph) -> Graph:
    """Merge ``softmax(q @ k.T * scale + mask) @ v`` into scaled_dot_product_attention.

    q is [B, H, L, E], k [B, H, S, E], v [B, H, S, Ev]. The scale, a factor or a divisor, may be missing, and so may the
    mask: an addend, or a masked_fill with minus infinity. Dropout on the weights becomes the operator's. What comes
    between may have no other reader: the scores [B, H, L, S] are then not held in memory.
    """
    reading, found = Reading(graph), {}
    for node in graph.nodes.values():
        one = _match(reading, node)
        if one is not None:
            found[node.name] = one.merged(graph, node)
    return merge(graph, found)


@dataclass
class _Attention:
    q: Value
    k: Value
    v: Value
    module: str
    scale: float = 1.0
    mask: Value | None = None
    is_filled: bool = False
    dropout: float = 0.0
    gone: set[str] = field(default_factory=set)

    def merged(self, graph: Graph, node: Node) -> Merged:
        """Return what comes in the place of the last matmul."""
        nodes, mask = [], self.mask
        metas = [graph.meta(value) for value in (self.q, self.k, self.v)]
        if mask is not None:
            meta = graph.meta(mask)
            if self.is_filled:  # scaled_dot_product_attention keeps where the mask is true
                name, of = f"{node.name}_kept", TensorMeta(meta.shape, torch.bool)
                call = OpCall(aten.logical_not.default, (Ref(0),), {}, (meta,), (of,))
                nodes.append(replace(node, name=name, call=call, inputs=(mask,), outputs=(of,), module=self.module))
                mask, meta = Value(name), of
            metas.append(meta)
        inputs = (self.q, self.k, self.v, *(() if mask is None else (mask,)))
        args = (Ref(0), Ref(1), Ref(2), None if mask is None else Ref(3), self.dropout)
        call = OpCall(ATTENTION, args, {"scale": self.scale}, tuple(metas), node.outputs)
        nodes.append(replace(node, call=call, inputs=inputs, module=self.module))
        return Merged(tuple(nodes), frozenset(self.gone))


def _match(reading: Reading, node: Node) -> _Attention | None:
    """Return the attention that ends with a node; from there backwards."""
    if not reading.calls(node, MATMUL) or len(node.outputs[0].shape) != 4:
        return None
    weights, v = node.inputs
    gone, dropout = set(), 0.0
    if (one := reading.inner(weights, aten.dropout.default)) is not None:
        gone.add(one.name)
        dropout = given(one)["p"] if given(one)["train"] else 0.0
        weights = one.inputs[0]
    softmax = reading.inner(weights, SOFTMAX)
    if softmax is None or given(softmax)["dim"] not in (-1, 3) or given(softmax)["dtype"] is not None:
        return None
    scores, mask, is_filled = _masked(reading, softmax.inputs[0], gone)
    scores, scale = _scaled(reading, scores, gone)
    product = reading.inner(scores, MATMUL)
    transposed = None if product is None else reading.graph.nodes[product.inputs[1].node]
    if product is None or transposed is None or not _is_transposed(reading, transposed):
        return None
    if reading.alone(product.inputs[1]):
        gone.add(transposed.name)
    found = _Attention(product.inputs[0], transposed.inputs[0], v, product.module, scale, mask, is_filled, dropout)
    found.gone = gone | {softmax.name, product.name}
    return found if _fits(reading.graph, found) else None


def _masked(reading: Reading, scores: Value, gone: set[str]) -> tuple[Value, Value | None, bool]:
    """Return the scores before the mask, the mask, and whether it is true where they are filled."""
    node = reading.inner(scores, aten.add.Tensor, aten.masked_fill.Scalar)
    if node is None or len(node.inputs) != 2:
        return scores, None, False
    is_filled = reading.calls(node, aten.masked_fill.Scalar)
    plain = given(node)["value"] == float("-inf") if is_filled else given(node)["alpha"] == 1
    for inside, mask in [node.inputs] if is_filled else [node.inputs, node.inputs[::-1]]:
        meta, of_mask = reading.graph.meta(inside), reading.graph.meta(mask)
        takes = len(of_mask.shape) >= 2 and (is_filled or of_mask.dtype == meta.dtype)
        if plain and takes and reading.inner(_scaled(reading, inside, set())[0], MATMUL) is not None:
            gone.add(node.name)
            return inside, mask, is_filled
    return scores, None, False


def _scaled(reading: Reading, scores: Value, gone: set[str]) -> tuple[Value, float]:
    """Return the scores before they are multiplied, or divided, by a number."""
    node = reading.inner(scores, aten.mul.Tensor, aten.div.Tensor)
    number = None if node is None else given(node)["other"]
    if node is None or not isinstance(number, (int, float)) or isinstance(number, bool) or number == 0:
        return scores, 1.0
    gone.add(node.name)
    return node.inputs[0], float(number) if reading.calls(node, aten.mul.Tensor) else 1.0 / number


def _is_transposed(reading: Reading, node: Node) -> bool:
    """Tell whether a node swaps the last two of four dimensions."""
    if reading.calls(node, aten.transpose.int):
        return {given(node)["dim0"] % 4, given(node)["dim1"] % 4} == {2, 3} and len(node.outputs[0].shape) == 4
    return reading.calls(node, aten.permute.default) and [dim % 4 for dim in given(node)["dims"]] == [0, 1, 3, 2]


def _fits(graph: Graph, found: _Attention) -> bool:
    """Tell whether the operator takes the tensors: the same batch and heads, the same dtype, a mask that fits."""
    metas = [graph.meta(value) for value in (found.q, found.k, found.v)]
    if found.mask is not None:  # it may not be larger than the scores
        scores = (*metas[0].shape[:3], metas[1].shape[2])
        sizes = zip(reversed(graph.meta(found.mask).shape), reversed(scores), strict=False)
        if len(graph.meta(found.mask).shape) > 4 or any(size not in (1, of_scores) for size, of_scores in sizes):
            return False
    return len({(meta.shape[:2], meta.dtype) for meta in metas}) == 1 and all(len(one.shape) == 4 for one in metas)
