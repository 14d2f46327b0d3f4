"""The parameters that an optimizer updates: this rank's shard of each, and the ranks that hold the same shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer.partition import ShardBounds

if TYPE_CHECKING:
    from ascend_parallel.sharding.runtime.sharded_module import ShardedModule


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter as this rank holds it.

    name
        Its name in the whole model.
    parameter
        This rank's shard of the parameter.
    shard
        Where this shard lies in the whole parameter.
    replicas
        The ranks that hold the same shard and share its update; None: this rank updates it alone.
    copies
        How many ranks of the job hold the same shard, whether they share its update or not.
    """

    name: str
    parameter: torch.nn.Parameter
    shard: TensorShard
    replicas: dist.ProcessGroup | None = None
    copies: int = 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The replicas' group if it has more than 1 rank, else None."""
        return self.replicas if self.replicas is not None and self.replicas.size() > 1 else None


def data_parallel_targets(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> list[OwnedParameter]:
    """Return the targets of a model that every rank of `group` (None: all ranks), and no other rank, holds whole."""
    group = group or dist.group.WORLD
    copies = 1 if group is None else group.size()
    return [
        OwnedParameter(name, param, TensorShard.whole(param.data), group, copies)
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


def module_targets(
    module: ShardedModule, dim: str | None = "dp", *, meshes: Mapping[str, int] | None = None
) -> list[OwnedParameter]:
    """Return the targets of this rank's part of a planned model.

    dim
        The mesh dimension whose ranks share the update of parameters that are not cut along it; None: no sharing.
    meshes
        By parameter name, on how many meshes of a pipeline the parameter lies, where that is more than 1.
    """
    mesh, held, shards = module.plan.mesh, module.held, module.tensor_shards()
    index = None if dim is None else mesh.dim(dim)
    found = []
    for name, param in trained_parameters(module, module.plan).items():
        layout = held[name].layout
        replicated = [size for size, placement in zip(mesh.shape, layout, strict=True) if placement.kind != "shard"]
        shared = index is not None and layout[index].kind != "shard"
        group = mesh.group(index) if shared and index is not None else None
        copies = prod(replicated) * (meshes or {}).get(name, 1)
        found.append(OwnedParameter(name, param, shards[name], group, copies))
    return found


def trained_parameters(module: torch.nn.Module, plan: ShardingPlan) -> dict[str, torch.nn.Parameter]:
    """Return, by name, the parameters that require grad and that an operator of the plan reads: these get gradients."""
    sources = (node.source for node in plan.graph.nodes.values() if node.kind == PARAMETER)
    read = set(map(module.get_parameter, sources))
    return {name: param for name, param in module.named_parameters() if param.requires_grad and param in read}


class OwnedShard:
    """The part of a target that this rank updates.

    inner
        What the inner optimizer updates: a view of the parameter, or a copy in another dtype (master weights).
    num_owners
        How many ranks of the job update the same part.
    """

    def __init__(
        self, target: OwnedParameter, bounds: ShardBounds, num_owners: int, master_dtype: torch.dtype | None
    ) -> None:
        """Take the bounds within the target; make master weights if `master_dtype` is not the parameter's dtype."""
        self.target, self.bounds, self.num_owners = target, bounds, num_owners
        self._is_whole = bounds.shape == tuple(target.parameter.shape)
        view = self.view
        self.is_master = master_dtype is not None and view.dtype != master_dtype
        self.inner = view.to(master_dtype, copy=True) if self.is_master else view
        self._wide_sum: torch.Tensor | None = None
        self.done()

    @property
    def view(self) -> torch.Tensor:
        """The view of the parameter inside the bounds."""
        return self.bounds.of(self.target.parameter.detach())

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the owned part starts in the whole parameter."""
        return tuple(a + b for a, b in zip(self.target.shard.offsets, self.bounds.offsets, strict=True))

    def refresh(self) -> None:
        """Read the parameter again if anything but `write_back` has changed it (loaded, moved) since `done`."""
        parameter = self.target.parameter
        if self._seen_version == (parameter.data_ptr(), parameter._version):
            return
        if self.is_master:
            self.inner.copy_(self.view)
        else:
            self.inner.data = self.view
        self.done()

    def done(self) -> None:
        """Record the parameter's current memory and version."""
        parameter = self.target.parameter
        self._seen_version = parameter.data_ptr(), parameter._version

    def take(self, gradient: torch.Tensor) -> None:
        """Set the inner optimizer's gradient to this part of the parameter's gradient."""
        part = gradient.detach() if self._is_whole else self.bounds.of(gradient.detach())
        self.inner.grad = part if part.dtype == self.inner.dtype else part.to(self.inner.dtype)

    def accumulate(self, summed: torch.Tensor) -> None:
        """Add to the gradient, in the dtype of the first sum; `settle` gives the total to the inner optimizer."""
        if summed.dtype != self.inner.dtype:
            self._wide_sum = summed if self._wide_sum is None else self._wide_sum.add_(summed)
        elif self.inner.grad is None:
            self.inner.grad = summed
        else:
            self.inner.grad += summed

    def settle(self) -> None:
        """Give the accumulated sum to the inner optimizer."""
        if self._wide_sum is not None:
            self.inner.grad, self._wide_sum = self._wide_sum.to(self.inner.dtype), None

    def drop(self) -> None:
        """Drop the gradient."""
        self.inner.grad = self._wide_sum = None

    def write_back(self) -> None:
        """Copy the master weights into the parameter."""
        if self.is_master:
            self.view.copy_(self.inner)
