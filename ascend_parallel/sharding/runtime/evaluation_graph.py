"""A graph that was traced in training mode, as it runs in evaluation mode: the same operators, in the same places."""

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
from ascend_parallel.sharding.tracing.functionalize import FUNCTIONAL_BATCH_NORM

BATCH_NORM = torch.ops.aten.batch_norm.default
DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
# The argument that is 0 or False in evaluation, by operator.
DROPPING = {**dict.fromkeys(DROPOUT, "train"), "scaled_dot_product_attention": "dropout_p"}


def in_evaluation(graph: Graph) -> Graph:
    """Return the graph without dropout, and with running statistics in place of the batch's, which it leaves alone.

    Nodes keep their names, so that a plan of the graph is one of the result. What a model's own Python does otherwise
    in evaluation mode is not in a graph: `check_evaluation` tells.
    """
    if not graph.training:
        return graph
    nodes: dict[str, Node] = {}
    old: dict[Value, Value] = {}  # by the new running statistics, which nobody computes: those that were read
    for name, node in graph.nodes.items():
        node = replace(node, inputs=tuple(old.get(value, value) for value in node.inputs))
        nodes[name] = _replaced(node)
        if node.call is not None and node.call.target is FUNCTIONAL_BATCH_NORM:
            given = arguments(node.call)
            for index, which in ((3, "running_mean"), (4, "running_var")):
                old[Value(name, index)] = node.inputs[given[which].index]
    owners = {name.rpartition(".")[0] for name, value in graph.updates.items() if value in old}
    updates = {name: value for name, value in graph.updates.items() if name.rpartition(".")[0] not in owners}
    return replace(graph, nodes=nodes, updates=updates, training=False)


def check_evaluation(graph: Graph, traced: Graph) -> None:
    """Raise `ValueError` unless what `in_evaluation` made runs what was `traced` of the same model in evaluation mode.

    Names of nodes, and operators that change nothing or are of no use, do not matter.
    """
    found, wanted = _told(graph), _told(traced)
    missing = ("nothing more", "")
    while True:
        one, other = next(found, missing), next(wanted, missing)
        if one == missing == other:
            return
        if one != other:
            where = f"in {one[1]}" if isinstance(one[1], str) and one[1] else "in its own forward"
            runs = f"{one[0]} with other arguments than" if one[0] == other[0] else f"{other[0]} where it ran {one[0]}"
            raise ValueError(
                f"in evaluation mode the model does otherwise, not by dropout and running statistics alone: {where} it "
                f"runs {runs} in training"
            )


def _replaced(node: Node) -> Node:
    if node.call is None:
        return node
    given, name = arguments(node.call), node.call.name.split(".")[1]
    if name in DROPPING and given[DROPPING[name]]:
        return replace(node, call=_with(node.call, DROPPING[name], type(given[DROPPING[name]])(0)))
    if node.call.target is FUNCTIONAL_BATCH_NORM:
        read = [given[one] for one in ("input", "weight", "bias", "running_mean", "running_var")]
        args = (*read, False, given["momentum"], given["eps"], True)
        made = OpCall(BATCH_NORM, args, {}, node.call.inputs, node.call.outputs[:1])
        return replace(node, call=made, outputs=node.outputs[:1])
    return node


def _with(call: OpCall, name: str, value: Any) -> OpCall:
    """Return the call with another value of an argument."""
    if name in call.kwargs:
        return replace(call, kwargs={**call.kwargs, name: value})
    schema: Any = getattr(call.target, "_schema")  # noqa: B009 - a callable, for the type checker
    index = [one.name for one in schema.arguments].index(name)
    return replace(call, args=(*call.args[:index], value, *call.args[index + 1 :]))


def _told(graph: Graph) -> Iterator[tuple[Any, ...]]:
    """Give the operators that are of use, in order, and then what is returned and updated."""
    known: dict[Value, Any] = {}
    needed, count = _needed(graph), itertools.count()
    for node in graph.nodes.values():
        if node.call is None:
            known[Value(node.name)] = (node.kind, node.source, _numbers(graph.constants.get(node.source)))
        elif node.name in needed:
            given = {name: value for name, value in arguments(node.call).items() if name != "cudnn_enabled"}
            if node.call.name.split(".")[1] in DROPOUT and not given["train"]:
                known[Value(node.name)] = known[node.inputs[0]]
                continue
            number = next(count)
            known |= {Value(node.name, index): (number, index) for index in range(len(node.outputs))}
            read = [known[value] for value in node.inputs]
            yield node.call.name, node.module, pytree.tree_map(lambda leaf: _read(leaf, read), given)  # noqa: B023
    yield "its end", pytree.tree_map(lambda leaf: known.get(leaf, leaf), graph.outputs)
    yield "updates", {name: known[value] for name, value in graph.updates.items()}


def _numbers(constant: Any) -> str:
    """Return what tells a constant tensor from others."""
    if not isinstance(constant, torch.Tensor):
        return ""
    held = constant.detach().cpu().contiguous()
    numbers = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return f"{held.dtype} {list(held.shape)} {hashlib.sha256(numbers).hexdigest()}"


def _read(leaf: Any, read: Sequence[Any]) -> Any:
    return read[leaf.index] if isinstance(leaf, Ref) else leaf


def _needed(graph: Graph) -> set[str]:
    """Return the nodes of which what is returned or updated is made."""
    found: set[str] = set()
    waiting = [value.node for value in graph.kept]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [value.node for value in graph.nodes[name].inputs]
    return found
