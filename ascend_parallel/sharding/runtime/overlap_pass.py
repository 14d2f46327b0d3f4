"""The overlap pass: which matmuls of a plan run together with the collective before or behind them.

row     the weight is cut along K, and the partial sums become whole (all-reduce) or rows (reduce-scatter): the
        conversion moves from behind the matmul into it.
column  the weight is cut along N, and the input is a copy for it (all-reduce of its gradient) or gathered from rows
        (all-gather, in backward reduce-scatter). Columns of the same input are one matmul with one collective.

What the pass leaves is a schedule: the plan's layouts with those conversions taken out, and the kernels. Pure: no
process is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.utils import _pytree as pytree

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import CALL, Node, Value
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, SUM, Layout, Placement, is_even, local_shape, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, Kernel, Matmul, RowKernel, matmul_of


@dataclass(frozen=True)
class Fusion:
    """What the pass did with a matmul next to a collective.

    operator
        The operator of ascend_parallel whose collective it shares its time with; "" if none.
    reason
        Which collective that is, or why it stays apart.
    """

    node: str
    operator: str
    reason: str


@dataclass(frozen=True)
class Schedule:
    """What a rank runs: a plan's `layouts`, `inputs` and `via`, and the kernels of nodes that are not run alone.

    kernels
        By the first of their nodes.
    """

    layouts: Mapping[Value, Layout]
    inputs: Mapping[str, tuple[Layout, ...]]
    shared_layouts: Mapping[Value, Layout]
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    fused: tuple[Fusion, ...] = ()


def fuse(plan: ShardingPlan, settings: Settings) -> Schedule:
    """Return the schedule of a plan in which matmuls overlap with their collectives.

    settings
        Of the overlapped operators: chunks, order.
    """
    work = _Pass(plan, settings)
    matmuls = [
        (node, found)
        for node in plan.graph.nodes.values()
        if node.kind == CALL and node.call is not None and (found := matmul_of(node.call)) is not None
    ]
    for mesh_dim, size in enumerate(plan.mesh.shape):
        for node, matmul in matmuls if size > 1 else []:
            work.row(node, matmul, mesh_dim)
    for mesh_dim, size in enumerate(plan.mesh.shape):
        if size > 1:
            work.columns(matmuls, mesh_dim)
    return Schedule(work.layouts, work.inputs, work.shared_layouts, work.kernels, tuple(work.fused))


_Column = tuple[Node, Matmul]


class _Pass:
    """The schedule while it is made."""

    def __init__(self, plan: ShardingPlan, settings: Settings) -> None:
        self._graph, self._mesh, self._settings = plan.graph, plan.mesh, settings
        self._differentiable = plan.differentiable
        self._readers = plan.graph.readers()
        returned = {leaf for leaf in pytree.tree_leaves(plan.graph.outputs) if isinstance(leaf, Value)}
        self._returned = {value: plan.returned_layout(value) for value in returned}
        self._order = {name: place for place, name in enumerate(plan.graph.nodes)}
        self._done: set[str] = set()
        self.layouts, self.inputs, self.shared_layouts = (
            dict(plan.layouts),
            dict(plan.inputs),
            dict(plan.shared_layouts),
        )
        self.kernels: dict[str, Kernel] = {}
        self.fused: list[Fusion] = []

    def row(self, node: Node, matmul: Matmul, mesh_dim: int) -> None:
        """Take the conversion of a matmul's partial sums on `mesh_dim` into it."""
        value = Value(node.name)
        wants, layout = self.inputs[node.name], self.layouts[value]
        if node.name in self._done or layout[mesh_dim] != SUM or wants[matmul.weight][mesh_dim] != shard(matmul.k_dim):
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
        self.layouts[value] = _with(layout, mesh_dim, target)
        if value in self.shared_layouts and self.shared_layouts[value][mesh_dim] == SUM:
            self.shared_layouts[value] = _with(self.shared_layouts[value], mesh_dim, target)
        if matmul.bias is not None:
            self._want(node.name, matmul.bias, mesh_dim, REPLICATE if whole else PARTIAL_GRAD)
        operator = "matmul_all_reduce" if whole else "matmul_reduce_scatter"
        self._keep(RowKernel, [(node, matmul)], mesh_dim, None if whole else target.dim)
        moved = "" if whole else self._moved(node.outputs[0].shape, self.layouts[value], target)
        self.fused.append(Fusion(node.name, operator, f"its sum over {self._mesh.dim_names[mesh_dim]}{moved}"))

    def columns(self, matmuls: list[_Column], mesh_dim: int) -> None:
        """Take the conversions of matmuls' inputs to copies on `mesh_dim` into the matmuls."""
        by_input: dict[Value, list[_Column]] = {}
        for node, matmul in matmuls:
            wants = self.inputs[node.name]
            column = wants[matmul.x][mesh_dim] == PARTIAL_GRAD and wants[matmul.weight][mesh_dim] == shard(matmul.n_dim)
            if column and node.name not in self._done:
                by_input.setdefault(node.inputs[matmul.x], []).append((node, matmul))
        for value, found in by_input.items():
            self._columns_of(value, found, mesh_dim)

    def _columns_of(self, value: Value, found: list[_Column], mesh_dim: int) -> None:
        shared = self.shared_layouts.get(value)
        converted_once = shared is not None and shared[mesh_dim] == PARTIAL_GRAD
        source = self.layouts[value] if converted_once or shared is None else shared
        state = source[mesh_dim]
        if state == PARTIAL_GRAD or (state.kind != "shard" and value not in self._differentiable):
            return  # nothing is sent for it
        groups, new = self._alike(found), state if state.kind == "shard" else REPLICATE
        names = {node.name for node, _ in found}
        others = [(name, index) for name, index in self._readers[value] if name not in names]
        as_before = all(self.inputs[name][index][mesh_dim] == new for name, index in others)
        if converted_once and not (len(groups) == 1 and as_before):
            readers = ", ".join(name for name, _ in self._readers[value])
            self._refuse(found, f"its input is converted once for several readers ({readers}) that cannot run as one")
            return
        fused = [self._group(group, mesh_dim, state) for group in groups]
        if converted_once and all(fused):
            assert shared is not None
            self.shared_layouts[value] = _with(shared, mesh_dim, new)

    def _group(self, group: list[_Column], mesh_dim: int, state: Placement) -> bool:
        """Run columns that differ in their weights only as one; tell whether that can be."""
        node, matmul = group[0]
        reason = self._column_obstacle(node, matmul, mesh_dim, state)
        if reason:
            self._refuse(group, reason)
            return False
        rows = state.kind == "shard"
        for one, its in group:
            self._want(one.name, its.x, mesh_dim, state if rows else REPLICATE)
        self._keep(ColumnKernel, group, mesh_dim, state.dim if rows else None)
        what = "the gather of its rows" if rows else "in backward the sum of its input's gradient"
        operator = "all_gather_matmul" if rows else "matmul_all_reduce"
        others = f", one matmul with {', '.join(one.name for one, _ in group[1:])}" if len(group) > 1 else ""
        source = self.inputs[node.name][matmul.x]
        moved = self._moved(self._graph.meta(node.inputs[matmul.x]).shape, source, state) if rows else ""
        said = f"{what} over {self._mesh.dim_names[mesh_dim]}{moved}{others}"
        self.fused += [Fusion(one.name, operator, said) for one, _ in group]
        return True

    def _alike(self, found: list[_Column]) -> list[list[_Column]]:
        """Group columns of one input that can be one matmul, whose weights are there when the first one runs."""
        groups: dict[object, list[_Column]] = {}
        for node, matmul in found:
            wants = self.inputs[node.name]
            layouts = (wants[matmul.x], wants[matmul.weight], self.layouts[Value(node.name)])
            dtype = self._graph.meta(node.inputs[matmul.weight]).dtype
            key = (*(_other_dims(layouts, matmul)), matmul.bias is None, dtype)
            first = groups.setdefault(key, [])
            others = [value for index, value in enumerate(node.inputs) if index != matmul.x]
            late = first and any(self._order[value.node] > self._order[first[0][0].name] for value in others)
            groups.setdefault((key, node.name) if late else key, []).append((node, matmul))
        return list(groups.values())

    def _targets(self, value: Value, mesh_dim: int) -> set[Placement]:
        """Return to what a tensor is converted on `mesh_dim`; a copy is made of the whole without a collective."""
        shared = self.shared_layouts.get(value)
        if shared is not None and shared[mesh_dim] != SUM:
            found = {shared[mesh_dim]}
        else:
            found = {self.inputs[name][index][mesh_dim] for name, index in self._readers[value]}
        found |= {self._returned[value][mesh_dim]} if value in self._returned else set()
        return {REPLICATE if state == PARTIAL_GRAD else state for state in found}

    def _row_obstacle(self, node: Node, matmul: Matmul, mesh_dim: int, targets: set[Placement]) -> str:
        value = Value(node.name)
        if len(targets) > 1:
            return f"its partial sums are read as {' and '.join(sorted(map(str, targets)))}"
        (target,) = targets
        layout = _with(self.layouts[value], mesh_dim, target)
        if matmul.bias is not None and SUM in layout:
            return "it has a bias, and partial sums on another mesh dimension"
        if target == REPLICATE:
            return ""
        if target.kind != "shard":
            return f"its partial sums become {target}"
        return self._rows_obstacle(node.outputs[0].shape, layout, mesh_dim)

    def _column_obstacle(self, node: Node, matmul: Matmul, mesh_dim: int, state: Placement) -> str:
        if matmul.bias is not None and SUM in self.layouts[Value(node.name)]:
            return "it has a bias, and partial sums on another mesh dimension"
        if state.kind != "shard":
            return ""
        layout = _with(self.inputs[node.name][matmul.x], mesh_dim, state)
        return self._rows_obstacle(self._graph.meta(node.inputs[matmul.x]).shape, layout, mesh_dim)

    def _rows_obstacle(self, shape: tuple[int, ...], layout: Layout, mesh_dim: int) -> str:
        """Say why a tensor's slices cannot be gathered or scattered as rows; "" if they can."""
        dim, mesh_shape = layout[mesh_dim].dim, tuple(self._mesh.shape)
        if dim == len(shape) - 1:
            return f"{layout[mesh_dim]} cuts its features, not its rows"
        if not is_even(shape, layout, mesh_shape):
            return f"{layout[mesh_dim]} of {list(shape)} is not even"
        if layout[mesh_dim] in layout[mesh_dim + 1 :]:
            return f"dimension {dim} is cut again by a later mesh dimension"
        if not _ascending(self._mesh, mesh_dim):
            return f"the ranks along {self._mesh.dim_names[mesh_dim]} do not ascend"
        return ""

    def _moved(self, shape: tuple[int, ...], layout: Layout, rows: Placement) -> str:
        """Say that the rows have to be brought to the first dimension, where that is a copy."""
        mesh_shape = tuple(self._mesh.shape)
        before = local_shape(shape, layout, mesh_shape, [0] * len(mesh_shape))[: rows.dim]
        return f", transposed for {rows}" if any(size != 1 for size in before) else ""

    def _want(self, name: str, index: int, mesh_dim: int, state: Placement) -> None:
        wants = list(self.inputs[name])
        wants[index] = _with(wants[index], mesh_dim, state)
        self.inputs[name] = tuple(wants)

    def _keep(
        self, kind: type[ColumnKernel | RowKernel], group: list[_Column], mesh_dim: int, row_dim: int | None
    ) -> None:
        names = tuple(node.name for node, _ in group)
        matmuls = tuple(matmul for _, matmul in group)
        self._done |= set(names)
        self.kernels[names[0]] = kind(names, matmuls, self._mesh, mesh_dim, row_dim, self._settings)

    def _refuse(self, group: list[_Column], reason: str) -> None:
        self.fused += [Fusion(node.name, "", reason) for node, _ in group]


def _with(layout: Layout, mesh_dim: int, state: Placement) -> Layout:
    return (*layout[:mesh_dim], state, *layout[mesh_dim + 1 :])


def _other_dims(layouts: tuple[Layout, ...], matmul: Matmul) -> tuple[Layout, ...]:
    """Return layouts of x, weight and output, the weight's as of [N, K]."""
    x, weight, y = layouts
    if matmul.transposed:
        weight = tuple(shard(1 - state.dim) if state.kind == "shard" else state for state in weight)
    return x, weight, y


def _ascending(mesh: ProcessMesh, mesh_dim: int) -> bool:
    """Tell whether a group's order, by rank, is the mesh's."""
    step = 1
    for size in mesh.shape[mesh_dim + 1 :]:
        step *= size
    ranks, size = list(mesh.process_ids), mesh.shape[mesh_dim]
    starts = (start for start in range(len(ranks)) if (start // step) % size < size - 1)
    return all(ranks[start] < ranks[start + step] for start in starts)
