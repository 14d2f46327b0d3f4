"""The price of attention whose sequences several ranks share: what they send around it, and what of that stays exposed.

Heads are exchanged, or keys and values gathered (ops/head_exchange.py, ops/key_gather.py), in groups of heads: of all
that is sent the first group's dispatch and the last one's combine, 1 / groups, run under no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ascend_parallel.ops.head_exchange import repeats_of
from ascend_parallel.ops.key_gather import EXCHANGES, GATHER, HEADS
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, SEND

# The kinds of collectives, as a plan names them.
# The numbers of groups that are compared where none is given.
GROUPS = (1, 2, 4)

Collective = Callable[[str, float], float]
"""Returns the seconds of a collective of a kind, of so many bytes of all ranks together; of a send, of one rank."""


@dataclass(frozen=True)
class SharedAttention:
    """An attention whose sequences `ranks` ranks share, as one of them has it.

    heads, key_heads
        The heads of queries and of keys. Keys that are repeated for their readers count once.
    query, key, value, output
        The bytes of a head of this rank's tokens.
    lends
        Whether gathered keys have ranks lend each other half of their queries, so that causal rows are balanced.
    """

    ranks: int
    heads: int
    key_heads: int
    query: float
    key: float
    value: float
    output: float
    lends: bool = False

    def allows(self, exchange: str) -> bool:
        """Tell whether the ranks can share the heads in a way: a gather always, an exchange if the heads are enough."""
        return exchange == GATHER or not self.heads % self.ranks

    @property
    def key_copies(self) -> int:
        """To how many ranks each head of keys goes, where heads are exchanged."""
        return repeats_of(self.heads, self.key_heads, self.ranks)

    def most_groups(self, exchange: str) -> int:
        """Return into how many groups the heads can be cut."""
        return self.key_heads if exchange == GATHER else self.key_heads * self.key_copies // self.ranks

    def sent(self, exchange: str, direction: str) -> Iterator[tuple[str, float]]:
        """Yield the collectives of a pass in one group: kind and bytes, as `Collective` takes them."""
        if exchange == HEADS:
            keys = self.key_heads * self.key_copies
            for size in (self.heads * self.query, keys * self.key, keys * self.value, self.heads * self.output):
                yield ALL_TO_ALL, self.ranks * size
            return
        for size in (self.key, self.value):
            yield ALL_GATHER if direction == FORWARD else REDUCE_SCATTER, self.ranks * self.key_heads * size
        if self.lends:
            for size in (self.query, self.output):
                yield SEND, self.heads * size / 2

    def seconds(self, exchange: str, groups: int, kernel: float, direction: str, collective: Collective) -> float:
        """Return the seconds of a pass with what stays exposed beside its kernel; groups: at most `most_groups`."""
        groups = min(groups, self.most_groups(exchange))
        of_group = sum(collective(kind, size / groups) for kind, size in self.sent(exchange, direction))
        return of_group + max(kernel, (groups - 1) * of_group)

    def kept(self, exchange: str) -> float:
        """Return the bytes of queries, keys, values and results that backward reads."""
        own = self.heads * (self.query + self.output)
        if exchange == GATHER:
            return own + self.ranks * self.key_heads * (self.key + self.value)
        return own + self.key_heads * self.key_copies * (self.key + self.value)

    def prices(
        self, kernels: tuple[float, float], collective: Collective, exchange: str = "", groups: int = 0
    ) -> list[ExchangePrice]:
        """Return the price of each way in the groups that take least time, the best way first.

        kernels: seconds of forward and backward without what is sent. exchange, groups: those that are asked for; "":
        `HEADS` and `GATHER` are compared, 0: `GROUPS`. Of equal prices heads come first, and few groups.
        """
        exchanges = [one for one in ((exchange,) if exchange else EXCHANGES) if self.allows(one)]
        return sorted((self._price(one, groups, kernels, collective) for one in exchanges), key=_total)

    def _price(self, exchange: str, groups: int, kernels: tuple[float, float], collective: Collective) -> ExchangePrice:
        def of(count: int) -> ExchangePrice:
            forward, backward = (
                self.seconds(exchange, count, kernel, direction, collective)
                for kernel, direction in zip(kernels, (FORWARD, BACKWARD), strict=True)
            )
            return ExchangePrice(forward, backward, exchange, count)

        most = self.most_groups(exchange)
        counts = [min(groups, most)] if groups else [count for count in GROUPS if count <= most]
        return min(map(of, counts), key=_total)


class ExchangePrice(NamedTuple):
    """The seconds of forward and backward of a shared attention, with what stays exposed; its way, and its groups."""

    forward: float
    backward: float
    exchange: str
    groups: int


def _total(price: ExchangePrice) -> float:
    return price.forward + price.backward
