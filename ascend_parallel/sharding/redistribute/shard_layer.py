"""shard_layer and shard_optimizer: a module's parameters and an optimizer's state as DTensors, as Paddle has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.reshard import Mesh, reshard, shard_tensor

ShardLayer = Callable[[str, nn.Module, ProcessMesh], None]
ShardState = Callable[[nn.Parameter], Sequence[Placement] | None]


def shard_layer(
    layer: nn.Module,
    mesh: Mesh,
    shard_fn: ShardLayer | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> nn.Module:
    """Make DTensors of all parameters and buffers of `layer`, in place, and return it.

    shard_fn
        Called with path, module and mesh for `layer` and each module in it: puts ``shard_tensor(...)`` in place of the
        parameters it knows. What it leaves is replicated.
    input_fn, output_fn
        Called with the tuple of inputs before each forward, and with the output after it; return what takes its place.
    """
    wanted = ProcessMesh.of(mesh)
    known: dict[int, Any] = {}  # a tied parameter stays tied
    modules = list(layer.named_modules())
    for path, module in modules if shard_fn is not None else ():
        assert shard_fn is not None
        shard_fn(path, module, wanted)
    for _, module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, DTensor):
                    if id(tensor) not in known:
                        known[id(tensor)] = tensor, shard_tensor(tensor, wanted, [Replicate()] * wanted.ndim)
                    tensors[name] = known[id(tensor)][1]
    if input_fn is not None:
        layer.register_forward_pre_hook(lambda _, inputs: input_fn(inputs, wanted))
    if output_fn is not None:
        layer.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, wanted))
    return layer


def shard_optimizer(optimizer: torch.optim.Optimizer, shard_fn: ShardState | None = None) -> torch.optim.Optimizer:
    """Decide where the optimizer's state lies, and return the optimizer; call it before the first step.

    shard_fn
        Called with each parameter, which is a DTensor: returns the placements of its state, or None for the
        parameter's own (so without shard_fn). With others, every step updates only these parts of the parameter and
        gathers it afterwards: ZeRO's first stage.

    Each step first reduces gradients that are still partial, once. Raises `ValueError` for an optimizer that has
    stepped, and for a parameter that is no DTensor.
    """
    if optimizer.state:
        raise ValueError("the optimizer has stepped: shard_optimizer has to be called before its state is made")
    placements: dict[nn.Parameter, Sequence[Placement]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        if not isinstance(parameter, DTensor):
            raise ValueError(f"parameter {index} of shape {list(parameter.shape)} is no DTensor: use shard_layer first")
        placements[parameter] = (shard_fn(parameter) if shard_fn is not None else None) or parameter.placements
    step = _ShardedStep(optimizer, placements)
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)
    return optimizer


class ShardingStage1:
    """For `shard_optimizer`: cuts the state of each parameter that is replicated along a mesh dimension along it."""

    def __init__(self, dim_name: str) -> None:
        """Take the mesh dimension's name, such as "dp"."""
        self._dim_name = dim_name

    def __call__(self, parameter: nn.Parameter) -> Sequence[Placement] | None:
        """Return the state's placements: cut along the first tensor dimension that is uncut and long enough."""
        assert isinstance(parameter, DTensor)
        mesh = ProcessMesh.of(parameter.device_mesh)
        dim = mesh.dim(self._dim_name)
        placements = list(parameter.placements)
        cut = [one.dim for one in placements if isinstance(one, Shard)]
        free = [index for index, size in enumerate(parameter.shape) if index not in cut and size >= mesh.shape[dim]]
        if not placements[dim].is_replicate() or not free:
            return None
        placements[dim] = Shard(free[0])
        return placements


class _ShardedStep:
    """Has the optimizer step on parts of its parameters, which take the parameters' places meanwhile."""

    def __init__(self, optimizer: torch.optim.Optimizer, placements: dict[nn.Parameter, Sequence[Placement]]) -> None:
        self._placements = placements
        self._parts: dict[nn.Parameter, nn.Parameter] = {}
        self._optimizer = optimizer

    @torch.no_grad()
    def before(self, *_: object) -> None:
        """Reduce gradients, and cut them and the parameters."""
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
        """Put the parameters together again."""
        for parameter, part in self._parts.items():
            parameter.copy_(_at(part, _placements(parameter)))
        self._swap({part: parameter for parameter, part in self._parts.items()})
        self._parts = {}

    def _swap(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
        for parameter, other in others.items():
            if parameter in self._optimizer.state:
                self._optimizer.state[other] = self._optimizer.state.pop(parameter)


def _at(tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor's values with these placements on its mesh."""
    assert isinstance(tensor, DTensor)
    return reshard(cast(DTensor, tensor.detach()), tensor.device_mesh, placements)


def _placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    assert isinstance(tensor, DTensor)
    return tensor.placements


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
