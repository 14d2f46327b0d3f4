"""shard_layer and shard_optimizer: turn a module's parameters and an optimizer's state into DTensors, as in Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.marked.call import run_function
from ascend_parallel.sharding.marked.dtensors import shard_tensor
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.reshard import Mesh, reshard


class PropagatedFunctions(TorchFunctionMode):
    """Runs functions of DTensors by `run_function`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function."""
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return run_function(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def propagate_functions(layer: nn.Module) -> None:
    """Run the forwards of `layer` under `PropagatedFunctions`, while its parameters are DTensors."""
    running: list[PropagatedFunctions | None] = []

    def enter(module: nn.Module, _: Any) -> None:
        marked = any(isinstance(tensor, DTensor) for tensor in (*module.parameters(), *module.buffers()))
        mode = PropagatedFunctions() if marked and not any(running) else None
        running.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        mode = running.pop() if running else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    layer.register_forward_pre_hook(enter, prepend=True)
    layer.register_forward_hook(leave, always_call=True)


STAGE = "_ascend_parallel_stage"
ShardLayer = Callable[[str, nn.Module, ProcessMesh], None]
ShardState = Callable[[nn.Parameter], Sequence[Placement] | None]


def shard_layer(
    layer: nn.Module,
    mesh: Mesh,
    shard_fn: ShardLayer | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> nn.Module:
    """Replace all parameters and buffers of `layer` by DTensors, in place, and return `layer`.

    shard_fn
        Called with (path, module, mesh) for `layer` and each module in it: replaces the parameters that it knows by
        ``shard_tensor(...)``. All others are replicated. A tied parameter stays tied, whichever of its names is marked.
    input_fn, output_fn
        Called with (tuple of inputs, mesh) before each forward, and with (output, mesh) after it; return the
        replacement.

    In its forwards a plain tensor that meets a DTensor, such as positions or a mask that the code makes, is taken as
    replicated; `ValueError` on every rank if its values are not the same on all ranks. Raises `ValueError` for a tied
    parameter whose names are marked differently.
    """
    process_mesh = ProcessMesh.of(mesh)
    names_of_tensors = _names_of_tensors(layer)
    for path, module in list(layer.named_modules()) if shard_fn is not None else ():
        assert shard_fn is not None
        shard_fn(path, module, process_mesh)
    for names in names_of_tensors:
        _tie(names)
    for names in _names_of_tensors(layer):
        if not isinstance(names[0].tensor, DTensor):
            replicated = shard_tensor(names[0].tensor, process_mesh, [Replicate()] * process_mesh.ndim)
            for name in names:
                name.table[name.key] = replicated
    propagate_functions(layer)
    if input_fn is not None:
        layer.register_forward_pre_hook(lambda _, inputs: input_fn(inputs, process_mesh))
    if output_fn is not None:
        layer.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, process_mesh))
    return layer


@dataclass(frozen=True)
class _TensorName:
    """A name of a parameter or buffer: `key` in a table of one module."""

    path: str
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """The tensor that has the name now; None for none."""
        return self.table.get(self.key)


def _names_of_tensors(layer: nn.Module) -> list[list[_TensorName]]:
    """Return all names of each parameter and buffer; a tied one has several."""
    names: dict[int, list[_TensorName]] = {}
    for path, module in layer.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(_TensorName(f"{path}.{key}".removeprefix("."), table, key))
    return list(names.values())


def _tie(names: Sequence[_TensorName]) -> None:
    """Give all names of a tensor the DTensor that one of them was marked with."""
    marked = [name for name in names if isinstance(name.tensor, DTensor)]
    if len({(name.tensor.device_mesh, name.tensor.placements) for name in marked}) > 1:
        shown = "; ".join(f"{name.path} {list(name.tensor.placements)}" for name in marked)
        raise ValueError(f"one tied parameter has several marks ({shown}): mark one of its names, or all alike")
    for name in names if marked else ():
        name.table[name.key] = marked[0].tensor


def shard_optimizer(
    optimizer: torch.optim.Optimizer, shard_fn: ShardState | None = None, gradient_accumulation_steps: int = 1
) -> torch.optim.Optimizer:
    """Set the placements of the optimizer's state, and return the optimizer; call it before the first step.

    shard_fn
        Called with each parameter, a DTensor: returns the placements of its state, or None for the parameter's own
        placements (the default). With other placements, every step updates only this rank's part of the parameter and
        then gathers the parameter: ZeRO stage 1.

    gradient_accumulation_steps
        How many backwards add up before a step: `ShardingStage2` reduces and cuts gradients after the last alone, which
        sends less and holds whole gradients in between.

    `ShardingStage2` and `ShardingStage3` also cut gradients, and parameters, at this call.

    Each step first reduces partial gradients, once. Raises `ValueError` for an optimizer that has stepped, and for a
    parameter that is no DTensor.
    """
    if type(gradient_accumulation_steps) is not int or gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps!r}: give a number of backwards")
    if has_stepped(optimizer):
        raise ValueError("the optimizer has stepped: call shard_optimizer before the first step")
    placements: dict[nn.Parameter, Sequence[Placement]] = {}
    parameters: list[nn.Parameter] = [each for group in optimizer.param_groups for each in group["params"]]
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor):
            raise ValueError(f"parameter {index} of shape {list(parameter.shape)} is no DTensor: use shard_layer first")
        placements[parameter] = (shard_fn(parameter) if shard_fn is not None else None) or parameter.placements
    if isinstance(shard_fn, ShardingStage1):
        unsharded = {parameter: _placements(parameter) for parameter in placements}
        setattr(optimizer, STAGE, OptimizerStage(shard_fn.stage, shard_fn.dim_name, unsharded))
        shard_fn.apply(placements, gradient_accumulation_steps)
    for parameter, placed in placements.items():  # a state before the first step is Adagrad's
        state = optimizer.state.get(parameter, {})
        state |= {key: _at(value, placed) for key, value in state.items() if isinstance(value, DTensor)}
    step = ShardedStep(optimizer, placements)
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)
    return optimizer


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer has made a step; Adagrad's state is there before."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


@torch.no_grad()
def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clip the gradients of marked parameters to [-clip_value, clip_value], in place; every rank calls it.

    As torch.nn.utils.clip_grad_value_, which refuses partial sums: these are summed first, once.
    """
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            summed = _at(parameter.grad, _placements(parameter)) if isinstance(parameter.grad, DTensor) else None
            parameter.grad = (parameter.grad if summed is None else summed).clamp_(-clip_value, clip_value)


