"""Turns a graph traced in training mode into the graph of evaluation mode, with the same nodes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import Graph, Node, OpCall, Ref, Value
from ascend_parallel.sharding.rules.axes import arguments
from ascend_parallel.sharding.rules.batch_norm import LOCAL
from ascend_parallel.sharding.rules.npu import ATTENTION
from ascend_parallel.sharding.tracing.functionalize import BATCH_NORM, FUNCTIONAL_BATCH_NORM

UPDATING = (FUNCTIONAL_BATCH_NORM, LOCAL)  # batch norms that update running statistics
DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
# The argument that switches dropout off in evaluation, with its value there, by operator.
DROPPING: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(DROPOUT, ("train", False)),
    "scaled_dot_product_attention": ("dropout_p", 0.0),
    **dict.fromkeys((ATTENTION, f"{ATTENTION}_v2"), ("keep_prob", 1.0)),
}


def in_evaluation(graph: Graph) -> Graph:
    """Return the graph without dropout; batch norms read the running statistics and do not update them.

    Nodes keep their names, so a plan of `graph` is also a plan of the result. A graph does not show what the model's
    own Python does differently in evaluation mode; `check_evaluation` finds such differences.
    """
    if not graph.training:
        return graph
    nodes: dict[str, Node] = {}
    old: dict[Value, Value] = {}  # from the updated running statistics, which are not computed, to those that are read
    for name, node in graph.nodes.items():
        node = replace(node, inputs=tuple(old.get(value, value) for value in node.inputs))
        nodes[name] = _replaced(node)
        if node.call is not None and node.call.target in UPDATING:
            args = arguments(node.call)
            for index, statistic in ((3, "running_mean"), (4, "running_var")):
                old[Value(name, index)] = node.inputs[args[statistic].index]
    owners = {name.rpartition(".")[0] for name, value in graph.updates.items() if value in old}
    updates = {name: value for name, value in graph.updates.items() if name.rpartition(".")[0] not in owners}
    return replace(graph, nodes=nodes, updates=updates, training=False)


def check_evaluation(graph: Graph, traced: Graph) -> None:
    """Raise `ValueError` unless a graph of `in_evaluation` equals `traced`, the same model traced in evaluation mode.

    The comparison ignores the names of nodes, dropout that is off, and operators whose results nobody reads.
    """
    converted, expected = _operators(graph), _operators(traced)
    end = ("nothing more", "")
    while True:
        mine, theirs = next(converted, end), next(expected, end)
        if mine == end == theirs:
            return
        if mine != theirs:
            where = f"in {mine[1]}" if isinstance(mine[1], str) and mine[1] else "in its own forward"
            same_operator = f"{mine[0]} with other arguments than"
            runs = same_operator if mine[0] == theirs[0] else f"{theirs[0]} where it ran {mine[0]}"
            raise ValueError(
                f"evaluation mode changes more of the model than dropout and running statistics: {where} it "
                f"runs {runs} in training"
            )


def _replaced(node: Node) -> Node:
    if node.call is None:
        return node
    by_name, name = arguments(node.call), node.call.operator
    if name in DROPPING and by_name[DROPPING[name][0]] != DROPPING[name][1]:
        return replace(node, call=_with(node.call, *DROPPING[name]))
    if node.call.target in UPDATING:
        tensors = [by_name[tensor] for tensor in ("input", "weight", "bias", "running_mean", "running_var")]
        args = (*tensors, False, by_name["momentum"], by_name["eps"], True)
        call = OpCall(BATCH_NORM, args, {}, node.call.inputs, node.call.outputs[:1])
        return replace(node, call=call, outputs=node.outputs[:1])
    return node


def _with(call: OpCall, name: str, value: Any) -> OpCall:
    """Return the call with another value for an argument."""
    if name in call.kwargs:
        return replace(call, kwargs={**call.kwargs, name: value})
    index = [argument.name for argument in call.declared].index(name)
    return replace(call, args=(*call.args[:index], value, *call.args[index + 1 :]))


def _operators(graph: Graph) -> Iterator[tuple[Any, ...]]:
    """Yield the needed operators in order, then the outputs and the updated buffers."""
    known: dict[Value, Any] = {}
    needed, count = graph.needed_for(graph.kept), itertools.count()
    for node in graph.nodes.values():
        if node.call is None:
            known[Value(node.name)] = (node.kind, node.source, _digest(graph.constants.get(node.source)))
        elif node.name in needed:
            by_name = {name: value for name, value in arguments(node.call).items() if name != "cudnn_enabled"}
            name = node.call.operator
            # a tensor's strides, which attention without dropout may change, decide whether torch runs `contiguous`
            if name == "contiguous" or (name in DROPOUT and not by_name["train"]):
                known[Value(node.name)] = known[node.inputs[0]]
                continue
            number = next(count)
            known |= {value: (number, value.index) for value in node.values}
            read = [known[value] for value in node.inputs]
            yield node.call.name, node.module, pytree.tree_map(lambda leaf: _read(leaf, read), by_name)  # noqa: B023
    yield "its end", pytree.tree_map(lambda leaf: known.get(leaf, leaf), graph.outputs)
    yield "updates", {name: known[value] for name, value in graph.updates.items()}


def _digest(constant: Any) -> str:
    """Return a constant's dtype, shape and the hash of its bytes; "" for no tensor."""
    if not isinstance(constant, torch.Tensor):
        return ""
    on_cpu = constant.detach().cpu().contiguous()
    content = on_cpu.reshape(-1).view(torch.uint8).numpy().tobytes() if on_cpu.numel() else b""
    return f"{on_cpu.dtype} {list(on_cpu.shape)} {hashlib.sha256(content).hexdigest()}"


def _read(leaf: Any, read: Sequence[Any]) -> Any:
    return read[leaf.index] if isinstance(leaf, Ref) else leaf
