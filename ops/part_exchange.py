"""The exchange around independent parts: parts go to the ranks that compute them, and their results come back.

Experts do not know of each other, and heads of attention do not: an exchange is cut by groups of such parts. Group g is
computed while group g + 1 is on its way to the ranks that compute it and the results of group g - 1 are on their way
back. Each part gets the same tensors in the same order as without a cut, so every bit stays.

    dispatch    a collective for each tensor of a group, to the ranks that compute its parts
    compute     of the group, by the caller, in place of a matmul
    combine     a collective for each result of the group, back to the ranks that asked for it

The same function runs forward and backward: gradients of the results take the route of the tensors, and gradients of
the tensors come back. A part may be wanted by all ranks: the dispatch is then a gather, and summands come back.
ops/expert_exchange.py, ops/head_exchange.py and ops/key_gather.py say what a group of theirs sends.

What a rank sends of a group is joined in a buffer; beyond the serial path a rank holds the buffers of the groups in
flight, and of those that come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import PART_NAMES
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Decision
from ascend_parallel.ops.operators import in_timeline
from ascend_parallel.ops.pending import IDLE_WORK, FinishingWork, Pending
from ascend_parallel.ops.record import BESIDE, MATMUL, compute

# Dispatches that are started before the first group is computed. All at once would share a link, and the first group
# would come as late as the last.
IN_FLIGHT = 2

Rows = Sequence[torch.Tensor]
"""Tensors of the same rows: hidden states and probabilities; queries, keys and values; gradients of them."""


class PartGroup(Protocol):
    """Parts that are exchanged together. Rows are counted along the first dimension of what is sent."""

    @property
    def gathers(self) -> bool:
        """Whether all ranks get all rows that `join` returns, not each rank its own of them."""

    @property
    def sent_sizes(self) -> list[int]:
        """The rows that go to each rank."""

    @property
    def received_sizes(self) -> list[int]:
        """The rows that come from each rank."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that the group sends, contiguous and sorted by rank."""

    def landing(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return where the group's part of the result x lands when it comes back: x, or a buffer for `place`.

        like: what is sent back from here, of which rows have the width and dtype.
        """

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Copy what came back to its place in x."""


class PartPiece(PartGroup, Protocol):
    """Some rows of a group's result, which come back by a collective of their own."""

    def piece_of(self, computed: torch.Tensor) -> torch.Tensor:
        """Return the rows of the result that go back."""


Group = TypeVar("Group", bound=PartGroup)

Route = Callable[[Group], PartGroup]
"""Returns how a tensor of a group travels, if not by the route of the group's other tensors."""


def own_route(part_group: Group) -> Group:
    """Return the group itself: its tensors travel as it says."""
    return part_group


def part_exchange(
    rows: Rows,
    groups: Sequence[Group],
    work: Callable[[int, Group, Rows], Rows],
    results: Rows,
    group: dist.ProcessGroup,
    decision: Decision,
    *,
    routes: Sequence[Route[Group]] = (),
    routes_back: Sequence[Route[Group]] = (),
    under_first: Callable[[], object] | None = None,
    under_last: Callable[[], object] | None = None,
    prepare: Callable[[torch.Tensor, Any], object] | None = None,
    last_pieces: Sequence[PartPiece] = (),
    as_pieces_come: Callable[[Pending], object] | None = None,
) -> None:
    """Send the parts of `rows` to their ranks, compute them there, and write what comes back to `results`.

    rows      tensors that each of `groups` takes its parts from; none if every rank has what it computes
    work      ``work(index, group, received)`` computes a group
    results   a tensor for each that `work` returns, written by the groups; none if results stay where they are
    routes      how each of `rows` travels, and `routes_back` each of `results`; none: as the groups say

    `under_first` runs while no group can run yet, `under_last` while the last results come back. Which of them there
    are, and the number of tensors, must be the same on all ranks; the number of rows need not be. Raises
    `CollectiveError` if a rank fails.

    prepare: ``prepare(x, group)`` makes a group's parts of one of `rows` before they are sent: those of later groups
    while a wait has nothing else to do. It may be called again.

    last_pieces: the last group's result, the only one, comes back in these, one after the other. All other results are
    there when `as_pieces_come` is called, which may wait for each piece.
    """
    exchange = _Exchange(rows, groups, results, group, decision, routes, routes_back, prepare, last_pieces)
    with in_timeline(decision, group):
        exchange.run(work, under_first, under_last, as_pieces_come)
    more = len(last_pieces) - 1 if last_pieces else 0
    COUNTS.add(decision.call.operator, len(groups), len(groups) * (len(rows) + len(results)) + more)


class _Exchange:
    """The collectives of an exchange: of each group one for each tensor, to the parts and back."""

    def __init__(
        self,
        rows: Rows,
        groups: Sequence[PartGroup],
        results: Rows,
        group: dist.ProcessGroup,
        decision: Decision,
        routes: Sequence[Route[Any]],
        routes_back: Sequence[Route[Any]],
        prepare: Callable[[torch.Tensor, Any], object] | None,
        last_pieces: Sequence[PartPiece],
    ) -> None:
        self._rows, self._groups, self._results, self._group = rows, groups, results, group
        self._routes = routes or [own_route] * len(rows)
        self._routes_back = routes_back or [own_route] * len(results)
        self._parts, names = PART_NAMES[decision.call.operator]
        like = (*rows, *results)[0]
        self._dispatch = Pending(like, f"{names}_dispatch", group, len(groups) * len(rows))
        whole = len(groups) * len(results) - bool(last_pieces)
        self._combine = Pending(like, f"{names}_combine", group, whole)
        self._last_pieces, sizes = last_pieces, tuple(piece.sent_sizes[0] for piece in last_pieces)
        self._pieces = Pending(like, f"{names}_combine", group, len(sizes), sizes)
        self._received: list[Rows] = []
        self._prepare = prepare

    def run(
        self,
        work: Callable[..., Rows],
        under_first: Callable[[], object] | None,
        under_last: Callable[[], object] | None,
        as_pieces_come: Callable[[Pending], object] | None,
    ) -> None:
        """Run the whole exchange; the order in which collectives start is the same on all ranks."""
        with self._dispatch.launching(), self._combine.launching(), self._pieces.launching(), self._preparing():
            for part_group in self._groups[:IN_FLIGHT]:
                self._send(part_group)
            if under_first is not None:
                under_first()
            for index, part_group in enumerate(self._groups):
                received = self._wait(index)
                if index + IN_FLIGHT < len(self._groups):
                    self._send(self._groups[index + IN_FLIGHT])
                computed = compute(MATMUL, self._parts, work, index, part_group, received)
                if self._last_pieces and index + 1 == len(self._groups):
                    self._send_pieces(*computed)
                else:
                    self._send_back(part_group, computed)
                del received, computed
            if under_last is not None:
                under_last()
            self._combine.wait()
            if as_pieces_come is not None:
                as_pieces_come(self._pieces)
            self._pieces.wait()

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Prepare the groups that are not sent at once, inside this context, while waits have nothing else to do."""
        later = [] if self._prepare is None else self._groups[IN_FLIGHT:]
        idle = [functools.partial(self._prepare_all, part_group) for part_group in later]
        IDLE_WORK.extend(idle)
        try:
            yield
        finally:
            for work in idle:
                with suppress(ValueError):  # a wait has run it
                    IDLE_WORK.remove(work)

    def _prepare_all(self, part_group: PartGroup) -> None:
        for x, route in zip(self._rows, self._routes, strict=True):
            assert self._prepare is not None
            self._prepare(x, route(part_group))

    def _send(self, part_group: PartGroup) -> None:
        received: list[torch.Tensor] = []
        for x, route in zip(self._rows, self._routes, strict=True):
            sending = route(part_group)
            if self._prepare is not None:
                self._prepare(x, sending)
            sizes = sending.received_sizes, sending.sent_sizes
            sent = compute(BESIDE, "join rows", sending.join, x)
            out = sent.new_empty(sum(sizes[0]), *sent.shape[1:])
            if sending.gathers:
                self._dispatch.launch(all_gather_single, out, sent, self._group)
            else:
                self._dispatch.launch(all_to_all, out, sent, *sizes, self._group)
            received.append(out)
        self._received.append(received)

    def _wait(self, index: int) -> Rows:
        """Wait for a group's rows, and give them up."""
        for each in range(len(self._rows)):
            self._dispatch.wait_for(index * len(self._rows) + each)
        received, self._received[index] = self._received[index], ()
        return received

    def _send_back(self, part_group: PartGroup, computed: Rows) -> None:
        for out, x, route in zip(computed, self._results, self._routes_back, strict=True):
            self._combine.launch(_send_back, out.contiguous(), route(part_group), x, self._group)

    def _send_pieces(self, computed: torch.Tensor) -> None:
        for piece in self._last_pieces:
            sent = compute(BESIDE, "join rows", piece.piece_of, computed)
            self._pieces.launch(_send_back, sent, piece, self._results[0], self._group)


def _send_back(out: torch.Tensor, part_group: PartGroup, x: torch.Tensor, group: dist.ProcessGroup) -> Work:
    """Start the way back of a group's rows; `wait` copies them to their places in x."""
    came_back = part_group.landing(x, out)
    work = all_to_all(came_back, out, part_group.sent_sizes, part_group.received_sizes, group)
    if came_back is x:
        return work
    return FinishingWork([work], functools.partial(_place, part_group, came_back, x), group, x)


def _place(part_group: PartGroup, came_back: torch.Tensor, x: torch.Tensor) -> None:
    compute(BESIDE, "place rows", part_group.place, came_back, x)


def all_to_all(
    out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Work:
    """Start ``out = all_to_all(x)``: contiguous rows, `sent` to each rank and `received` from each."""
    work: Work = dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
    return work
