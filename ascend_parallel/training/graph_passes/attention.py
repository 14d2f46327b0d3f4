"""Fuse attention of matmuls and a softmax into scaled_dot_product_attention, which keeps no scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, TensorMeta, Value
from ascend_parallel.training.graph_passes.matching import GraphReader, Replacement, call_arguments, replace_nodes

aten = torch.ops.aten
MATMUL, SOFTMAX = aten.matmul.default, aten.softmax.int
ATTENTION = aten.scaled_dot_product_attention.default


def attention(graph: Graph) -> Graph:
    """Merge ``softmax(q @ k.T * scale + mask) @ v`` into scaled_dot_product_attention.

    q is [B, H, L, E], k [B, H, S, E], v [B, H, S, Ev]. The scale, a factor or a divisor, may be missing, and so may the
    mask: an addend, or a masked_fill with minus infinity. Dropout on the weights becomes the operator's. The tensors
    between must have no other reader: the scores [B, H, L, S] are then not held in memory.
    """
    return replace_nodes(graph, _match)


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
    removed: set[str] = field(default_factory=set)

    def replacement(self, graph: Graph, node: Node) -> Replacement:
        """Return the replacement of the last matmul."""
        nodes, mask = [], self.mask
        metas = [graph.meta(value) for value in (self.q, self.k, self.v)]
        if mask is not None:
            meta = graph.meta(mask)
            if self.is_filled:  # scaled_dot_product_attention keeps scores where its mask is true
                name, kept = f"{node.name}_kept", TensorMeta(meta.shape, torch.bool)
                call = OpCall(aten.logical_not.default, (Ref(0),), {}, (meta,), (kept,))
                nodes.append(replace(node, name=name, call=call, inputs=(mask,), outputs=(kept,), module=self.module))
                mask, meta = Value(name), kept
            metas.append(meta)
        inputs = (self.q, self.k, self.v, *(() if mask is None else (mask,)))
        args = (Ref(0), Ref(1), Ref(2), None if mask is None else Ref(3), self.dropout)
        call = OpCall(ATTENTION, args, {"scale": self.scale}, tuple(metas), node.outputs)
        nodes.append(replace(node, call=call, inputs=inputs, module=self.module))
        return Replacement(tuple(nodes), frozenset(self.removed))


def _match(reader: GraphReader, node: Node) -> Replacement | None:
    """Return the replacement of the attention whose last matmul is `node`, matched backwards from there."""
    if not reader.calls(node, MATMUL) or len(node.outputs[0].shape) != 4:
        return None
    weights, v = node.inputs
    removed, dropout = set(), 0.0
    if (drop := reader.producer(weights, aten.dropout.default)) is not None:
        removed.add(drop.name)
        dropout = call_arguments(drop)["p"] if call_arguments(drop)["train"] else 0.0
        weights = drop.inputs[0]
    softmax = reader.producer(weights, SOFTMAX)
    if softmax is None or call_arguments(softmax)["dim"] not in (-1, 3) or call_arguments(softmax)["dtype"] is not None:
        return None
    scores, mask, is_filled = _masked(reader, softmax.inputs[0], removed)
    scores, scale = _scaled(reader, scores, removed)
    product = reader.producer(scores, MATMUL)
    transposed = None if product is None else reader.graph.nodes[product.inputs[1].node]
    if product is None or transposed is None or not _is_transposed(reader, transposed):
        return None
    if reader.has_single_reader(product.inputs[1]):
        removed.add(transposed.name)
    match = _Attention(product.inputs[0], transposed.inputs[0], v, product.module, scale, mask, is_filled, dropout)
    match.removed = removed | {softmax.name, product.name}
    return match.replacement(reader.graph, node) if _fits(reader.graph, match) else None


def _masked(reader: GraphReader, scores: Value, removed: set[str]) -> tuple[Value, Value | None, bool]:
    """Return the scores before the mask, the mask, and whether a true mask fills scores."""
    node = reader.producer(scores, aten.add.Tensor, aten.masked_fill.Scalar)
    if node is None or len(node.inputs) != 2:
        return scores, None, False
    is_filled = reader.calls(node, aten.masked_fill.Scalar)
    plain = call_arguments(node)["value"] == float("-inf") if is_filled else call_arguments(node)["alpha"] == 1
    for inside, mask in [node.inputs] if is_filled else [node.inputs, node.inputs[::-1]]:
        meta, of_mask = reader.graph.meta(inside), reader.graph.meta(mask)
        takes = len(of_mask.shape) >= 2 and (is_filled or of_mask.dtype == meta.dtype)
        if plain and takes and reader.producer(_scaled(reader, inside, set())[0], MATMUL) is not None:
            removed.add(node.name)
            return inside, mask, is_filled
    return scores, None, False


def _scaled(reader: GraphReader, scores: Value, removed: set[str]) -> tuple[Value, float]:
    """Return the scores before they are multiplied, or divided, by a number."""
    node = reader.producer(scores, aten.mul.Tensor, aten.div.Tensor)
    number = None if node is None else call_arguments(node)["other"]
    if node is None or not isinstance(number, (int, float)) or isinstance(number, bool) or number == 0:
        return scores, 1.0
    removed.add(node.name)
    return node.inputs[0], float(number) if reader.calls(node, aten.mul.Tensor) else 1.0 / number


def _is_transposed(reader: GraphReader, node: Node) -> bool:
    """Tell whether a node swaps the last two of four dimensions."""
    if reader.calls(node, aten.transpose.int):
        return {call_arguments(node)["dim0"] % 4, call_arguments(node)["dim1"] % 4} == {2, 3} and len(
            node.outputs[0].shape
        ) == 4
    return reader.calls(node, aten.permute.default) and [dim % 4 for dim in call_arguments(node)["dims"]] == [
        0,
        1,
        3,
        2,
    ]


def _fits(graph: Graph, match: _Attention) -> bool:
    """Tell whether the operator takes the tensors: equal batch and heads, equal dtype, a mask that broadcasts."""
    metas = [graph.meta(value) for value in (match.q, match.k, match.v)]
    if match.mask is not None:  # it must broadcast to the scores
        scores = (*metas[0].shape[:3], metas[1].shape[2])
        sizes = zip(reversed(graph.meta(match.mask).shape), reversed(scores), strict=False)
        if len(graph.meta(match.mask).shape) > 4 or any(size not in (1, of_scores) for size, of_scores in sizes):
            return False
    return len({(meta.shape[:2], meta.dtype) for meta in metas}) == 1 and all(len(meta.shape) == 4 for meta in metas)
