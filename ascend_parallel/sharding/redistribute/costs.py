"""What collectives cost along each dimension of a mesh: by a hardware's fits, or by a latency and a rate.

Seconds and bytes. The bytes are those of the whole tensor over the ranks of one line of the mesh dimension: what an
all-gather ends with, a reduce-scatter and an all-reduce begin with, and an all-to-all's slices together are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from ascend_parallel.ops.problem import ALL_REDUCE as MATMUL_ALL_REDUCE
from ascend_parallel.ops.problem import REDUCE_SCATTER as MATMUL_REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import GATHER, CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware, find_hardware

if TYPE_CHECKING:
    from ascend_parallel.sharding.mesh import ProcessMesh

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
ALL_TO_ALL, SEND = "all_to_all", "send"
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, SEND)


def sent(kind: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that one rank sends at least: an all-reduce is a reduce-scatter and an all-gather."""
    if kind == SEND:
        return nbytes
    share = {ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0, ALL_REDUCE: 2.0, ALL_TO_ALL: 1.0 / ranks}[kind]
    return share * nbytes * (ranks - 1) / ranks


class DimensionCosts(Protocol):
    """Costs along one mesh dimension; comparable and hashable."""

    @property
    def ranks(self) -> int:
        """Size of the mesh dimension."""

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the time of a collective of a tensor that is `nbytes` whole."""


@dataclass(frozen=True)
class LinkCosts:
    """A ring of `ranks` ranks: seconds for each message and for each byte of it."""

    ranks: int
    latency: float
    seconds_per_byte: float

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the time of a collective of a tensor that is `nbytes` whole."""
        if kind == SEND:
            return self.latency + nbytes * self.seconds_per_byte
        if self.ranks == 1 or nbytes == 0:
            return 0.0
        messages = (2 if kind == ALL_REDUCE else 1) * (self.ranks - 1)
        return messages * self.latency + sent(kind, nbytes, self.ranks) * self.seconds_per_byte


@dataclass(frozen=True)
class FittedCosts:
    """Ranks of a hardware whose collectives were fitted, as planning/ has them; beyond a domain over the network.

    in_domain
        How many of the `ranks` ranks share a domain.
    """

    ranks: int
    in_domain: int
    hardware: Hardware = field(repr=False)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the time of a collective of a tensor that is `nbytes` whole."""
        model = _model(self.hardware)
        if kind == SEND:  # each of two ranks that gather sends half of the whole
            return (
                model.collective(GATHER, 2 * nbytes, 2) if self.in_domain > 1 else model.network(GATHER, 2 * nbytes, 2)
            )
        if kind == ALL_TO_ALL:  # what an all-gather of as many bytes sent takes
            kind, nbytes = ALL_GATHER, nbytes / self.ranks
        operator = {ALL_GATHER: GATHER, REDUCE_SCATTER: MATMUL_REDUCE_SCATTER, ALL_REDUCE: MATMUL_ALL_REDUCE}[kind]
        inside = model.collective(operator, nbytes, self.in_domain)
        return inside + model.network(operator, nbytes / self.in_domain, self.ranks // self.in_domain)


@dataclass(frozen=True)
class MeshCosts:
    """Costs along each dimension of a mesh, in the order of the mesh."""

    dims: tuple[DimensionCosts, ...]

    @classmethod
    def of(cls, mesh: ProcessMesh, hardware: str | Hardware = "910b") -> MeshCosts:
        """Return the costs on a hardware of planning/, by its name or alias; global ranks fill domains in order."""
        found = find_hardware(hardware) if isinstance(hardware, str) else hardware
        size = found.collectives.domain
        dims = []
        for dim, ranks in enumerate(mesh.shape):
            lines = mesh.array.swapaxes(dim, -1).reshape(-1, ranks)
            domains = max(len({int(rank) // size for rank in line}) for line in lines)
            dims.append(FittedCosts(ranks, ranks // domains if ranks % domains == 0 else 1, found))
        return cls(tuple(dims))

    @classmethod
    def of_links(
        cls, mesh_shape: Sequence[int], latency: float | Sequence[float], seconds_per_byte: float | Sequence[float]
    ) -> MeshCosts:
        """Return the costs of rings with these numbers, one for all mesh dimensions or one for each."""
        latencies, rates = _each(latency, len(mesh_shape)), _each(seconds_per_byte, len(mesh_shape))
        return cls(tuple(LinkCosts(*numbers) for numbers in zip(mesh_shape, latencies, rates, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh dimensions."""
        return tuple(costs.ranks for costs in self.dims)

    @property
    def hardware(self) -> Hardware | None:
        """The hardware whose costs these are; None: they are a link's."""
        return next((one.hardware for one in self.dims if isinstance(one, FittedCosts)), None)

    def seconds(self, kind: str, nbytes: float, dim: int) -> float:
        """Return the time of a collective along mesh dimension `dim`, of a tensor that is `nbytes` whole there."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: give one of {', '.join(KINDS)}")
        return self.dims[dim].seconds(kind, nbytes)

    def __hash__(self) -> int:
        """Hash the costs once: plans are looked up by them."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.dims)


@lru_cache(maxsize=8)
def _model(hardware: Hardware) -> CostModel:
    return CostModel(hardware)


def _each(given: float | Sequence[float], count: int) -> Sequence[float]:
    return given if isinstance(given, Sequence) else [given] * count
