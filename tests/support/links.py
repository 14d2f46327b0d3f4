"""Costs of collectives from a latency and a rate."""

from dataclasses import dataclass

from ascend_parallel.process_groups.collectives import ALL_REDUCE, SEND
from ascend_parallel.sharding.redistribute.costs import MeshCosts, sent


@dataclass(frozen=True)
class LinkCosts:
    """Costs of a ring of `ranks` ranks: a message takes `latency` seconds plus `seconds_per_byte` for each byte."""

    ranks: int
    latency: float
    seconds_per_byte: float

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the time of a collective on a tensor of `nbytes` bytes in all."""
        if kind == SEND:
            return self.latency + nbytes * self.seconds_per_byte
        if self.ranks == 1 or nbytes == 0:
            return 0.0
        messages = (2 if kind == ALL_REDUCE else 1) * (self.ranks - 1)
        return messages * self.latency + sent(kind, nbytes, self.ranks) * self.seconds_per_byte


def link_costs(mesh_shape, latency, seconds_per_byte):
    """Return the costs of rings; each number holds for all mesh dimensions, or is a sequence with an entry each."""
    latencies, rates = (
        number if isinstance(number, tuple) else [number] * len(mesh_shape) for number in (latency, seconds_per_byte)
    )
    return MeshCosts(tuple(LinkCosts(*numbers) for numbers in zip(mesh_shape, latencies, rates, strict=True)))
