"""One eager forward of a planned model: the model's own code runs, each of its calls as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, FunctionCall, Node, ParameterRef, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.sharding.rules import run_local
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent, op_collective_event
from ascend_parallel.sharding.runtime.eager_state import Eager
from ascend_parallel.sharding.runtime.op_collectives import all_reducer
from ascend_parallel.sharding.runtime.planned_dtensor import LOOKS, Activation, Local
from ascend_parallel.sharding.runtime.redistribute_autograd import convert
from ascend_parallel.sharding.tracing.function_calls import name_of

CURE = "control flow and arguments have to be as traced: trace the model again as it is to run"


class Following(TorchFunctionMode):
    """Around one forward: holds each call against the traced one, and runs that one's operators on local tensors."""

    def __init__(self, eager: Eager, held: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers by the first of their names."""
        super().__init__()
        self._eager, self._plan, self._held = eager, eager.plan, held
        self._names = {id(tensor): ParameterRef(name) for name, tensor in held.items()}
        self._given: dict[str, Local] = {}  # parameters, buffers and constants read so far, by node
        self._updates: dict[Value, torch.Tensor] = {}
        self._next = 0
        self._again = -1  # the call that ran again last
        self._stream = eager.randomness.begin()

    def inputs(self, given: Mapping[str, torch.Tensor]) -> list[Activation]:
        """Return the tensors given for input nodes as the forward gets them."""
        return [self._shown(self._input(name, tensor)) for name, tensor in given.items()]

    def outputs(self, returned: Any) -> Any:
        """Return what the forward returned as the caller gets it."""
        if self._next < len(self._eager.calls):
            raise ValueError(f"{self._place()}: the forward ended where it called {self._traced()}; {CURE}")
        leaves, spec = pytree.tree_flatten(returned)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in pytree.tree_leaves(self._plan.graph.outputs) if isinstance(leaf, Value)]
        if len(tensors) != len(wanted) or not all(map(self._same, tensors, wanted)):
            raise ValueError(f"the forward returns other tensors than when it was traced; {CURE}")
        return pytree.tree_unflatten([self._returned(leaf) for leaf in leaves], spec)

    def updates(self) -> dict[Value, torch.Tensor]:
        """Return the new values of buffers that the forward wrote."""
        return self._updates

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what the plan has in place of a call."""
        if function in LOOKS:
            return function(*args, **(kwargs or {}))
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        call = self._eager.calls[self._next] if self._next < len(self._eager.calls) else None
        if call is not None and self._is(call, function, leaves, spec):
            self._next += 1
            return self._run(call, leaves)
        if not any(isinstance(leaf, Activation) or id(leaf) in self._names for leaf in leaves):
            return function(*args, **(kwargs or {}))  # on what is not the model's: a hook's own
        raise ValueError(
            f"{self._place()}: the forward calls {_shown_call(function, leaves)}; when it was traced there was "
            f"{self._traced()}. {CURE}"
        )

    def again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one of the forward's calls once more, as torch.utils.checkpoint does in backward."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        values = tuple(leaf.local.value for leaf in leaves if isinstance(leaf, Activation))
        calls = self._eager.calls
        found = self._eager.by_values.get((function, values), ())
        found = [
            place for place in found if self._is(calls[place], function, leaves, spec) and not calls[place].changed
        ]
        if len(found) > 1 and self._again + 1 in found:
            found = [self._again + 1]
        if len(found) == 1:
            (self._again,) = found
            return self._run(calls[self._again], leaves)
        if found:
            raise ValueError(
                f"{_shown_call(function, leaves)}: the forward calls this {len(found)} times, and which of them "
                "torch.utils.checkpoint runs again cannot be told; parallelize(..., static=True) recomputes by itself"
            )
        raise ValueError(
            f"{_shown_call(function, leaves)}: a tensor of a parallelized model's forward is computed with there only, "
            "as was traced. To look at it take x.to_local() or x.full_tensor() under torch.no_grad(); what you go on "
            "with the model has to return"
        )

    def _is(self, call: FunctionCall, function: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> bool:
        same = function == call.function and spec == call.arguments_spec
        return same and all(map(self._same, leaves, call.arguments))

    def _same(self, found: Any, traced: Any) -> bool:
        """Tell whether an argument is what it was when the model was traced."""
        if isinstance(found, Activation):
            return found.run is self and found.local.value == traced
        if isinstance(found, torch.Tensor):
            return id(found) in self._names and self._names[id(found)] == traced
        if isinstance(found, torch.device):  # each rank's own
            return isinstance(traced, torch.device)
        return type(found) is type(traced) and bool(found == traced or (found != found and traced != traced))

    def _run(self, call: FunctionCall, leaves: list[Any]) -> Any:
        given = {leaf.local.value: leaf for leaf in leaves if isinstance(leaf, Activation)}
        locals_ = {value: leaf.local for value, leaf in given.items()}
        for node in call.nodes:
            for index, output in enumerate(self._operator(node, locals_)):
                value = Value(node.name, index)
                locals_[value] = Local(value, output)
                if value in self._eager.updated:
                    self._updates[value] = output

        results = [self._result(leaf, given, locals_) for leaf in call.results]
        for result, argument in call.changed.items():
            results[result] = leaves[argument].become(results[result])
        return pytree.tree_unflatten(results, call.results_spec)

    def _result(self, leaf: Any, given: Mapping[Value, Activation], locals_: Mapping[Value, Local]) -> Any:
        if isinstance(leaf, ParameterRef):
            return self._held[leaf.name]
        if not isinstance(leaf, Value):
            return leaf
        return given[leaf] if leaf in given else self._shown(locals_[leaf])

    def _operator(self, node: Node, locals_: Mapping[Value, Local]) -> tuple[torch.Tensor, ...]:
        assert node.call is not None
        plan = self._plan
        inputs = [
            self._read(node, locals_.get(value) or self._given_local(value), target)
            for value, target in zip(node.inputs, plan.inputs[node.name], strict=True)
        ]
        outputs = [plan.layouts[Value(node.name, index)] for index in range(len(node.outputs))]
        mesh, ran = plan.mesh, self._eager.collective_counts

        def count(direction: str, step: RedistributeStep) -> None:
            ran[op_collective_event(node, mesh, step)] += 1

        all_reduce, stream = all_reducer(mesh, plan.costs, count), f"{self._stream}/{node.name}"
        wants, place = plan.inputs[node.name], self._eager.coordinate
        return run_local(node.call, inputs, wants, outputs, mesh.shape, place, all_reduce, stream)

    def _read(self, node: Node, local: Local, target: Layout) -> torch.Tensor:
        """Return a tensor in the layout in which a node reads it, by way of that in which all its readers find it."""
        value, plan = local.value, self._plan
        tensor, at = local.tensor, plan.layouts[value]
        if value in plan.shared_layouts:
            if local.shared is None:
                module = plan.graph.nodes[value.node].module
                local.shared = self._convert(tensor, value, "shared", module, at, plan.shared_layouts[value])
            tensor, at = local.shared, plan.shared_layouts[value]
        return self._convert(tensor, value, node.name, node.module, at, target)

    def _given_local(self, value: Value) -> Local:
        """Return the rank's part of a parameter, buffer or constant: of each one, so that gradients meet there."""
        node = self._plan.graph.nodes[value.node]
        assert node.kind not in (CALL, INPUT), f"{node.name} is not there"
        if node.name not in self._given:
            is_constant = node.kind == CONSTANT
            local = self._eager.constants[node.name] if is_constant else self._eager.part(node, self._held)
            self._given[node.name] = Local(value, local)
        return self._given[node.name]

    def _input(self, name: str, tensor: torch.Tensor) -> Local:
        value = Value(name)
        if not self._eager.local_inputs:
            whole = (REPLICATE,) * self._plan.mesh.ndim
            tensor = self._convert(tensor, value, name, "", whole, self._plan.layouts[value])
        return Local(value, tensor)

    def _shown(self, local: Local) -> Activation:
        meta, layout = self._plan.graph.meta(local.value), self._plan.layouts[local.value]
        return Activation.of(self, local, meta, layout, self._plan.mesh.device_mesh())

    def _returned(self, leaf: Any) -> Any:
        if isinstance(leaf, Activation):
            local, value = leaf.local.tensor, leaf.local.value
            return self._convert(local, value, "", "", self._plan.layouts[value], self._plan.returned_layout(value))
        return leaf

    def _convert(
        self, local: torch.Tensor, value: Value, reader: str, module: str, source: Layout, target: Layout
    ) -> torch.Tensor:
        mesh, ran = self._plan.mesh, self._eager.collective_counts

        def count(direction: str, step: RedistributeStep) -> None:
            ran[CollectiveEvent(step.kind, mesh.dim_names[step.mesh_dim], module, value, reader, direction)] += 1

        return convert(local, self._plan.graph.meta(value).shape, mesh, source, target, self._plan.costs, count)

    def _place(self) -> str:
        """Return the path of the module that was to go on."""
        calls = self._eager.calls
        near = (node.module for call in (*calls[self._next :], *reversed(calls)) for node in call.nodes)
        return next(near, "") or "the model"

    def _traced(self) -> str:
        calls = self._eager.calls
        return (
            _shown_call(calls[self._next].function, calls[self._next].arguments)
            if self._next < len(calls)
            else "no more"
        )


def _shown_call(function: Callable[..., Any], leaves: Sequence[Any]) -> str:
    return f"{name_of(function)}({', '.join(map(_shown, leaves))})"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Activation):
        return leaf.local.value.node
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {list(leaf.shape)}"
    if isinstance(leaf, Value):
        return leaf.node
    return leaf.name if isinstance(leaf, ParameterRef) else repr(leaf)
