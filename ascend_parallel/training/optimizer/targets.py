"""What is optimized: a rank's parameters, where they lie in the whole ones, and which ranks hold the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer.partition import ShardBounds

if TYPE_CHECKING:
    from ascend_parallel.sharding.runtime.sharded_module import ShardedModule


@dataclass(frozen=True)
class Target:
    """A parameter as this rank has it.

    name
        In the whole model.
    parameter
        This rank's part of it.
    piece
        Where that lies in the whole.
    replicas
        The ranks that hold the same part and share its update; None: this rank updates it alone.
    copies
        How many ranks of the job hold the same part, whether they share its update or not.
    """

    name: str
    parameter: torch.nn.Parameter
    piece: TensorShard
    replicas: dist.ProcessGroup | None = None
    copies: int = 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The replicas, if they are several."""
        return self.replicas if self.replicas is not None and self.replicas.size() > 1 else None


def data_parallel_targets(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> list[Target]:
    """Return targets for a model that is whole on every rank of `group` (None: of all), and on no others."""
    group = group or dist.group.WORLD
    copies = 1 if group is None else group.size()
    return [
        Target(name, one, TensorShard(one.data, tuple(one.shape), (0,) * one.ndim), group, copies)
        for name, one in model.named_parameters()
        if one.requires_grad
    ]


def module_targets(
    module: ShardedModule, dim: str | None = "dp", *, meshes: Mapping[str, int] | None = None
) -> list[Target]:
    """Return targets for a rank's part of a planned model.

    dim
        The mesh dimension whose ranks share the update of what is whole on it; None: nobody shares.
    meshes
        On how many meshes of a pipeline a parameter is, by name, where that is more than one.
    """
    mesh, held, pieces = module.plan.mesh, module.held, module.pieces()
    index = None if dim is None else mesh.dim(dim)
    given = (node.source for node in module.plan.graph.nodes.values() if node.kind == PARAMETER)
    read = set(map(module.get_parameter, given))  # the others have no gradient
    found = []
    for name, one in module.named_parameters():
        if one.requires_grad and one in read:
            whole = [size for size, state in zip(mesh.shape, held[name].layout, strict=True) if state.kind != "shard"]
            shared = index is not None and held[name].layout[index].kind != "shard"
            group = mesh.group(index) if shared and index is not None else None
            found.append(Target(name, one, pieces[name], group, prod(whole) * (meshes or {}).get(name, 1)))
    return found


class Owned:
    """The box of a target that this rank updates.

    inner
        What the optimizer updates: a view of the parameter, or a copy of another dtype (master weights).
    held_by
        How many ranks of the job update the same box.
    """

    def __init__(self, target: Target, box: ShardBounds, held_by: int, master_dtype: torch.dtype | None) -> None:
        """Take the box, and its master weights if `master_dtype` is another than the parameter's."""
        self.target, self.box, self.held_by = target, box, held_by
        view = self.view
        self.is_master = master_dtype is not None and view.dtype != master_dtype
        self.inner = view.to(master_dtype, copy=True) if self.is_master else view
        self._seen = self._state()
        self._wide: torch.Tensor | None = None

    @property
    def view(self) -> torch.Tensor:
        """The box of the parameter."""
        return self.box.of(self.target.parameter.detach())

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the box starts in the whole parameter."""
        return tuple(a + b for a, b in zip(self.target.piece.offsets, self.box.offsets, strict=True))

    def refresh(self) -> None:
        """Follow a parameter that was written by somebody else since `done`: loaded, moved."""
        if self._seen == self._state():
            return
        if self.is_master:
            self.inner.copy_(self.view)
        else:
            self.inner.data = self.view
        self.done()

    def done(self) -> None:
        """Remember the parameter as it is."""
        self._seen = self._state()

    def take(self, gradient: torch.Tensor) -> None:
        """Give the optimizer the box of the parameter's gradient."""
        self.inner.grad = self.box.of(gradient.detach()).to(self.inner.dtype)

    def accumulate(self, summed: torch.Tensor) -> None:
        """Add to the box of the gradient, in the dtype of the first sum; `settle` gives it to the optimizer."""
        if summed.dtype != self.inner.dtype:
            self._wide = summed if self._wide is None else self._wide.add_(summed)
        elif self.inner.grad is None:
            self.inner.grad = summed
        else:
            self.inner.grad += summed

    def settle(self) -> None:
        """Give the optimizer what was added up."""
        if self._wide is not None:
            self.inner.grad, self._wide = self._wide.to(self.inner.dtype), None

    def drop(self) -> None:
        """Forget the gradient."""
        self.inner.grad = self._wide = None

    def write_back(self) -> None:
        """Give the parameter its master weights."""
        if self.is_master:
            self.view.copy_(self.inner)

    def _state(self) -> tuple[int, int]:
        return self.target.parameter.data_ptr(), self.target.parameter._version
