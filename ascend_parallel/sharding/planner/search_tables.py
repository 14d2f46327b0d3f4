"""Tables of searches: options of operators, costs between layouts, and what follows from them, computed once.

Layers repeat within a search, and most of what one search computes another needs too, which differs from it in its
strategies alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.edge_costs import EdgeCosts
from ascend_parallel.sharding.planner.options import Option, Options
from ascend_parallel.sharding.planner.overlapped_matmul import ExposedCosts
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.tuning.cost_model.hardware import Hardware

Result = TypeVar("Result")


class Interned:
    """Equal sequences of options as one object: layers share them, so results are looked up by identity.

    Options are compared by their objects (`Options.of` returns the same for operators with the same signature, and
    restrictions only leave some out), which costs far less than to hash hundreds of layouts for each operator.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._options: dict[tuple[int, ...], tuple[Option, ...]] = {}
        # Values hold what their keys name by identity, so that nothing else gets the same identity.
        self._results: dict[Hashable, tuple[object, tuple[object, ...]]] = {}

    def options(self, options: Sequence[Option]) -> tuple[Option, ...]:
        """Return the one tuple of these options."""
        key = tuple(map(id, options))
        known = self._options.get(key)
        if known is None:
            self._options[key] = known = tuple(options)
        return known

    def outputs(self, options: tuple[Option, ...], index: int) -> tuple[Layout, ...]:
        """Return the layouts of an output in each option."""
        return self.result(("outputs", index), (options,), lambda: tuple(option.outputs[index] for option in options))

    def inputs(self, options: tuple[Option, ...], index: int) -> tuple[Layout, ...]:
        """Return the layouts of an input in each option."""
        return self.result(("inputs", index), (options,), lambda: tuple(option.inputs[index] for option in options))

    def result(self, kind: Hashable, of: tuple[object, ...], compute: Callable[[], Result]) -> Result:
        """Call `compute` once for the objects `of`, and return its result.

        kind: what is computed, with all arguments that are compared by value.
        """
        key = (kind, *map(id, of))
        if key not in self._results:
            self._results[key] = compute(), of
        return self._results[key][0]  # type: ignore[return-value]


@dataclass(frozen=True)
class SearchTables:
    """What searches have in common that differ in their strategies alone; each computes what none before it has.

    exposed: costs of matmuls with a collective; None: none run together. edges: costs between layouts. options: of
    operators by signature. interned: what follows from options.
    """

    exposed: ExposedCosts | None
    edges: EdgeCosts
    options: Options
    interned: Interned

    @classmethod
    def of(cls, costs: MeshCosts, overlap: Settings | None) -> SearchTables:
        """Return empty tables for a mesh with these costs."""
        exposed = ExposedCosts(costs, overlap) if overlap else None
        return cls(exposed, EdgeCosts(costs.shape, costs, exposed), Options(costs.shape), Interned())


class SharedTables:
    """Tables of several searches, apart by what else than strategies they differ in.

    Rules that are registered (`register_rule`) after a search are not seen by the next.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[Hashable, SearchTables] = {}

    def of(
        self, mesh: ProcessMesh, costs: MeshCosts, objective: str, hardware: str | Hardware, overlap: Settings | None
    ) -> SearchTables:
        """Return the tables of searches with all of these; the hardware prices computation."""
        overlap = overlap if objective == "time" else None
        key = (mesh.shape, tuple(mesh.process_ids), costs, objective, hardware, overlap)
        if key not in self._known:
            self._known[key] = SearchTables.of(costs, overlap)
        return self._known[key]
