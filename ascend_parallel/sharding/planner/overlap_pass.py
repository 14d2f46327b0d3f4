"""The overlap pass: fuses matmuls of a plan with the collective before or after them.

Which matmuls may be fused, the planner knows too (planner/overlapped_matmul.py): it prices them so. Column matmuls of
the same input become one matmul with one collective.

The result is a fused plan: the plan's layouts without these redistributions, and the matmuls that run as one kernel.
`ShardingPlan.fused` keeps it: prices and the runtime read what was fused once. The pass runs no collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from ascend_parallel.overlap.layer_shape import COLUMN, ROW, LayerShape
from ascend_parallel.sharding.graph import CALL, Graph, Node, Value
from ascend_parallel.sharding.layout import (
    PARTIAL_GRAD,
    REPLICATE,
    SUM,
    Layout,
    Placement,
    is_even,
    largest_local_shape,
    with_placement,
)
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.overlapped_matmul import (
    MatmulInputs,
    column_group,
    column_obstacle,
    matmul_of,
    rank_shape,
    reads_columns,
    row_obstacle,
    sums_rows,
)


class PlannedLayouts(Protocol):
    """What the pass reads of a `ShardingPlan`."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh."""

    @property
    def layouts(self) -> Mapping[Value, Layout]:
        """The layouts in which tensors are produced."""

    @property
    def inputs(self) -> Mapping[str, tuple[Layout, ...]]:
        """The layouts in which each node reads its inputs."""

    @property
    def shared_layouts(self) -> Mapping[Value, Layout]:
        """The layouts to which tensors are converted once, for several readers."""

    @property
    def differentiable(self) -> Set[Value]:
        """The tensors that have a gradient."""

    def returned_layout(self, value: Value) -> Layout:
        """Return the layout in which the caller gets an output."""


@dataclass(frozen=True)
class FusedMatmuls:
    """Matmuls of one or several nodes that run as one kernel, with a collective, at the position of the first node.

    kind
        "row", or "column": linear layers of the same input, whose weights are joined.
    mesh_dim
        The mesh dimension whose collective overlaps with the matmul.
    row_dim
        The dimension of the rows that are gathered or scattered; None for an all-reduce. The operators need rows in the
        first dimension, so another dimension is moved to the front: a copy, unless all dimensions before have size 1.
    shape
        What a rank multiplies, on no device yet; where the slices of x differ, of a slice as if they did not.
    is_even
        Whether all ranks have slices of x of the same shape.
    differentiable
        Whether the plan has a backward of these matmuls.
    """

    kind: str
    nodes: tuple[str, ...]
    matmuls: tuple[MatmulInputs, ...]
    mesh_dim: int
    row_dim: int | None
    shape: LayerShape
    is_even: bool
    differentiable: bool

    @property
    def communicates(self) -> bool:
        """Whether the forward communicates: a column's only gathers rows. The backward always does."""
        return self.kind == ROW or self.row_dim is not None


@dataclass(frozen=True)
class Fusion:
    """The result of the pass for a matmul next to a collective.

    operator
        The operator of ascend_parallel that runs the matmul with its collective; "" if the matmul is not fused.
    reason
        Which collective is fused, or why none is.
    """

    node: str
    operator: str
    reason: str


@dataclass(frozen=True)
class FusedPlan:
    """What a rank runs: `layouts`, `inputs` and `shared_layouts` as in a plan, and the kernels.

    kernels
        The matmuls that run as one kernel, by the first of their nodes. Other nodes run alone.
    """

    layouts: Mapping[Value, Layout]
    inputs: Mapping[str, tuple[Layout, ...]]
    shared_layouts: Mapping[Value, Layout]
    kernels: Mapping[str, FusedMatmuls] = field(default_factory=dict)
    fused: tuple[Fusion, ...] = ()

    @classmethod
    def of(cls, plan: PlannedLayouts) -> FusedPlan:
        """Return the plan with no kernel in it."""
        return cls(plan.layouts, plan.inputs, plan.shared_layouts)

    def units(self, graph: Graph) -> Iterator[tuple[str, ...]]:
        """Yield the nodes in the order in which they run; the nodes of a kernel run together, at the first of them."""
        done: set[str] = set()
        for name in graph.nodes:
            if name not in done:
                unit = tuple(self.kernels[name].nodes) if name in self.kernels else (name,)
                done |= set(unit)
                yield unit


