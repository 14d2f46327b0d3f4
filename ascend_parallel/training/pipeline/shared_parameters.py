"""Parameters that several stages read, such as an embedding tied to the head: held by each, their gradients summed.

All terms are gathered and added in the order of the meshes, so that copies of a parameter stay the same bit for bit.
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
from ascend_parallel.training.pipeline.groups import make_shared
from ascend_parallel.training.pipeline.split_plan import StagePlan, shared


class SharedGradients:
    """Sums the gradients of the parameters that this rank's stages share with others.

    due
        Whether a step was run since the last sum.
    meshes
        On how many meshes each of this rank's shared parameters is.
    repeated
        Those that an earlier stage of this rank has too; they share its memory, and only that one is updated.
    """

    def __init__(
        self,
        parts: Sequence[StagePlan],
        at: Sequence[int],
        modules: Sequence[ShardedModule],
        meshes: Sequence[ProcessMesh],
        timeout: timedelta,
    ) -> None:
        """Take all stages, the index of each one's mesh, and this rank's modules. Every rank has to call it."""
        found = shared(parts)
        self._holders = {name: tuple(sorted({at[stage] for stage in stages})) for name, stages in found.items()}
        self._groups = make_shared([one for one in self._holders.values() if len(one) > 1], meshes, timeout)
        self._copies = {
            name: [module.get_parameter(name) for module in modules if name in module.held] for name in found
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
                "the gradients are summed over ranks, to which a step would add some that are not: call "
                "zero_grad(set_to_none=True) before, or reduce_gradients() after the last of several steps"
            )
        self._summed = False

    def sum(self) -> None:
        """Give a rank's first copy the sum of all copies' gradients. Every rank has to call it, after a step."""
        for name, copies in self._copies.items() if self.due else ():
            if not copies or not copies[0].requires_grad:
                continue
            terms = [_term(copy) for copy in copies]
            own = _added(terms)
            group = self._groups.get(self._holders[name])
            if group is not None:
                of_meshes = [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(of_meshes, own.contiguous(), group=group)
                own = _added(of_meshes)
            for copy in copies:
                copy.grad = None
            copies[0].grad = own
        self.due, self._summed = False, True


def _term(copy: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter, zeros if it has none."""
    return torch.zeros_like(copy, dtype=grad_dtype(copy)) if copy.grad is None else copy.grad


def _added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
