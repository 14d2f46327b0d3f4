"""Plan found degrees for the whole model: the search prices a folded graph, and memory stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ascend_parallel.sharding.planner.propagate import MemoryLimitError
from ascend_parallel.text import size_of
from ascend_parallel.training.degrees.search import Found
from ascend_parallel.training.explain import as_dict
from ascend_parallel.training.loss import Loss
from ascend_parallel.training.pipeline.schedule import stages_of
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.training_plan import TrainingPlan, plan_training

HELD = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Planned:
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


def planned_whole(found: Found, model: nn.Module, batch: Sequence[Any], loss: Loss) -> Planned:
    """Plan the best candidates, the fastest first, until one keeps the limit; raises `MemoryLimitError` if none does.

    Raises as `plan_training` too.
    """
    sizes: list[float] = []
    for place, candidate in enumerate(found.best):
        strategy = Strategy.from_dict(found.tables(candidate))
        size = most_held(plan_training(strategy, model, batch, loss))
        if size <= found.limit:
            return Planned(place, size, tuple(sizes))
        sizes.append(size)
    raise MemoryLimitError(
        f"memory={size_of(found.limit)}: the whole plans of the {len(sizes)} best need {size_of(min(sizes))} a rank "
        "and more; give less memory to the search, so that it finds smaller ones"
    )


def most_held(planned: TrainingPlan) -> float:
    """Return the bytes of the rank that holds the most, as `explain` counts them for each stage."""
    options, stages = planned.strategy.pipeline, as_dict(planned)["stages"]
    ranks = stages_of(options.schedule, options.degree, options.count) if planned.stages else (0,)
    by_rank: dict[int, float] = {}
    for rank, stage in zip(ranks, stages, strict=True):
        # A stage's activations are counted as if all stages of its rank were like it.
        held = sum(stage[name] for name in HELD) + stage["activations"] / options.virtual_stages
        by_rank[rank] = by_rank.get(rank, 0.0) + held
    return max(by_rank.values())