def fuse(plan: PlannedLayouts, *, every_product: bool = False, held_weights: bool = False) -> FusedPlan:
    """Return the plan with kernels that overlap matmuls with their collectives.

    every_product
        Cut matmuls run as kernels without a collective too: on a mesh dimension of one rank, or of an input without a
        gradient (`Arithmetic.forms_every_product`).
    held_weights
        Only weights and biases that the model holds may be of one matmul.
    """
    builder = _FusedPlanBuilder(plan, every_product, held_weights)
    matmuls = [
        (node, found)
        for node in plan.graph.nodes.values()
        if node.call is not None and (found := matmul_of(node.call)) is not None
    ]
    dims = [dim for dim, size in enumerate(plan.mesh.shape) if size > 1 or every_product]
    for mesh_dim in dims:
        for node, matmul in matmuls:
            builder.row(node, matmul, mesh_dim)
    for mesh_dim in dims:
        builder.columns(matmuls, mesh_dim)
    return FusedPlan(builder.layouts, builder.inputs, builder.shared_layouts, builder.kernels, tuple(builder.fused))


_Column = tuple[Node, MatmulInputs]


class _FusedPlanBuilder:
    """A fused plan under construction."""

    def __init__(self, plan: PlannedLayouts, every_product: bool, held_weights: bool) -> None:
        self._graph, self._mesh, self._every_product = plan.graph, plan.mesh, every_product
        self._held_weights = held_weights
        self._differentiable = plan.differentiable
        self._readers = plan.graph.readers()
        self._returned = {value: plan.returned_layout(value) for value in plan.graph.returned}
        self._order = {name: place for place, name in enumerate(plan.graph.nodes)}
        self._done: set[str] = set()
        self.layouts, self.inputs = dict(plan.layouts), dict(plan.inputs)
        self.shared_layouts = dict(plan.shared_layouts)
        self.kernels: dict[str, FusedMatmuls] = {}
        self.fused: list[Fusion] = []

    def row(self, node: Node, matmul: MatmulInputs, mesh_dim: int) -> None:
        """Fuse a matmul with the redistribution of its partial sums on `mesh_dim`."""
        value = Value(node.name)
        reads, layout = self.inputs[node.name], self.layouts[value]
        if node.name in self._done or not sums_rows(matmul, reads, layout, mesh_dim):
            return
        if self._mesh.shape[mesh_dim] == 1:
            self._add_kernel(ROW, [(node, matmul)], mesh_dim, None)  # any layout is the whole tensor
            return
        targets = self._targets(value, mesh_dim)
        if targets <= {SUM}:
            return
        reason = self._row_obstacle(node, matmul, mesh_dim, targets)
        if reason:
            self.fused.append(Fusion(node.name, "", reason))
            return
        (target,) = targets
        whole = target == REPLICATE
        self.layouts[value] = with_placement(layout, mesh_dim, target)
        if value in self.shared_layouts and self.shared_layouts[value][mesh_dim] == SUM:
            self.shared_layouts[value] = with_placement(self.shared_layouts[value], mesh_dim, target)
        if matmul.bias is not None:
            self._set_input(node.name, matmul.bias, mesh_dim, REPLICATE if whole else PARTIAL_GRAD)
        operator = "matmul_all_reduce" if whole else "matmul_reduce_scatter"
        self._add_kernel(ROW, [(node, matmul)], mesh_dim, None if whole else target.dim)
        transposed = "" if whole else self._transposed_text(node.outputs[0].shape, self.layouts[value], target)
        self.fused.append(Fusion(node.name, operator, f"its sum over {self._mesh.dim_names[mesh_dim]}{transposed}"))

    def columns(self, matmuls: list[_Column], mesh_dim: int) -> None:
        """Fuse column matmuls with the redistributions of their inputs to R* on `mesh_dim`."""
        by_input: dict[Value, list[_Column]] = {}
        for node, matmul in matmuls:
            reads = self.inputs[node.name]
            if reads_columns(matmul, reads, mesh_dim) and node.name not in self._done:
                by_input.setdefault(node.inputs[matmul.x], []).append((node, matmul))
        for value, readers in by_input.items():
            if self._mesh.shape[mesh_dim] == 1:
                for group in self._groups(readers):
                    self._add_kernel(COLUMN, group, mesh_dim, None)
            else:
                self._columns_of(value, readers, mesh_dim)

    def _columns_of(self, value: Value, columns: list[_Column], mesh_dim: int) -> None:
        """Fuse the column matmuls that read `value`."""
        shared = self.shared_layouts.get(value)
        converted_once = shared is not None and shared[mesh_dim] == PARTIAL_GRAD
        source = self.layouts[value] if converted_once or shared is None else shared
        placement = source[mesh_dim]
        communicates = placement.kind == "shard" or value in self._differentiable
        if placement == PARTIAL_GRAD or not (communicates or self._every_product):
            return  # no collective runs for this input
        groups, new = self._groups(columns), placement if placement.kind == "shard" else REPLICATE
        names = {node.name for node, _ in columns}
        others = [(name, index) for name, index in self._readers[value] if name not in names]
        others_unchanged = all(self.inputs[name][index][mesh_dim] == new for name, index in others)
        if converted_once and not (len(groups) == 1 and others_unchanged):
            readers = ", ".join(name for name, _ in self._readers[value])
            self._refuse(columns, f"its input is converted once for several readers ({readers}) that cannot run as one")
            return
        fused = [self._group(group, mesh_dim, placement) for group in groups]
        if converted_once and all(fused):
            assert shared is not None
            self.shared_layouts[value] = with_placement(shared, mesh_dim, new)

    def _group(self, group: list[_Column], mesh_dim: int, placement: Placement) -> bool:
        """Fuse columns that differ only in their weights into one kernel; return False if a column has an obstacle."""
        node, matmul = group[0]
        obstacles = (self._column_obstacle(member, its, mesh_dim, placement) for member, its in group)
        if reason := next(filter(None, obstacles), ""):
            self._refuse(group, reason)
            return False
        rows = placement.kind == "shard"
        for member, its in group:
            self._set_input(member.name, its.x, mesh_dim, placement if rows else REPLICATE)
        self._add_kernel(COLUMN, group, mesh_dim, placement.dim if rows else None)
        what = "the gather of its rows" if rows else "in backward the sum of its input's gradient"
        operator = "all_gather_matmul" if rows else "matmul_all_reduce"
        others = f", one matmul with {', '.join(member.name for member, _ in group[1:])}" if len(group) > 1 else ""
        source, shape = self.inputs[node.name][matmul.x], self._graph.meta(node.inputs[matmul.x]).shape
        transposed = self._transposed_text(shape, source, placement) if rows else ""
        reason = f"{what} over {self._mesh.dim_names[mesh_dim]}{transposed}{others}"
        self.fused += [Fusion(member.name, operator, reason) for member, _ in group]
        return True

    def _groups(self, columns: list[_Column]) -> list[list[_Column]]:
        """Group columns of an input that can be one matmul: all weights exist when the first column runs."""
        groups: dict[object, list[_Column]] = {}
        for node, matmul in columns:
            reads = self.inputs[node.name]
            dtype = self._graph.meta(node.inputs[matmul.weight]).dtype
            key = column_group(matmul, reads, self.layouts[Value(node.name)], dtype)
            first = groups.setdefault(key, [])
            others = [value for index, value in enumerate(node.inputs) if index != matmul.x]
            late = bool(first) and any(self._order[value.node] > self._order[first[0][0].name] for value in others)
            late |= self._held_weights and any(self._graph.nodes[value.node].kind == CALL for value in others)
            groups.setdefault((key, node.name) if late else key, []).append((node, matmul))
        return [group for group in groups.values() if group]

    def _targets(self, value: Value, mesh_dim: int) -> set[Placement]:
        """Return the placements to which a tensor is redistributed on `mesh_dim`; R* counts as R."""
        shared = self.shared_layouts.get(value)
        if shared is not None and shared[mesh_dim] != SUM:
            found = {shared[mesh_dim]}
        else:
            found = {self.inputs[name][index][mesh_dim] for name, index in self._readers[value]}
        found |= {self._returned[value][mesh_dim]} if value in self._returned else set()
        return {REPLICATE if placement == PARTIAL_GRAD else placement for placement in found}

    def _row_obstacle(self, node: Node, matmul: MatmulInputs, mesh_dim: int, targets: set[Placement]) -> str:
        """Return why a row matmul cannot be fused; "" if it can."""
        value = Value(node.name)
        if uneven := self._uneven_text(node, matmul):
            return uneven
        if len(targets) > 1:
            return f"its partial sums are read as {' and '.join(sorted(map(str, targets)))}"
        (target,) = targets
        return row_obstacle(matmul, node.outputs[0].shape, self.layouts[value], self._mesh, mesh_dim, target)

    def _column_obstacle(self, node: Node, matmul: MatmulInputs, mesh_dim: int, placement: Placement) -> str:
        """Return why a column matmul cannot be fused; "" if it can."""
        if uneven := self._uneven_text(node, matmul):
            return uneven
        shape, read = self._graph.meta(node.inputs[matmul.x]).shape, self.inputs[node.name][matmul.x]
        output = self.layouts[Value(node.name)]
        return column_obstacle(matmul, shape, read, output, self._mesh, mesh_dim, placement)

    def _uneven_text(self, node: Node, matmul: MatmulInputs) -> str:
        """Return why ranks might cut a matmul in unlike chunks: the slices of its weight differ; "" if they do not."""
        shape = self._graph.meta(node.inputs[matmul.weight]).shape
        even = self._is_even(node, matmul, "weight")
        return "" if even else f"the slices of its weight {list(shape)} are not of the same size"

    def _is_even(self, node: Node, matmul: MatmulInputs, operand: str) -> bool:
        """Tell whether all ranks have the same shape of "x" or the "weight"."""
        place: int = getattr(matmul, operand)
        return is_even(self._graph.meta(node.inputs[place]).shape, self.inputs[node.name][place], self._mesh.shape)

    def _transposed_text(self, shape: tuple[int, ...], layout: Layout, rows: Placement) -> str:
        """Return ", transposed for S(d)" if moving the rows to the first dimension copies the tensor; else ""."""
        before = largest_local_shape(shape, layout, self._mesh.shape)[: rows.dim]
        return f", transposed for {rows}" if any(size != 1 for size in before) else ""

    def _set_input(self, name: str, index: int, mesh_dim: int, placement: Placement) -> None:
        layouts = list(self.inputs[name])
        layouts[index] = with_placement(layouts[index], mesh_dim, placement)
        self.inputs[name] = tuple(layouts)

    def _add_kernel(self, kind: str, group: list[_Column], mesh_dim: int, row_dim: int | None) -> None:
        names = tuple(node.name for node, _ in group)
        self._done |= set(names)
        self.kernels[names[0]] = FusedMatmuls(
            kind=kind,
            nodes=names,
            matmuls=tuple(matmul for _, matmul in group),
            mesh_dim=mesh_dim,
            row_dim=row_dim,
            shape=self._shape(kind, group, mesh_dim, row_dim is not None),
            is_even=self._is_even(*group[0], "x"),
            differentiable=any(Value(name) in self._differentiable for name in names),
        )

    def _shape(self, kind: str, group: list[_Column], mesh_dim: int, rows: bool) -> LayerShape:
        """Return a rank's part of a kernel: the products of all nodes as one."""
        parts = []
        for node, matmul in group:
            assert node.call is not None
            parts.append(rank_shape(kind, node.call, matmul, self.inputs[node.name], self._mesh.shape, mesh_dim))
        return parts[0]._replace(n=sum(part.n for part in parts), sequence_parallel=rows)

    def _refuse(self, group: list[_Column], reason: str) -> None:
        self.fused += [Fusion(node.name, "", reason) for node, _ in group]
