"""What a training step needs of what runs forward and backward, and what all of those share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.pieces import Piece
from ascend_parallel.sharding.running.execute import ShardedModule
from ascend_parallel.strategy.optimizer.targets import Target
from ascend_parallel.strategy.planned import rows_of_part
from ascend_parallel.strategy.strategy import Strategy


class Runner(Protocol):
    """What a training step needs of it."""

    @property
    def unreduced(self) -> bool:
        """Whether the optimizer sums gradients over its replicas itself."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """This rank's part of the model."""

    def accumulate(self, batch: Sequence[Any], factor: float, last: bool) -> torch.Tensor:
        """Add the gradients of ``factor * loss``; return the loss. `last`: of the batches between two steps."""

    def finish(self) -> None:
        """Sum what has to be whole before the optimizer steps."""

    def targets(self) -> list[Target]:
        """Return this rank's parameters."""

    def pieces(self) -> dict[str, Piece]:
        """Return this rank's part of parameters and buffers."""


def part_of(one: Any, number: int, count: int) -> Any:
    """Return the `number`-th of `count` micro-batches of a batch's tensor."""
    if not isinstance(one, torch.Tensor) or count == 1:
        return one
    rows = rows_of_part(one, count)
    return one[number * rows : (number + 1) * rows]


def targets_of(
    modules: Sequence[ShardedModule], strategy: Strategy, mesh: ProcessMesh, holders: Mapping[str, int]
) -> list[Target]:
    """Return the parameters of a rank's modules; `holders` says how many stages hold one, if several."""
    found = []
    for module in modules:
        pieces = module.pieces()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                layout = module.held[name].layout
                whole = [dim for dim, state in zip(mesh.dim_names, layout, strict=True) if state.kind != "shard"]
                holds = holders.get(name, 1)
                found.append(target_of(name, parameter, pieces[name], whole, strategy, mesh, holds))
    return found


def target_of(
    name: str,
    parameter: nn.Parameter,
    piece: Piece,
    whole: Sequence[str],
    strategy: Strategy,
    mesh: ProcessMesh,
    holders: int = 1,
) -> Target:
    """Return a parameter that is whole on these mesh dimensions, and held by so many stages."""
    options = strategy.sharding
    replicas = mesh.group(options.dim) if options.level and options.dim in whole else None
    return Target(name, parameter, piece, replicas, prod(mesh.size(dim) for dim in whole) * holders)
