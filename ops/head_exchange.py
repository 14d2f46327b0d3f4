"""The operator of context parallelism: ranks that each have a part of the sequence get whole sequences of some heads.

Every rank of the group has all heads of its tokens. For attention rank r gets the r-th share of the heads, of all
tokens, and sends back what attention made of them. The exchange (ops/part_exchange.py) is cut by groups of heads of
keys, each with the heads of queries that read it.

    rank's q [s, B, N, D]           s of the sequence's S tokens, all N heads; k and v have as many heads or fewer
    dispatch                        all-to-all of a group's heads: [S, B, n, D], the sources' tokens in rank order
    attention                       computed by the caller, in place of a matmul
    combine                         all-to-all of o [S, B, n, D] back to the ranks of the tokens: [s, B, N, D]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, TypeVar

import torch

from ascend_parallel.ops.call import HEAD_EXCHANGE
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished_heads import Places, UnfinishedHeads

Heads = TypeVar("Heads", bound="SharedHeads")


@dataclass(frozen=True)
class SharedHeads:
    """Heads of keys that travel together between ranks that share a sequence, with the heads of queries that read them.

    heads
        The numbers of the heads of keys, of those below.
    of
        How many heads of keys there are: of each rank if heads are exchanged, in all if keys are gathered.
    lengths
        How many tokens each rank of the process group has.
    rank
        This rank's number in the group.
    """

    gathers: ClassVar[bool]
    """Whether all ranks get the same rows, or each its own."""

    heads: range
    of: int
    lengths: tuple[int, ...]
    rank: int

    @classmethod
    def cut(cls: type[Heads], sizes: Sizes, lengths: Sequence[int], rank: int) -> list[Heads]:
        """Cut the heads of keys into groups of `sizes` heads."""
        cuts = pairwise(accumulate(sizes, initial=0))
        return [cls(range(first, stop), sum(sizes), tuple(lengths), rank) for first, stop in cuts]

    @property
    def sent_sizes(self) -> list[int]:
        """The tokens that go to each rank: this rank's."""
        return [self.lengths[self.rank]] * len(self.lengths)

    @property
    def received_sizes(self) -> list[int]:
        """The tokens that come from each rank."""
        return list(self.lengths)

    def landing(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer for the group's heads of x [s, B, N, D] from all ranks: [R s, B, n, D]."""
        return like.new_empty(sum(self.sent_sizes), *like.shape[1:])


class HeadGroup(SharedHeads):
    """Heads of keys of each rank that are exchanged together."""

    gathers = False

    def places(self, heads: int) -> Places:
        """Return where the group's heads lie among `heads` of queries or keys, rank after rank."""
        each = heads // (len(self.lengths) * self.of)
        firsts = range(0, heads, self.of * each)
        return tuple((first + self.heads.start * each, first + self.heads.stop * each) for first in firsts)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's heads of x [s, B, N, D], contiguous, rank after rank: [R s, B, n, D].

        Of heads that are still to be made, those of this group are made, below autograd.
        """
        if isinstance(x, UnfinishedHeads) and not torch.is_grad_enabled():
            alone = HeadGroup(range(len(self.heads)), len(self.heads), self.lengths, self.rank)
            return alone.join(x.some(2, self.places(x.shape[2])))
        joined = self._heads(x).permute(2, 0, 1, 3, 4, 5).contiguous()
        return joined.flatten(3, 4).flatten(0, 1)

    def by_rank(self, o: torch.Tensor, batch_first: bool) -> torch.Tensor:
        """Return o [S, B, n, D] in the order of `HeadRows`, [R, B s, n, D]."""
        by_rank = o.view(len(self.lengths), -1, *o.shape[1:])
        return (by_rank.transpose(1, 2) if batch_first else by_rank).flatten(1, 2)

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Copy heads that came back, [R s, B, n, D], to their places in x [s, B, N, D]."""
        ranks, (_, batch, heads, width) = len(self.lengths), came_back.shape
        parts = came_back.view(ranks, -1, batch, len(self.heads), heads // len(self.heads), width)
        self._heads(x).copy_(parts.permute(1, 2, 0, 3, 4, 5))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's heads of x [s, B, N, D] as a view [s, B, rank, head of keys, its heads, D]."""
        tokens, batch, heads, width = x.shape
        by_rank = x.view(tokens, batch, len(self.lengths), self.of, heads // (len(self.lengths) * self.of), width)
        return by_rank[:, :, :, self.heads.start : self.heads.stop]


@dataclass(frozen=True)
class HeadRows(HeadGroup):
    """Some rows of a group's heads, which come back by a collective of their own.

    first, stop
        Of a rank's rows.
    batch_first
        Whether these are the rows of o [B, s, N, D], or of o [s, B, N, D].
    """

    first: int
    stop: int
    batch_first: bool

    @classmethod
    def cut_rows(cls, heads: HeadGroup, sizes: Sizes, batch_first: bool) -> list[HeadRows]:
        """Cut the rows of a group of heads into pieces of `sizes` rows."""
        cuts = pairwise(accumulate(sizes, initial=0))
        return [cls(heads.heads, heads.of, heads.lengths, heads.rank, *cut, batch_first) for cut in cuts]

    @property
    def sent_sizes(self) -> list[int]:
        """The rows that come back from each rank."""
        return [self.stop - self.first] * len(self.lengths)

    @property
    def received_sizes(self) -> list[int]:
        """The rows that go back to each rank."""
        return self.sent_sizes

    def piece_of(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return the rows that go back, [R m, 1, n, D], of what `by_rank` has returned."""
        return by_rank[:, self.first : self.stop].flatten(0, 1).unsqueeze(1).contiguous()

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Copy rows that came back, [R m, 1, n, D], to their places in x [s, B, N, D], which has the rows' memory."""
        in_order = x.transpose(0, 1) if self.batch_first else x
        rows = in_order.view(-1, *x.shape[2:])[self.first : self.stop]
        super().place(came_back, rows.unsqueeze(1))


def repeats_of(query_heads: int, key_heads: int, ranks: int) -> int:
    """Return how often each head of keys must be sent so that every rank gets as many: 1 if they can be shared.

    Raises `ValueError` if the heads cannot be shared by `ranks` ranks in any way.
    """
    if query_heads % key_heads:
        raise ValueError(f"{HEAD_EXCHANGE}: {query_heads} heads of queries, no multiple of {key_heads} heads of keys")
    readers = query_heads // key_heads
    repeats = next((n for n in range(1, readers + 1) if not readers % n and not key_heads * n % ranks), None)
    if repeats is None:
        raise ValueError(
            f"{HEAD_EXCHANGE}: {query_heads} heads of queries and {key_heads} of keys cannot be shared by the {ranks} "
            "ranks of the context-parallel group: the heads of queries must be a multiple of the ranks"
        )
    return repeats