class ShardingStage1:
    """A `shard_fn` of `shard_optimizer`: shards along a mesh dimension the state of parameters replicated there."""

    stage = 1

    def __init__(self, dim_name: str, mesh: Mesh | None = None) -> None:
        """Take the mesh dimension's name, such as "dp"; `mesh`: of parameters on this mesh alone."""
        self.dim_name = dim_name
        self.mesh = None if mesh is None else ProcessMesh.of(mesh)
        if self.mesh is not None:
            self.mesh.dim(dim_name)

    def apply(self, placements: Mapping[nn.Parameter, Sequence[Placement]], backwards: int = 1) -> None:
        """Cut what the stage cuts besides the state; `placements` are those of each parameter's state.

        backwards: gradients of so many backwards add up before they are cut.
        """

    def __call__(self, parameter: nn.Parameter) -> Sequence[Placement] | None:
        """Return the state's placements, sharded along the first tensor dimension that is unsharded and long enough."""
        assert isinstance(parameter, DTensor)
        mesh = ProcessMesh.of(parameter.device_mesh)
        if self.mesh not in (None, mesh):
            return None
        dim = mesh.dim(self.dim_name)
        placements = list(parameter.placements)
        cut = [placement.dim for placement in placements if isinstance(placement, Shard)]
        free = [index for index, size in enumerate(parameter.shape) if index not in cut and size >= mesh.shape[dim]]
        if not placements[dim].is_replicate() or not free:
            return None
        placements[dim] = Shard(free[0])
        return placements


