"""The operator of mixtures of experts: rows go to the ranks of their experts, through the experts, and back.

A rank has E of the experts. The exchange (ops/part_exchange.py) is cut by groups of a rank's experts, never by rows.

    rank's rows [S, H]          sorted by expert: those of rank 0's first expert, of its second, ..., of rank 1's first
    dispatch                    all-to-all of a group's rows: [source][expert] on the rank of the experts
    experts                     computed by the caller, in place of a matmul
    combine                     all-to-all back to the places that the rows came from

The rows that a rank sends of a group are R slices, which are joined in a buffer; a single group sends all rows in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import EXPERT_EXCHANGE
from ascend_parallel.ops.decision import Decision
from ascend_parallel.ops.part_exchange import Rows, all_to_all, part_exchange
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.rows import Sizes

COUNT = "expert_counts"


@dataclass(frozen=True)
class RowCounts:
    """How many rows a rank sends to each expert of each rank, and how many its own experts get from each rank.

    sent      ``sent[rank][expert]``, for the local experts of each rank of the group
    received  ``received[rank][expert]``, for this rank's experts
    """

    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]

    def check(self, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Raise `ValueError` unless the counts fit the group and the rows to send."""
        shape = [len(counts) for counts in (self.sent, self.received)]
        if shape != [group.size()] * 2:
            raise ValueError(f"{EXPERT_EXCHANGE}: counts of {shape} ranks, and the group has {group.size()}")
        widths = {len(counts) for counts in (*self.sent, *self.received)}
        if len(widths) != 1:
            raise ValueError(
                f"{EXPERT_EXCHANGE}: counts of {sorted(widths)} experts; each rank has as many as the others"
            )
        total = sum(map(sum, self.sent))
        if rows.dim() != 2 or rows.shape[0] != total:
            raise ValueError(f"{EXPERT_EXCHANGE}: rows {list(rows.shape)}, and counts of {total} rows to send")

    @property
    def experts(self) -> int:
        """The number of experts on a rank."""
        return len(self.received[0])

    def groups(self, sizes: Sizes) -> list[ExpertGroup]:
        """Cut the experts of each rank into groups of `sizes` experts."""
        starts = list(accumulate(map(sum, self.sent), initial=0))
        groups = []
        for first, stop in pairwise(accumulate(sizes, initial=0)):
            places = []
            for start, counts in zip(starts, self.sent, strict=False):
                begin = start + sum(counts[:first])
                places.append(slice(begin, begin + sum(counts[first:stop])))
            received = tuple(tuple(counts[first:stop]) for counts in self.received)
            groups.append(ExpertGroup(range(first, stop), tuple(places), received))
        return groups


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of a rank whose rows are exchanged together.

    experts
        Their numbers on the rank.
    places
        For each rank of the process group, the rows of a tensor of all sent rows that this group sends to it.
    received
        ``received[rank][expert]``: the number of rows from each rank for each expert.
    """

    gathers: ClassVar[bool] = False  # each rank gets rows of its own

    experts: range
    places: tuple[slice, ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def sent_sizes(self) -> list[int]:
        """The rows that go to each rank."""
        return [place.stop - place.start for place in self.places]

    @property
    def received_sizes(self) -> list[int]:
        """The rows that come from each rank."""
        return [sum(counts) for counts in self.received]

    @property
    def expert_sizes(self) -> list[int]:
        """The rows that come for each expert."""
        return [sum(counts) for counts in zip(*self.received, strict=True)]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of the group, of a tensor of all sent rows, in a contiguous tensor."""
        if len(x) == sum(self.sent_sizes):
            return x.contiguous()
        return torch.cat([x[place] for place in self.places])

    def landing(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return where rows come back to: a tensor of all sent rows itself if they are all of the group."""
        rows = sum(self.sent_sizes)
        return x if len(x) == rows else x.new_empty(rows, *x.shape[1:])

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Copy rows that came back to their places in a tensor of all sent rows."""
        for place, part in zip(self.places, torch.split_with_sizes(came_back, self.sent_sizes), strict=True):
            x[place] = part

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that were received, [source][expert], in the order [expert][source]."""
        return _transposed(rows, self.received)

    def by_source(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the order [expert][source] in that of the rows that were received, [source][expert]."""
        return _transposed(rows, tuple(zip(*self.received, strict=True)))


def _transposed(rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return rows, ``counts[i][j]`` of each (i, j), sorted by j before i."""
    columns = len(counts[0])
    if 1 in (len(counts), columns):
        return rows
    parts = torch.split_with_sizes(rows, [count for row in counts for count in row])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


Experts = Callable[[int, ExpertGroup, Rows], Rows]
"""``experts(index, group, rows)`` computes a group, of the rows that it received, in the order [source][expert]."""


def expert_exchange(
    rows: Rows,
    counts: RowCounts,
    experts: Experts,
    results: Rows,
    group: dist.ProcessGroup,
    decision: Decision,
    *,
    under_first: Callable[[], object] | None = None,
    under_last: Callable[[], object] | None = None,
) -> None:
    """Send `rows` to the experts' ranks, run the experts, and write what comes back to `results`.

    rows      tensors of S rows, this rank's, sorted by the rank and the number of their expert
    results   tensors of S rows, one for each tensor that `experts` returns: written at the places of `rows`

    `under_first` runs while no expert can run yet, `under_last` while the last rows come back. Which of them there are,
    and the number of tensors, must be the same on all ranks; the number of rows need not be. Raises `CollectiveError`
    if a rank fails.
    """
    part_exchange(
        rows,
        counts.groups(decision.sizes),
        experts,
        results,
        group,
        decision,
        under_first=under_first,
        under_last=under_last,
    )


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, RowCounts]:
    """Return how many rows this rank's experts get from each rank, [R, E], and all counts on the host.

    counts  [R, E], of the rows to send

    An all-to-all of R x E integers, and a synchronisation of the host. Raises `CollectiveError` if a rank fails.
    """
    counts = counts.contiguous()
    received, each = torch.empty_like(counts), [1] * group.size()
    pending = Pending(received, COUNT, group)
    with pending.launching():
        pending.launch(all_to_all, received, counts, each, each, group)
    pending.wait()
    sent, came = torch.stack([counts, received]).tolist()
    return received, RowCounts(sent=sent, received=came)
