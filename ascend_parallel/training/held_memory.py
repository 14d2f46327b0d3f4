"""What a rank of each group holds in a step, as a table: with several stages on a rank, the sum over its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_parallel.text import equal_runs, size_of
from ascend_parallel.training.optimizer.partition import OptimizerMemory
from ascend_parallel.training.pipeline.schedule import most_held
from ascend_parallel.training.pipeline.timing import SimulatedStep

HEADS = ("parameters", "gradients", "optimizer", "activations", "total")


@dataclass(frozen=True)
class Held:
    """The bytes that a rank holds of its stages, by name; `activations`: the most at once, of all micro-batches."""

    stages: tuple[str, ...]
    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def held_by_stage(stage: str, memory: OptimizerMemory, activations: float) -> Held:
    """Return what a rank holds that has one stage."""
    return Held((stage,), memory.parameters, memory.gradients, memory.optimizer, activations)


def held_by_groups(
    memory: Sequence[OptimizerMemory], saved: Mapping[int, float], simulated: SimulatedStep
) -> list[Held]:
    """Return what a rank of each group holds.

    memory: of each stage. saved: by stage, the bytes that a micro-batch's forward keeps for its backward.
    """
    found = []
    for slots in simulated.slots:
        stages = sorted({slot.action.stage for slot in slots})
        own = [memory[stage] for stage in stages]
        found.append(
            Held(
                tuple(map(str, stages)),
                sum(each.parameters for each in own),
                sum(each.gradients for each in own),
                sum(each.optimizer for each in own),
                most_held([slot.action for slot in slots], saved),
            )
        )
    return found


def table(helds: Sequence[Held]) -> Iterator[str]:
    """Yield the lines of a table; three or more equal ranks with one stage each, one after another, are a line."""
    rows = []
    for held in helds:
        sizes = held.parameters, held.gradients, held.optimizer, held.activations, held.total
        rows.append("".join(f"{size_of(size):>12}" for size in sizes))
    several = any(len(held.stages) > 1 for held in helds)
    named = [(", ".join(held.stages), row) for held, row in zip(helds, rows, strict=True)]
    if len(helds) > 1 and not several:
        named = equal_runs(rows)
    width = max(6, *(len(name) + 2 for name, _ in named))
    yield ("stages" if several else "stage").ljust(width) + "".join(f"{head:>12}" for head in HEADS)
    yield from (name.ljust(width) + row for name, row in named)
