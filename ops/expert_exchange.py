"""The operator of mixtures of experts: rows go to the ranks of their experts, through the experts, and back.

A rank has E of the experts. The exchange is cut by groups of a rank's experts, never by rows: group g's experts run
while group g + 1's rows are on their way to the experts and group g - 1's are on their way back. Each expert gets the
same rows in the same order as without a cut, so every bit stays.

    rank's rows [S, H]          sorted by expert: those of rank 0's first expert, of its second, ..., of rank 1's first
    dispatch                    all-to-all of a group's rows: [source][expert] on the rank of the experts
    experts                     computed by the caller, in place of a matmul
    combine                     all-to-all back to the places that the rows came from

The rows that a rank sends of a group are R slices, which are joined in a buffer; a single group sends all rows in
place. Beyond the serial path a rank holds the sent rows of the groups in flight, and those that come back.

The same function runs a layer's backward: gradients of the combined rows go to the experts, and come back as gradients
of the dispatched rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import FinishingWork
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.operators import in_timeline, log_once
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import EXPERT_EXCHANGE, experts_problem
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.registry import Choice, choose
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.settings import OperatorSettings

# Dispatches that are started before the experts of the first of them run. All at once would share a link, and the first
# group's rows would come as late as the last group's.
IN_FLIGHT = 2

COUNT, DISPATCH, COMBINE = "expert_counts", "expert_dispatch", "expert_combine"

Rows = Sequence[torch.Tensor]
"""Tensors with a row for each of the same rows: hidden states [n, H], probabilities [n], gradients of both."""


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


def exchange_choice(x: torch.Tensor, experts: int, group: dist.ProcessGroup, settings: OperatorSettings) -> Choice:
    """Return in how many groups of experts rows x [S, H] are exchanged: the same on every rank."""
    choice = choose(experts_problem(x, experts, group), settings)
    log_once(choice)
    return choice


def expert_exchange(
    rows: Rows,
    counts: RowCounts,
    experts: Experts,
    results: Rows,
    group: dist.ProcessGroup,
    choice: Choice,
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
    groups = counts.groups(choice.sizes)
    with in_timeline(choice, group):
        _Exchange(rows, groups, results, group).run(experts, under_first, under_last)
    COUNTS.add(EXPERT_EXCHANGE, len(groups), len(groups) * (len(rows) + len(results)))


class _Exchange:
    """The collectives of an exchange: of each group one for each tensor, to the experts and back."""

    def __init__(self, rows: Rows, groups: Sequence[ExpertGroup], results: Rows, group: dist.ProcessGroup) -> None:
        self._rows, self._groups, self._results, self._group = rows, groups, results, group
        self._dispatch = Pending(rows[0], DISPATCH, group, len(groups) * len(rows))
        self._combine = Pending(rows[0], COMBINE, group, len(groups) * len(results))
        self._received: list[Rows] = []

    def run(
        self, experts: Experts, under_first: Callable[[], object] | None, under_last: Callable[[], object] | None
    ) -> None:
        """Run the whole exchange; the order in which collectives start is the same on all ranks."""
        with self._dispatch.launching(), self._combine.launching():
            for expert_group in self._groups[:IN_FLIGHT]:
                self._send(expert_group)
            if under_first is not None:
                under_first()
            for index, expert_group in enumerate(self._groups):
                received = self._wait(index)
                if index + IN_FLIGHT < len(self._groups):
                    self._send(self._groups[index + IN_FLIGHT])
                computed = compute(MATMUL, "experts", experts, index, expert_group, received)
                self._send_back(expert_group, computed)
                del received, computed
            if under_last is not None:
                under_last()
            self._combine.wait()

    def _send(self, expert_group: ExpertGroup) -> None:
        received: list[torch.Tensor] = []
        sizes = expert_group.received_sizes, expert_group.sent_sizes
        for x in self._rows:
            sent = compute(BESIDE, "join rows", expert_group.join, x)
            out = x.new_empty(sum(sizes[0]), *x.shape[1:])
            self._dispatch.launch(all_to_all, out, sent, *sizes, self._group)
            received.append(out)
        self._received.append(received)

    def _wait(self, index: int) -> Rows:
        """Wait for a group's rows, and give them up."""
        for each in range(len(self._rows)):
            self._dispatch.wait_for(index * len(self._rows) + each)
        received, self._received[index] = self._received[index], ()
        return received

    def _send_back(self, expert_group: ExpertGroup, computed: Rows) -> None:
        for out, x in zip(computed, self._results, strict=True):
            self._combine.launch(_send_back, out.contiguous(), expert_group, x, self._group)


def _send_back(out: torch.Tensor, expert_group: ExpertGroup, x: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start the way back of a group's rows; `wait` copies them to their places in x."""
    sizes = expert_group.sent_sizes, expert_group.received_sizes
    if len(x) == sum(sizes[0]):
        return all_to_all(x, out, *sizes, group)
    came_back = x.new_empty(sum(sizes[0]), *x.shape[1:])
    work = all_to_all(came_back, out, *sizes, group)
    return FinishingWork([work], functools.partial(_place, expert_group, came_back, x), group, x)


def _place(expert_group: ExpertGroup, came_back: torch.Tensor, x: torch.Tensor) -> None:
    compute(BESIDE, "place rows", expert_group.place, came_back, x)


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


def all_to_all(
    out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Work:
    """Start ``out = all_to_all(x)``: contiguous rows, `sent` to each rank and `received` from each."""
    work: Work = dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
    return work
