"""One eager forward of a planned model: the model's own Python runs, and the plan lays out each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, FunctionCall, ParameterRef, Value
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.runtime.eager_state import Conversion, EagerState
from ascend_parallel.sharding.runtime.planned_dtensor import LocalActivation, PlannedDTensor
from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS, name_of
from ascend_parallel.sharding.tracing.model_files import calling_line

RETRACE_HINT = "control flow and arguments have to be as traced: trace the model again as it is to run"


class EagerForward(TorchFunctionMode):
    """A torch function mode around one forward.

    It compares each call with the traced call and runs the traced call's operators on local tensors.
    """

    def __init__(self, eager: EagerState, held: Mapping[ParameterRef, torch.Tensor]) -> None:
        """Take parameters and buffers; a tied tensor by the first of its names."""
        super().__init__()
        self._eager, self._plan, self._held = eager, eager.plan, held
        self._names = {id(tensor): ref for ref, tensor in held.items()}
        self._parameters: dict[str, LocalActivation] = {}  # parameters, buffers and constants read so far, by node
        self._updates: dict[Value, torch.Tensor] = {}
        self._handles: WeakValueDictionary[Value, PlannedDTensor] = WeakValueDictionary()  # the model's own tensors
        self._next = 0
        self._rerun = -1  # the call that ran a second time last
        self._stream = eager.randomness.begin()

    def inputs(self, tensors: Mapping[str, torch.Tensor]) -> list[PlannedDTensor]:
        """Return the arguments of the model's forward for the tensors of the input nodes."""
        return [self._planned_dtensor(self._input(name, tensor)) for name, tensor in tensors.items()]

    def outputs(self, returned: Any) -> Any:
        """Convert the tensors that the forward returned to the layouts that the caller gets."""
        if self._next < len(self._eager.calls):
            raise ValueError(f"{self._place()}: the forward ended where it called {self._traced()}; {RETRACE_HINT}")
        leaves, spec = pytree.tree_flatten(returned)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        traced = self._plan.graph.returned
        if len(tensors) != len(traced) or not all(map(self._is_same, tensors, traced)):
            raise ValueError(f"the forward returns other tensors than when it was traced; {RETRACE_HINT}")
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
        """Run the plan's operators in place of a call."""
        if function in METADATA_FUNCTIONS:
            return function(*args, **(kwargs or {}))
        call = self._eager.calls[self._next] if self._next < len(self._eager.calls) else None
        matching = None if call is None else self._matching(call, function, args, kwargs or {})
        if call is not None and matching is not None:
            self._next += 1
            return self._run(call, matching)
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if not any(isinstance(leaf, PlannedDTensor) or id(leaf) in self._names for leaf in leaves):
            return function(*args, **(kwargs or {}))  # no tensor of the model: a hook's own computation
        if not torch.is_grad_enabled():
            return self.inspect(function, args, kwargs or {})
        raise ValueError(
            f"{calling_line(2)}: {self._place()}: the forward calls {_call_text(function, leaves)}; when it was traced "
            f"there was {self._traced()}. {RETRACE_HINT}"
        )

    def rerun(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one of the forward's calls a second time, as torch.utils.checkpoint does in backward."""
        leaves, calls = pytree.tree_leaves((args, kwargs)), self._eager.calls
        values = tuple(leaf.local.value for leaf in leaves if isinstance(leaf, PlannedDTensor))
        same = self._eager.by_values.get((function, values), ())
        places = [place for place in same if self._matching(calls[place], function, args, kwargs) is not None]
        places = [place for place in places if not calls[place].changed and not calls[place].moved]
        if len(places) > 1 and self._rerun + 1 in places:
            places = [self._rerun + 1]
        if len(places) == 1:
            (self._rerun,) = places
            return self._run(calls[self._rerun], leaves)
        if places:
            raise ValueError(
                f"{_call_text(function, leaves)}: the forward calls this {len(places)} times, and which call "
                "torch.utils.checkpoint runs again is ambiguous: use ShardedModule(...) with recompute"
            )
        if not torch.is_grad_enabled():
            return self.inspect(function, args, kwargs)
        raise ValueError(
            f"{_call_text(function, leaves)}: a tensor of a parallelized model's forward can be used only in that "
            "forward, as traced. To look at the tensor, compute under torch.no_grad(), or take x.to_local() or "
            "x.full_tensor() there; to compute with it return it from the model"
        )

    def inspect(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that the forward did not call, under torch.no_grad, on gathered tensors: every rank calls it.

        What it returns is no tensor of the forward, and the forward refuses it. Raises `ValueError` for a function that
        writes to a tensor of the forward.
        """
        gathered: list[tuple[torch.Tensor, int]] = []

        def whole(leaf: DTensor) -> torch.Tensor:
            tensor = leaf.run.gathered(leaf.local) if isinstance(leaf, PlannedDTensor) else leaf.full_tensor()
            gathered.append((tensor, tensor._version))
            return tensor

        args, kwargs = pytree.tree_map_only(DTensor, whole, (args, dict(kwargs)))
        result = function(*args, **kwargs)
        if any(tensor._version != version for tensor, version in gathered):
            raise ValueError(
                f"{name_of(function)} writes to a tensor of a parallelized model's forward, and did not when it was "
                "traced: write to a copy (x.detach().clone())"
            )
        return result

    def gathered(self, local: LocalActivation) -> torch.Tensor:
        """Return a copy of the whole tensor of an activation, without a gradient; every rank calls it."""
        whole = (REPLICATE,) * self._plan.mesh.ndim
        with torch.no_grad():
            tensor = local.tensor.detach()
            return self._redistributed(tensor, local.value, self._plan.layouts[local.value], whole).clone()

    def _matching(
        self, call: FunctionCall, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        """Return the arguments without their nesting if the call is as it was traced, else None."""
        if function != call.function:
            return None
        if call.is_flat:
            leaves, same = [*args, *kwargs.values()], (len(args), tuple(kwargs)) == (call.positional, call.keywords)
        else:
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
            same = spec == call.arguments_spec
        return leaves if same and all(map(self._is_same, leaves, call.arguments)) else None

    def _is_same(self, argument: Any, traced: Any) -> bool:
        """Tell whether an argument is the same as in the traced call."""
        if isinstance(argument, PlannedDTensor):
            return argument.run is self and argument.local.value == traced
        if isinstance(argument, torch.Tensor):
            return id(argument) in self._names and self._names[id(argument)] == traced
        if isinstance(argument, torch.device):  # each rank's own
            return isinstance(traced, torch.device)
        if type(argument) is not type(traced):
            return False
        return bool(argument == traced or (argument != argument and traced != traced))  # NaN equals NaN

    def _run(self, call: FunctionCall, leaves: list[Any]) -> Any:
        planned = {leaf.local.value: leaf for leaf in leaves if isinstance(leaf, PlannedDTensor)}
        locals_ = {value: leaf.local for value, leaf in planned.items()}
        for node in call.nodes:
            operator = self._eager.operator(node)
            inputs = [self._read(each, locals_.get(each.value)) for each in operator.conversions]
            for value, output in zip(operator.values, operator.run.compute(inputs, self._stream), strict=True):
                locals_[value] = LocalActivation(value, output)
                if value in self._eager.updated:
                    self._updates[value] = output
        results = [self._result(leaf, planned, locals_) for leaf in call.results]
        for result, argument in call.changed.items():
            results[result] = leaves[argument].become(results[result])
            self._handles[results[result].local.value] = results[result]
        for before, after in call.moved.items():
            if (handle := self._handles.get(before)) is not None:
                self._handles[after] = handle.become(self._planned_dtensor(locals_[after]))
        return results[0] if call.has_single_result else pytree.tree_unflatten(results, call.results_spec)

    def _result(
        self, leaf: Any, planned: Mapping[Value, PlannedDTensor], locals_: Mapping[Value, LocalActivation]
    ) -> Any:
        if isinstance(leaf, ParameterRef):
            return self._held[leaf]
        if not isinstance(leaf, Value):
            return leaf
        return planned[leaf] if leaf in planned else self._planned_dtensor(locals_[leaf])

    def _read(self, conversion: Conversion, local: LocalActivation | None) -> torch.Tensor:
        """Return a tensor in the layout in which an operator reads it, through its shared layout if it has one."""
        handle = self._handles.get(conversion.value) if local is None else None
        local = local or (self._parameter(conversion.value) if handle is None else handle.local)
        tensor = local.tensor
        if conversion.shared is not None:
            if local.shared is None:
                local.shared = conversion.shared(tensor)
            tensor = local.shared
        return tensor if conversion.own is None else conversion.own(tensor)

    def _parameter(self, value: Value) -> LocalActivation:
        """Return the rank's part of a parameter, buffer or constant; all readers share it and add their gradients."""
        node = self._plan.graph.nodes[value.node]
        assert node.kind not in (CALL, INPUT), f"{node.name} has not run"
        if node.name not in self._parameters:
            is_constant = node.kind == CONSTANT
            local = self._eager.constants[node.name] if is_constant else self._eager.part(node, self._held)
            self._parameters[node.name] = LocalActivation(value, local)
        return self._parameters[node.name]

    def _input(self, name: str, tensor: torch.Tensor) -> LocalActivation:
        value = Value(name)
        if not self._eager.local_inputs:
            whole = (REPLICATE,) * self._plan.mesh.ndim
            tensor = self._redistributed(tensor, value, whole, self._plan.layouts[value])
        return LocalActivation(value, tensor)

    def _planned_dtensor(self, local: LocalActivation) -> PlannedDTensor:
        handle = self._handles[local.value] = PlannedDTensor.of(self, local, self._eager.spec(local.value))
        return handle

    def _returned(self, leaf: Any) -> Any:
        if not isinstance(leaf, PlannedDTensor):
            return leaf
        value, plan = leaf.local.value, self._plan
        return self._redistributed(leaf.local.tensor, value, plan.layouts[value], plan.returned_layout(value))

    def _redistributed(self, tensor: torch.Tensor, value: Value, source: Layout, target: Layout) -> torch.Tensor:
        redistribution = self._eager.redistribution(value, source, target)
        return tensor if redistribution is None else redistribution(tensor)

    def _place(self) -> str:
        """Return the path of the module that the next traced call is in."""
        calls = self._eager.calls
        near = (node.module for call in (*calls[self._next :], *reversed(calls)) for node in call.nodes)
        return next(near, "") or "the model"

    def _traced(self) -> str:
        if self._next == len(self._eager.calls):
            return "no more"
        call = self._eager.calls[self._next]
        return _call_text(call.function, call.arguments)


def _call_text(function: Callable[..., Any], leaves: Sequence[Any]) -> str:
    return f"{name_of(function)}({', '.join(map(_argument_text, leaves))})"


def _argument_text(leaf: Any) -> str:
    if isinstance(leaf, PlannedDTensor):
        return leaf.local.value.node
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {list(leaf.shape)}"
    if isinstance(leaf, Value):
        return leaf.node
    return leaf.name if isinstance(leaf, ParameterRef) else repr(leaf)