class ShardingStage2(ShardingStage1):
    """Shards gradients too: each backward reduces a parameter's gradient to the rank's part."""

    stage = 2

    def apply(self, placements: Mapping[nn.Parameter, Sequence[Placement]], backwards: int = 1) -> None:
        """Set a hook on each parameter."""
        for parameter, placed in placements.items():
            if parameter.requires_grad:
                cut = _GradientCut(placed, backwards)
                parameter.register_post_accumulate_grad_hook(cut)  # type: ignore[no-untyped-call]


class ShardingStage3(ShardingStage2):
    """Shards parameters too: each parameter is held in the placement of its state, and gathered where it is read."""

    stage = 3

    @torch.no_grad()
    def apply(self, placements: Mapping[nn.Parameter, Sequence[Placement]], backwards: int = 1) -> None:
        """Replace the parameters' parts in place; the parameters stay the same objects."""
        for parameter, placed in placements.items():
            if tuple(placed) != _placements(parameter):
                part = nn.Parameter(_at(parameter, placed), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, part)  # type: ignore[no-untyped-call]
        super().apply(placements, backwards)


@dataclass(frozen=True)
class OptimizerStage:
    """What `shard_optimizer` recorded on an optimizer: the ZeRO stage, its mesh dimension, the placements before it."""

    stage: int
    dim_name: str
    placements: Mapping[nn.Parameter, tuple[Placement, ...]]


def optimizer_stage(optimizer: torch.optim.Optimizer) -> OptimizerStage | None:
    """Return the stage that `shard_optimizer` gave an optimizer; None for none."""
    return getattr(optimizer, STAGE, None)


class _GradientCut:
    """A hook that reduces and cuts a parameter's gradient after the last of several backwards."""

    def __init__(self, placements: Sequence[Placement], backwards: int) -> None:
        self._placements, self._backwards, self._seen = placements, backwards, 0

    @torch.no_grad()
    def __call__(self, parameter: torch.Tensor) -> None:
        self._seen = (self._seen + 1) % self._backwards
        if self._seen == 0 and parameter.grad is not None:
            parameter.grad = _at(parameter.grad, self._placements)


class ShardedStep:
    """Swaps the optimizer's parameters for this rank's parts during a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, placements: dict[nn.Parameter, Sequence[Placement]]) -> None:
        """Take the placements of each parameter's state."""
        self._placements = placements
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self._optimizer = optimizer

    @torch.no_grad()
    def before(self, *_: object) -> None:
        """Reduce the gradients, and replace parameters and gradients by this rank's parts."""
        for parameter, placements in self._placements.items():
            if parameter.grad is None:
                continue
            gradient = _at(parameter.grad, placements)
            if tuple(placements) == _placements(parameter):
                parameter.grad = gradient
            else:
                part = nn.Parameter(_at(parameter, placements), parameter.requires_grad)
                part.grad = gradient
                self._parts[parameter] = part
        self._swap(self._parts)

    @torch.no_grad()
    def after(self, *_: object) -> None:
        """Gather the updated parts into the parameters."""
        for parameter, part in self._parts.items():
            parameter.copy_(_at(part, _placements(parameter)))
        self._swap({part: parameter for parameter, part in self._parts.items()})
        self._parts = {}

    def _swap(self, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
        for parameter, replacement in replacements.items():
            if parameter in self._optimizer.state:
                self._optimizer.state[replacement] = self._optimizer.state.pop(parameter)


def _at(tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    """Return the detached DTensor with these placements on its mesh."""
    assert isinstance(tensor, DTensor)
    return reshard(cast(DTensor, tensor.detach()), tensor.device_mesh, placements)


def _placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    assert isinstance(tensor, DTensor)
    return tensor.placements
