"""Times of collectives along each dimension of a mesh, from a hardware's fits.

Units are seconds and bytes. `nbytes` counts the whole tensor over the ranks of one line of the mesh dimension: the
output of an all-gather, the input of a reduce-scatter or an all-reduce, all slices of an all-to-all together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND
from ascend_parallel.tuning.cost_model.cost import CostModel, ranks_in_domain
from ascend_parallel.tuning.cost_model.hardware import Hardware, find_hardware

if TYPE_CHECKING:
    from ascend_parallel.sharding.mesh import ProcessMesh

KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, SEND)


def sent(kind: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a bandwidth-optimal collective on a tensor of `nbytes` bytes in all.

    An all-reduce counts as a reduce-scatter plus an all-gather.
    """
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
        """Return the time of a collective on a tensor of `nbytes` bytes in all."""


@dataclass(frozen=True)
class FittedCosts:
    """Collectives from a hardware's fits (`tuning/cost_model`); between domains the network's.

    in_domain
        How many of the `ranks` ranks share a domain.
    """

    ranks: int
    in_domain: int
    hardware: Hardware = field(repr=False)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the time of a collective on a tensor of `nbytes` bytes in all."""
        model = _model(self.hardware)
        if kind == SEND:  # in an all-gather of 2 ranks each rank sends half of the bytes
            return model.send(nbytes, inside=self.in_domain > 1)
        if kind == ALL_TO_ALL:
            return model.all_to_all(nbytes / self.ranks, self.ranks, self.in_domain)
        return model.line(kind, nbytes, self.ranks, self.in_domain)


@dataclass(frozen=True)
class MeshCosts:
    """Costs along each dimension of a mesh, in the order of the mesh."""

    dims: tuple[DimensionCosts, ...]

    @classmethod
    def of(cls, mesh: ProcessMesh, hardware: str | Hardware = "910b") -> MeshCosts:
        """Return the costs on a hardware, by name or alias (`find_hardware`); global ranks fill domains in order."""
        known = find_hardware(hardware) if isinstance(hardware, str) else hardware
        size = known.collectives.domain
        dims = []
        for dim, ranks in enumerate(mesh.shape):
            lines = mesh.array.swapaxes(dim, -1).reshape(-1, ranks)
            dims.append(FittedCosts(ranks, ranks_in_domain(lines, size), known))
        return cls(tuple(dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh dimensions."""
        return tuple(costs.ranks for costs in self.dims)

    @property
    def hardware(self) -> Hardware | None:
        """The hardware of the fits; None for other costs."""
        return next((costs.hardware for costs in self.dims if isinstance(costs, FittedCosts)), None)

    def seconds(self, kind: str, nbytes: float, dim: int) -> float:
        """Return the time of a collective along mesh dimension `dim`, on a tensor of `nbytes` bytes over the line."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: give one of {', '.join(KINDS)}")
        return self.dims[dim].seconds(kind, nbytes)

    def __hash__(self) -> int:
        """Return the cached hash: caches of plans use the costs as a key."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.dims)


@lru_cache(maxsize=8)
def _model(hardware: Hardware) -> CostModel:
    return CostModel(hardware)
