"""Copies of a block's nodes in torch.export's tracer, with their metadata; see `replay.py`."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.tracing.block_keys import UnknownValueError, key_of_tensor
from ascend_parallel.sharding.tracing.block_results import Memory
from ascend_parallel.sharding.tracing.strategy_marks import KEY

STACK = "nn_module_stack"
# Metadata that a copy gets anew. `seq_nr` counts autograd's operators, and nothing here reads it.
OWN_META = ("val", STACK, "torch_fn", "seq_nr")
KNOWN_META = (*OWN_META, "original_aten", "custom", "stack_trace", "tensor_meta")


@dataclass(frozen=True)
class Counts:
    """How often a tracer has met each torch function, and each module by its path."""

    functions: Mapping[Any, int]
    modules: Mapping[str, int]

    @classmethod
    def of(cls, tracer: Any) -> Counts:
        """Return the counts so far."""
        return cls(dict(tracer.torch_fn_counts), dict(tracer.num_calls))

    def since(self, before: Counts) -> Counts:
        """Return what was counted since."""
        functions = {key: n - before.functions.get(key, 0) for key, n in self.functions.items()}
        modules = {key: n - before.modules.get(key, 0) for key, n in self.modules.items()}
        return Counts({key: n for key, n in functions.items() if n}, {key: n for key, n in modules.items() if n})

    def below(self, prefix: str) -> dict[str, int]:
        """Return the counts of a block's modules, by their paths in the block."""
        return {key.removeprefix(prefix): n for key, n in self.modules.items()}


@dataclass(frozen=True)
class Surroundings:
    """Where the tracer is when a block runs.

    prefix, stack
        The block's path, and the modules around the nodes, the block the last.
    names
        {name and class of a torch function: how often the tracer had met it before the block}.
    """

    prefix: str
    stack: Mapping[str, Any]
    names: Mapping[tuple[str, str], int]

    @classmethod
    def of(cls, tracer: Any, before: Counts | None = None) -> Surroundings:
        """Return where the tracer is; raise `UnknownValueError` outside of modules."""
        if not tracer.module_stack:
            raise UnknownValueError("a block outside of the model")
        stack = {key: (path, _name_of_class(kind)) for key, (path, kind) in tracer.module_stack.items()}
        functions = before.functions if before is not None else {}
        return cls(list(stack.values())[-1][0], stack, {_name(key): n for key, n in functions.items()})

    def advance(self, tracer: Any, counts: Counts, recorded: Surroundings) -> None:
        """Count the functions and modules of a block that was repeated here."""
        for function, count in counts.functions.items():
            tracer.torch_fn_counts[function] = tracer.torch_fn_counts.get(function, 0) + count
        for path, count in counts.modules.items():
            own = self.prefix + path.removeprefix(recorded.prefix)
            tracer.num_calls[own] = tracer.num_calls.get(own, 0) + count


def check_nodes(nodes: Sequence[Node], inputs: Mapping[Node, int], around: Surroundings, counts: Counts) -> None:
    """Raise `UnknownValueError` for nodes that cannot be copied."""
    known = {*inputs, *nodes}
    named = {_base_of(node.meta["torch_fn"]) for node in nodes if "torch_fn" in node.meta}
    if any(count > 1 for name, count in Counter(map(_name, counts.functions)).items() if name in named):
        raise UnknownValueError("functions of the same name")
    if not all(path.startswith(f"{around.prefix}.") for path in counts.modules):
        raise UnknownValueError("a module from outside of the block")
    for node in nodes:
        own = list(node.meta.get(STACK, {}).items())
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise UnknownValueError(f"{node.target}, which is no operator")
        if writes or not known.issuperset(node.all_input_nodes):
            raise UnknownValueError(f"{node.target} that writes, or reads from outside of the block")
        if unknown := {*node.meta} - {*KNOWN_META}:
            raise UnknownValueError(f"{node.target} with {unknown}")
        if own[: len(around.stack)] != list(around.stack.items()) or any("@" in key for key, _ in own):
            raise UnknownValueError("a module that runs twice, or from outside of the block")
        for value in pytree.tree_leaves(node.meta.get("val")):
            if type(value) is not FakeTensor:
                raise UnknownValueError(f"{node.target}, whose result is no tensor")
            key_of_tensor(value, {})


def copied(
    node: Node, nodes: Mapping[Node, Node], tracer: Any, memory: Memory, places: tuple[Surroundings, Surroundings]
) -> Node:
    """Append the copy of a node to the tracer's graph; `nodes` are the copies so far."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), nodes.__getitem__)
    hint = None
    if isinstance(node.target, torch._ops.OpOverload):
        hint = tracer.graph._target_to_str(node.target.overloadpacket.__name__)
    copy: Node = tracer.graph.create_node("call_function", node.target, args, kwargs, hint)
    then, now = places
    copy.meta = dict(node.meta)
    copy.meta["val"] = pytree.tree_map_only(FakeTensor, memory.like, node.meta["val"])
    own = list(node.meta[STACK].items())[len(then.stack) :]
    copy.meta[STACK] = OrderedDict(now.stack)
    for key, (path, kind) in own:
        copy.meta[STACK][now.prefix + key.removeprefix(then.prefix)] = (
            now.prefix + path.removeprefix(then.prefix),
            kind,
        )
    if "torch_fn" in node.meta:
        copy.meta["torch_fn"] = _counted(node.meta["torch_fn"], then, now)
    return copy


def form_of(nodes: Sequence[Node], inputs: Mapping[Node, int], around: Surroundings) -> list[Any]:
    """Return nodes in a form that is equal for blocks that did the same."""
    places: dict[Node, Any] = {node: f"node {place}" for place, node in enumerate(nodes)}
    places |= {node: f"input {number}" for node, number in inputs.items()}
    known: dict[int, int] = {}
    forms = []
    for node in nodes:
        own = list(node.meta[STACK].items())[len(around.stack) :]
        stack = [(key.removeprefix(around.prefix), path.removeprefix(around.prefix), kind) for key, (path, kind) in own]
        values = [key_of_tensor(value, known)[:-2] for value in pytree.tree_leaves(node.meta["val"])]
        others = [repr(node.meta.get(key)) for key in ("stack_trace", "tensor_meta", "original_aten")]
        others.append(repr((node.meta.get("custom") or {}).get(KEY)))
        arguments = repr(map_arg((node.args, dict(node.kwargs)), places.__getitem__))
        function = node.meta.get("torch_fn") and _counted(node.meta["torch_fn"], around, None)
        forms.append((node.target, arguments, stack, values, others, function))
    return forms


def _counted(name: tuple[str, str], then: Surroundings, now: Surroundings | None) -> tuple[str, str]:
    """Return the metadata `torch_fn`, such as ("linear_6", ...), with the number that the function has elsewhere."""
    key, number = _base_of(name), name[0].rpartition("_")[2]
    moved = int(number) - then.names.get(key, 0) + (now.names.get(key, 0) if now is not None else 0)
    return f"{key[0]}_{moved}", name[1]


def _base_of(name: tuple[str, str]) -> tuple[str, str]:
    return name[0].rpartition("_")[0], name[1]


def _name(function: Any) -> tuple[str, str]:
    return function.__name__, f"{type(function).__name__}.{function.__name__}"


def _name_of_class(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
