"""One eager forward of a planned model: the model's own Python runs, and the plan lays out each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CONSTANT, FunctionCall, ParameterRef, Value
from ascend_parallel.sharding.runtime.compute_instructions import RunKernel
from ascend_parallel.sharding.runtime.eager_program import CallRegisters, LocalTensors
from ascend_parallel.sharding.runtime.eager_state import EagerState
from ascend_parallel.sharding.runtime.instructions import Step
from ascend_parallel.sharding.runtime.planned_dtensor import LocalActivation, PlannedDTensor
from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS, name_of
from ascend_parallel.sharding.tracing.model_files import calling_line

RETRACE_HINT = "control flow and arguments have to be as traced: trace the model again as it is to run"


class EagerForward(TorchFunctionMode):
    """A torch function mode around one forward.

    It compares each call with the traced call and runs the traced call's operators on local tensors.
    """

    def __init__(self, eager: EagerState, model: torch.nn.Module) -> None:
        """Take the model's parameters and buffers; a tied tensor by the first of its names."""
        super().__init__()
        held = eager.held(model)
        self._eager, self._model, self._plan, self._held = eager, model, eager.plan, held
        self._names = {id(tensor): ref for ref, tensor in held.items()}
        self._program, self._step = eager.program, Step(self, eager.randomness.begin())
        self._read: dict[Value, LocalTensors] = {}  # parameters, buffers and constants read so far
        self._updates: dict[Value, LocalTensors] = {}  # the new values of buffers
        self._ahead: dict[Value, LocalTensors] = {}  # what a kernel computed for the calls to come
        self._handles: WeakValueDictionary[Value, PlannedDTensor] = WeakValueDictionary()  # the model's own tensors
        self._next = 0
        self._rerun = -1  # the call that ran a second time last

    def inputs(self, tensors: Mapping[str, torch.Tensor]) -> list[PlannedDTensor]:
        """Return the arguments of the model's forward for the tensors of the input nodes."""
        found = []
        for (name, tensor), register in zip(tensors.items(), self._program.inputs, strict=True):
            value, registers = Value(name), self._registers({})
            registers[register] = tensor
            assert registers[self._program.own[value]] is not None
            found.append(self._planned_dtensor(value, registers.tensors[value]))
        return found

    def outputs(self, returned: Any) -> Any:
        """Convert the tensors that the forward returned to the layouts that the caller gets."""
        if self._next < len(self._eager.calls):
            raise ValueError(f"{self._place()}: the forward ended where it called {self._traced()}; {RETRACE_HINT}")
        leaves, spec = pytree.tree_flatten(returned)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        traced = self._plan.graph.returned
        if len(tensors) != len(traced) or not all(map(self._is_same, tensors, traced)):
            raise ValueError(f"the forward returns other tensors than when it was traced; {RETRACE_HINT}")
        registers = iter(self._program.outputs)
        given = [self._returned(leaf, next(registers)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(given, spec)

    def store_updates(self) -> None:
        """Write the values that the forward computed for buffers, such as running statistics."""
        registers = self._registers(self._updates)
        for store in self._program.stores:
            store.run(registers, self._step)

    def local_tensor(self, name: str) -> torch.Tensor:
        """Return the rank's part of a parameter, buffer or constant by its node; its readers add their gradients."""
        node = self._plan.graph.nodes[name]
        return self._eager.constants[name] if node.kind == CONSTANT else self._eager.part(node, self._held)

    def write_buffer(self, name: str, value: torch.Tensor) -> None:
        """Write a buffer: a new tensor, because autograd may have saved the old one for backward."""
        path, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(path)
        old = getattr(owner, leaf)
        setattr(owner, leaf, DTensor(value.clone(), old._spec, requires_grad=False))  # type: ignore[no-untyped-call]

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
            return self._run(self._next - 1, matching)
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
            return self._run(self._rerun, leaves)
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

        def gathered_leaf(leaf: DTensor) -> torch.Tensor:
            tensor = leaf.run.gathered(leaf.local) if isinstance(leaf, PlannedDTensor) else leaf.full_tensor()
            gathered.append((tensor, tensor._version))
            return tensor

        args, kwargs = pytree.tree_map_only(DTensor, gathered_leaf, (args, dict(kwargs)))
        result = function(*args, **kwargs)
        if any(tensor._version != version for tensor, version in gathered):
            raise ValueError(
                f"{name_of(function)} writes to a tensor of a parallelized model's forward, and did not when it was "
                "traced: write to a copy (x.detach().clone())"
            )
        return result

    def gathered(self, local: LocalActivation) -> torch.Tensor:
        """Return a copy of the whole tensor of an activation, without a gradient; every rank calls it."""
        gather, tensor = self._eager.gathering(local.value), local.tensor.detach()
        with torch.no_grad():
            return (tensor if gather is None else gather(tensor)).clone()

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
        if isinstance(argument, PlannedDTensor):
            return argument.run is self and argument.local.value == traced
        if isinstance(argument, torch.Tensor):
            return id(argument) in self._names and self._names[id(argument)] == traced
        if isinstance(argument, torch.device):  # each rank's own
            return isinstance(traced, torch.device)
        if type(argument) is not type(traced):
            return False
        return bool(argument == traced or (argument != argument and traced != traced))  # NaN equals NaN

    def _registers(self, tensors: Mapping[Value, LocalTensors]) -> CallRegisters:
        return CallRegisters(self._program, self._step, tensors, self._read)

    def _run(self, number: int, leaves: list[Any]) -> Any:
        """Run a call's instructions on its arguments; a call that runs a second time has registers of its own."""
        call = self._eager.calls[number]
        planned = {leaf.local.value: leaf for leaf in leaves if isinstance(leaf, PlannedDTensor)}
        moved = {value: self._handles[value] for value in call.moved if value in self._handles}
        registers = self._registers(
            {value: each.local.tensors for value, each in (planned | moved).items()}
            | {value: self._updates[value] for value in call.stored_before}
        )
        for instruction in self._program.calls[number]:
            if isinstance(instruction, RunKernel):
                self._run_kernel(instruction, registers, call)
            else:
                instruction.run(registers, self._step)
        if self._eager.updated:
            self._updates |= {
                value: registers.tensors[value] for value in self._eager.updated & registers.tensors.keys()
            }
        results = [self._result(leaf, planned, registers.tensors) for leaf in call.results]
        for result, argument in call.changed.items():
            results[result] = leaves[argument].become(results[result])
            self._handles[results[result].local.value] = results[result]
        for before, after in call.moved.items():
            if (handle := self._handles.get(before)) is not None:
                self._handles[after] = handle.become(self._planned_dtensor(after, registers.tensors[after]))
        return results[0] if call.has_single_result else pytree.tree_unflatten(results, call.results_spec)

    def _run_kernel(self, kernel: RunKernel, registers: CallRegisters, call: FunctionCall) -> None:
        """Run the matmuls of one or several calls at the first of them; the others take what it computed for them."""
        values = [self._program.registers[register].value for register in kernel.writes]
        nodes = {node.name for node in call.nodes}
        mine = [value for value in values if value.node in nodes]
        if all(value in self._ahead for value in mine):
            registers.tensors |= {value: self._ahead.pop(value) for value in mine}
            return
        kernel.run(registers, self._step)
        self._ahead |= {value: registers.tensors[value] for value in values if value not in mine}

    def _result(self, leaf: Any, planned: Mapping[Value, PlannedDTensor], tensors: Mapping[Value, LocalTensors]) -> Any:
        if isinstance(leaf, ParameterRef):
            return self._held[leaf]
        if not isinstance(leaf, Value):
            return leaf
        return planned[leaf] if leaf in planned else self._planned_dtensor(leaf, tensors[leaf])

    def _planned_dtensor(self, value: Value, tensors: LocalTensors) -> PlannedDTensor:
        local = LocalActivation(value, self._program.own[value], tensors)
        handle = self._handles[value] = PlannedDTensor.of(self, local, self._eager.spec(value))
        return handle

    def _returned(self, leaf: torch.Tensor, register: int) -> torch.Tensor:
        """Return a tensor that the forward returned in the layout that the caller gets."""
        if not isinstance(leaf, PlannedDTensor):
            return leaf
        return self._registers({leaf.local.value: leaf.local.tensors})[register]

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
