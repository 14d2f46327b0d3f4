"""Plan found degrees for the whole model: the search prices a folded graph, and memory stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.planner.propagate import MemoryLimitError
from ascend_parallel.text import size_of
from ascend_parallel.training.degrees.search import SearchResult
from ascend_parallel.training.explain import fullest_rank
from ascend_parallel.training.loss import Loss, trace_with_loss
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import plan_training


@dataclass(frozen=True)
class ConfirmedCandidate:
    """The first of the best candidates whose whole plan keeps the limit.

    place
        Its index among the best.
    memory
        Bytes of parameters, gradients, optimizer and activations of the rank that holds the most.
    too_large
        The same of the candidates before it.
    """

    place: int
    memory: float
    too_large: tuple[float, ...]


class TracedByRows:
    """Graphs of one model and loss; micro-batches of the same shapes, with parameters of the same dtypes, share one."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[tuple[tuple[torch.Size, torch.dtype], ...], Graph] = {}

    def __call__(self, model: nn.Module, loss: Loss, batch: Sequence[Any]) -> Graph:
        """Return the graph; of the model in another dtype it is another."""
        tensors = (*model.parameters(), *(value for value in batch if isinstance(value, torch.Tensor)))
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._known:
            self._known[key] = trace_with_loss(model, loss, batch)
        return self._known[key]


def planned_whole(found: SearchResult, model: nn.Module, batch: Sequence[Any], loss: Loss) -> ConfirmedCandidate:
    """Plan the best candidates, the fastest first, until one keeps the limit; raises `MemoryLimitError` if none does.

    Raises as `plan_training` too.
    """
    sizes, traced = list[float](), TracedByRows()
    for place, candidate in enumerate(found.best):
        strategy = Strategy.from_dict(found.tables(candidate))
        size = fullest_rank(plan_training(strategy, model, batch, loss, trace_step=traced)).total
        if size <= found.limit:
            return ConfirmedCandidate(place, size, tuple(sizes))
        sizes.append(size)
    raise MemoryLimitError(
        f"memory={size_of(found.limit)}: the whole plans of the {len(sizes)} best need {size_of(min(sizes))} a rank "
        "and more; give less memory to the search, so that it finds smaller ones"
    )
