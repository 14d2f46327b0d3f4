"""The gather of context parallelism: ranks that each have a part of the sequence get the keys and values of all.

Queries stay where they are: each rank attends from its own tokens, with all heads. It is the way where the heads do not
suffice for the ranks (ops/head_exchange.py). The exchange (ops/part_exchange.py) is cut by groups of heads of keys.

    rank's k, v [s, B, n, D]        s of the sequence's S tokens
    dispatch                        all-gather of a group's heads: [S, B, n', D], the sources' tokens in rank order
    attention                       computed by the caller, of the rank's queries: o [s, B, N', D] stays
    combine                         in backward: dk, dv [S, B, n', D] to the ranks of the tokens, which sum them

Sums run in the order of the ranks, in fp32 for 16 bits, on every backend. Backward reads the keys and values that
forward gathered: they stay in memory for each layer, unless it is recomputed.

A causal mask gives the last tokens most work. Of 2 R pieces of a sequence rank i has i and 2 R - 1 - i (`pieces_of`):
all ranks have as much, and keys after a piece are left out (`keys_before`).

Where a rank has one stretch of the sequence, pieces 2 i and 2 i + 1, it lends the second to rank R - 1 - i, for as many
rows of that rank's: rank i then attends from pieces 2 i and 2 R - 1 - 2 i (`lent_pieces`), again as much as all others.
Half of the queries go there with the keys of their group, and their results come back (`LentRows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_parallel.ops.collectives import sum_in_rank_order
from ascend_parallel.ops.head_exchange import SharedHeads, repeats_of

# Keys after a piece are left out in whole blocks of so many. torch's flash attention on CPUs takes 512 keys at a time:
# a block whose keys are all masked changes no bit, and a block that is cut does (aten/src/ATen/native/cpu/
# FlashAttentionKernel.cpp; tried with torch 2.13, fp32 and bf16).
KEY_BLOCK = 512

# How the ranks that share a sequence bring together what attention reads.
HEADS, GATHER = "heads", "gather"
EXCHANGES = (HEADS, GATHER)


class KeyGroup(SharedHeads):
    """Heads of keys that are gathered together."""

    gathers = True

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's heads of x [s, B, N, D], of queries or of keys: a view [s, B, n, D]."""
        readers = x.shape[2] // self.of
        return x[:, :, self.heads.start * readers : self.heads.stop * readers]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's heads of x [s, B, N, D], contiguous."""
        return self.heads_of(x).contiguous()

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Write the sum of what the ranks have, [R s, B, n, D], to the group's heads of x [s, B, N, D]."""
        parts = came_back.view(len(self.lengths), -1, *came_back.shape[1:]).unbind()
        if len(parts) == 1:
            self.heads_of(x).copy_(parts[0])
        else:
            sum_in_rank_order(parts, self.heads_of(x))


@dataclass(frozen=True)
class LentKeyGroup(KeyGroup):
    """Heads of keys that are gathered together, for queries of which each rank lends a half to another.

    borrower
        The rank of the process group with which this rank exchanges rows.
    """

    borrower: int

    @property
    def lent(self) -> LentRows:
        """How the rows that ranks lend each other travel."""
        return LentRows(self.heads, self.of, self.lengths, self.rank, self.borrower)


@dataclass(frozen=True)
class LentRows(KeyGroup):
    """The rows of queries, or of results, that two ranks lend each other: the second half of each one's."""

    gathers = False

    borrower: int

    @property
    def sent_sizes(self) -> list[int]:
        """The lent rows, to the borrower."""
        lent = self.lengths[self.rank] - kept_rows(self.lengths[self.rank])
        return [lent if rank == self.borrower else 0 for rank in range(len(self.lengths))]

    @property
    def received_sizes(self) -> list[int]:
        """As many rows of the borrower's."""
        return self.sent_sizes

    def place(self, came_back: torch.Tensor, x: torch.Tensor) -> None:
        """Copy the results of lent rows to their places in x."""
        self.heads_of(x).copy_(came_back)


