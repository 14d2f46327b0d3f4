"""What a rank of each group holds in a step, as a table: with several stages on a rank, the sum over its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_parallel.sharding.rank_bytes import RankBytes
from ascend_parallel.text import equal_runs, size_of
from ascend_parallel.training.pipeline.schedule import most_held
from ascend_parallel.training.pipeline.timing import SimulatedStep

HEADS = ("parameters", "gradients", "optimizer", "activations", "total")


@dataclass(frozen=True)
class GroupMemory:
    """The bytes that each rank of a group holds of its stages, by name."""

    stages: tuple[str, ...]
    held: RankBytes


def memory_by_group(
    memory: Sequence[RankBytes], saved: Mapping[int, float], simulated: SimulatedStep
) -> list[GroupMemory]:
    """Return what a rank of each group holds.

    memory: of each stage, without activations. saved: by stage, the bytes that a micro-batch's forward keeps for its
    backward.
    """
    groups = []
    for slots in simulated.slots:
        actions = [slot.action for slot in slots]
        stages = sorted({action.stage for action in actions})
        activations = RankBytes(0, 0, 0, most_held(actions, saved))
        groups.append(GroupMemory(tuple(map(str, stages)), sum((memory[stage] for stage in stages), activations)))
    return groups


def table(groups: Sequence[GroupMemory]) -> Iterator[str]:
    """Yield the lines of a table; three or more equal ranks with one stage each, one after another, are a line."""
    rows = []
    for group in groups:
        sizes = (*group.held.without_buffers().values(), group.held.total)
        rows.append("".join(f"{size_of(size):>12}" for size in sizes))
    several = any(len(group.stages) > 1 for group in groups)
    named = [(", ".join(group.stages), row) for group, row in zip(groups, rows, strict=True)]
    if len(groups) > 1 and not several:
        named = equal_runs(rows)
    width = max(6, *(len(name) + 2 for name, _ in named))
    yield ("stages" if several else "stage").ljust(width) + "".join(f"{head:>12}" for head in HEADS)
    yield from (name.ljust(width) + row for name, row in named)
