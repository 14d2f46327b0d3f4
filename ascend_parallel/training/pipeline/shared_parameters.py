"""Parameters that several stages read, such as an embedding tied to the head; the copies' gradients are summed.

All terms are gathered and added in the order of the meshes, so the copies of a parameter stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.training.pipeline.groups import make_shared_groups
from ascend_parallel.training.pipeline.split_plan import StagePlan, shared_parameters


class SharedGradients:
    """Sums the gradients of parameters that this rank's stages share with other stages.

    due
        Whether a step has run since the last sum.
    meshes
        For each of this rank's shared parameters, the number of meshes that hold it.
    repeated
        Copies that an earlier stage of this rank holds too. They share its memory; only the earlier copy is updated.
    """

    def __init__(
        self,
        parts: Sequence[StagePlan],
        mesh_of_stage: Sequence[int],
        modules: Sequence[ShardedModule],
        meshes: Sequence[ProcessMesh],
        timeout: timedelta,
    ) -> None:
        """Take all stages, the index of each stage's mesh, and this rank's modules. Every rank must call it."""
        stages_by_name = shared_parameters(parts)
        self._holders = {
            name: tuple(sorted({mesh_of_stage[stage] for stage in stages})) for name, stages in stages_by_name.items()
        }
        several = [holders for holders in self._holders.values() if len(holders) > 1]
        self._groups = make_shared_groups(several, meshes, timeout)
        self._copies = {
            name: [module.get_parameter(name) for module in modules if name in module.held] for name in stages_by_name
        }
        for copies in self._copies.values():
            for copy in copies[1:]:
                copy.data = copies[0].data
        self.meshes = {copy: len(self._holders[name]) for name, copies in self._copies.items() for copy in copies}
        self.repeated = frozenset(copy for copies in self._copies.values() for copy in copies[1:])
        self.due = self._summed = False

    def check_cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise `RuntimeError` if a step would add to gradients that were summed."""
        if self._summed and any(parameter.grad is not None for parameter in parameters):
            raise RuntimeError(
                "the gradients are summed over ranks, and a step would add unsummed gradients to them: call "
                "zero_grad(set_to_none=True) before, or reduce_gradients() after the last of several steps"
            )
        self._summed = False

    def sum(self) -> None:
        """Give a rank's first copy the sum of all copies' gradients. Every rank must call it, after a step."""
        for name, copies in self._copies.items() if self.due else ():
            if not copies or not copies[0].requires_grad:
                continue
            own = _sum([_gradient(copy) for copy in copies])
            group = self._groups.get(self._holders[name])
            if group is not None:
                by_mesh = [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(by_mesh, own.contiguous(), group=group)
                own = _sum(by_mesh)
            for copy in copies:
                copy.grad = None
            copies[0].grad = own
        self.due, self._summed = False, True


def _gradient(copy: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, zeros if it has none."""
    return torch.zeros_like(copy, dtype=grad_dtype(copy)) if copy.grad is None else copy.grad


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