def kept_rows(tokens: int) -> int:
    """Return how many of a rank's `tokens` rows stay where half of them is lent."""
    return tokens // 2


def lent_pieces(place: int, ranks: int, tokens: int) -> tuple[slice, slice]:
    """Return where the rows lie in the sequence from which a rank attends that has lent half of its `tokens` rows.

    place: of the rank, among those that share the sequence, each of which has one stretch of it.
    """
    kept, first, other = kept_rows(tokens), place * tokens, (ranks - 1 - place) * tokens
    return slice(first, first + kept), slice(other + kept, other + tokens)


def choose_exchange(query_heads: int, key_heads: int, ranks: int, asked: str | None = None) -> tuple[str, str]:
    """Return `HEADS` or `GATHER`, and why, for heads that `ranks` ranks share; asked: one of them, or None.

    Heads are exchanged where each rank gets as many heads of keys: every bit stays. Else the way that sends less is
    taken. A pure function of numbers that are the same on all ranks. Raises `ValueError` if the heads cannot be shared
    in the way that is asked for, or in any.
    """
    if asked not in (None, *EXCHANGES):
        raise ValueError(f"exchange={asked!r} is not allowed: give one of {', '.join(EXCHANGES)}, or None")
    repeats_of(query_heads, key_heads, 1)
    if asked == GATHER:
        return GATHER, "it is asked for"
    heads = f"{query_heads} heads of queries and {key_heads} of keys on {ranks} ranks"
    if asked == HEADS:
        repeats_of(query_heads, key_heads, ranks)
        return HEADS, "it is asked for"
    if not key_heads % ranks:
        return HEADS, f"{heads}: each gets as many"
    if query_heads % ranks:
        return GATHER, f"{heads}: heads cannot be exchanged"
    sent = sent_share(query_heads, key_heads, ranks)
    words = f"{heads}: a gather sends {sent:.2f} of what heads would, which would go to several ranks"
    return (GATHER if sent < 1 else HEADS), words


def sent_share(query_heads: int, key_heads: int, ranks: int) -> float:
    """Return the bytes that a gather of keys and values sends, of those of an exchange of heads.

    Of a rank's tokens, of each feature and to each peer: the gather sends keys and values, the exchange an R-th of the
    heads of queries, keys, values and outputs, with heads of keys repeated for the ranks. Backward sends as much.
    """
    exchanged = query_heads + key_heads * repeats_of(query_heads, key_heads, ranks)
    return key_heads * ranks / exchanged


def cut_heads(query_heads: int, key_heads: int, ranks: int, exchange: str) -> int:
    """Return the number of key heads that groups are cut from: a rank's, or all of them where keys are gathered.

    Raises `ValueError` if the ranks cannot share the heads.
    """
    if exchange == GATHER:
        return key_heads
    return key_heads * repeats_of(query_heads, key_heads, ranks) // ranks


def pieces_of(rank: int, ranks: int, tokens: int) -> tuple[slice, slice]:
    """Return where the two pieces of a rank's `tokens` tokens lie in the sequence; raises `ValueError` if odd."""
    if tokens % 2:
        raise ValueError(
            f"a rank has {tokens} tokens of a sequence whose keys are gathered: give a sequence that is a multiple of "
            f"{2 * ranks}, which makes two pieces for each rank"
        )
    piece = tokens // 2
    first, second = (slice(piece * number, piece * (number + 1)) for number in (rank, 2 * ranks - 1 - rank))
    return first, second


def keys_before(stop: int, tokens: int) -> int:
    """Return how many keys of a sequence of `tokens` the rows before `stop` need, in whole blocks."""
    return min(tokens, -(-stop // KEY_BLOCK) * KEY_BLOCK)


def in_sequence(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return rows x [S, ...], those of each rank in two pieces, from the order of the ranks in that of the sequence."""
    first, second = x.view(ranks, 2, -1, *x.shape[1:]).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)
