"""The four published principles of Sharding Propagation, and which operators of a model each of them names.

1  operators with weights: what a rank's memory holds follows from their strategies
2  operators that change dimensions or axes: what was meant to be cut behind them cannot be told
3  operators before which the strategy changes: a front and a back that want other parallelism
4  fused operators: what costs no redistribution need not be what was meant

What works element by element is named by none, its bias included: strategies pass through it. Nor are operators on
ids and masks, on constants, nor those that end in one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ascend_parallel.sharding.graph import CALL, INPUT, PARAMETER, Node, TensorMeta, Value
from ascend_parallel.sharding.layout import Layout, forward
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules.pointwise import pointwise
from ascend_parallel.sharding.rules.registry import find
from ascend_parallel.sharding.visualize.explain import text

WEIGHTS, AXES, BOUNDARY, FUSED = 1, 2, 3, 4
MATMULS = ("matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "dot", "mv")
REDUCTIONS = ("mean", "sum", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "norm", "logsumexp")
MOVES = (
    "transpose",
    "permute",
    "movedim",
    "swapaxes",
    "t",
    "slice",
    "select",
    "narrow",
    "index_select",
    "split",
    "chunk",
)
# Parts of the names of fused kernels, ours and others'.
FUSED_PARTS = ("attention", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")

Reasons = dict[int, str]
"""Why an operator is named, by principle."""


def principles(plan: ShardingPlan) -> dict[str, Reasons]:
    """Return the operators that a principle names, by name in the order of the graph.

    plan: a whole one, the automatic, of which principle 3 asks where strategies change.
    """
    return _Finder(plan).find()


@dataclass
class _Finder:
    plan: ShardingPlan

    @cached_property
    def _readers(self) -> dict[Value, list[tuple[str, int]]]:
        return self.plan.graph.readers()

    def find(self) -> dict[str, Reasons]:
        carries: set[Value] = set()
        found: dict[str, Reasons] = {}
        for node in self.plan.graph.nodes.values():
            if not self._is_activation(node, carries):
                continue
            carries |= {value for value in _outputs(node) if self._is_float(value)}
            reasons = dict(self._reasons(node)) if node.kind == CALL else {}
            if reasons:
                found[node.name] = reasons
        for name, why in self._changes():
            for near in self._next_of(name, found):
                found[near].setdefault(BOUNDARY, why)
        return found

    def _is_activation(self, node: Node, carries: set[Value]) -> bool:
        """Tell whether a node gives floats that come from weights or from the model's inputs, not only constants."""
        comes = node.kind in (INPUT, PARAMETER) or any(value in carries for value in node.inputs)
        return comes and any(self._is_float(value) for value in _outputs(node))

    def _is_float(self, value: Value) -> bool:
        return self.plan.graph.meta(value).dtype.is_floating_point

    def _reasons(self, node: Node) -> Iterator[tuple[int, str]]:
        """Return what principles 1, 2 and 4 say of an operator."""
        name = operator_name(node)
        weights = list(self._weights(node))
        if any(part in name for part in FUSED_PARTS):
            yield FUSED, "is fused: the layout without redistribution need not be the one that is meant"
        elif weights and not _is_pointwise(node) and not self._is_of_weights(node):
            shapes = " and ".join(str(list(meta.shape)) for meta in weights)
            yield WEIGHTS, f"has the weight {shapes}, of which a rank holds what its strategy says"
        elif name in (*MATMULS, *REDUCTIONS, *MOVES) and node.outputs[0].shape and not self._is_of_matmul(node):
            yield AXES, f"{_change(node)}: what is to be cut behind it cannot be told"

    def _weights(self, node: Node) -> Iterator[TensorMeta]:
        """Return an operator's weights, also where they are transposed or cast before it."""
        for value in node.inputs:
            if self._origin(value).kind == PARAMETER:
                yield self.plan.graph.meta(value)

    def _origin(self, value: Value) -> Node:
        node = self.plan.graph.nodes[value.node]
        while node.kind == CALL and self._is_of_weights(node):
            node = self.plan.graph.nodes[node.inputs[0].node]
        return node

    def _is_of_weights(self, node: Node) -> bool:
        """Tell whether an operator only transposes or changes one tensor, which may be a weight."""
        return len(node.inputs) == 1 and (_swaps_last(node) or _is_pointwise(node))

    def _is_of_matmul(self, node: Node) -> bool:
        """Tell whether a transpose is a matmul's own, as MindSpore's transpose_b."""
        readers = [self.plan.graph.nodes[name] for value in _outputs(node) for name, _ in self._readers[value]]
        return _swaps_last(node) and bool(readers) and all(operator_name(one) in MATMULS for one in readers)

    def _changes(self) -> Iterator[tuple[str, str]]:
        """Return the operators before which an activation's cut is given up for another, by communicating."""
        for one in self.plan.conversions:
            changed = _given_up(one.source, one.target)
            if self.plan.graph.nodes[one.value.node].kind == PARAMETER or not one.ahead.nbytes or not changed:
                continue
            names = self.plan.mesh.dim_names
            before, after = (
                text(forward(tuple(layout[dim] for dim in changed))) for layout in (one.source, one.target)
            )
            where = ", ".join(names[dim] for dim in changed)
            for name in filter(None, one.reader.split(", ")):
                yield name, f"before it the strategy along {where} changes from {before} to {after}"

    def _next_of(self, name: str, found: dict[str, Reasons]) -> set[str]:
        """Return the operator, or the first behind it on each way, that another principle names."""
        seen, ends, ways = set(), set(), [name]
        while ways:
            at = ways.pop()
            if at in found:
                ends.add(at)
            elif at not in seen:
                seen.add(at)
                ways += [one for value in _outputs(self.plan.graph.nodes[at]) for one, _ in self._readers[value]]
        return ends


def _given_up(source: Layout, target: Layout) -> list[int]:
    pairs = enumerate(zip(source, target, strict=True))
    return [dim for dim, (before, after) in pairs if before.kind == "shard" and before != after]


def _change(node: Node) -> str:
    assert node.call is not None
    before = " and ".join(str(list(meta.shape)) for meta in node.call.inputs)
    return f"makes {' and '.join(str(list(meta.shape)) for meta in node.outputs)} of {before}"


def _is_pointwise(node: Node) -> bool:
    """Tell whether an operator works element by element, by the file that its rule is from."""
    entry = find(node.call) if node.call is not None else None
    return entry is not None and entry.rule.__module__ == pointwise.__module__


def _swaps_last(node: Node) -> bool:
    """Tell whether an operator swaps the last two dimensions."""
    name, dims = operator_name(node), len(node.outputs[0].shape)
    if name == "t":
        return dims == 2
    if name not in ("transpose", "swapaxes") or node.call is None:
        return False
    return {dim % dims for dim in node.call.args[1:3]} == {dims - 2, dims - 1}


def _outputs(node: Node) -> list[Value]:
    return [Value(node.name, index) for index in range(len(node.outputs))]
