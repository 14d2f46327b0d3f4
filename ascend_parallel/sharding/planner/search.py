"""Turns a propagation into choices and costs (elimination.py), and their solution into a plan.

Every node of the graph chooses one of its options (options.py); a configured node among the options that match its
strategy. A tensor that is read in another layout than the layout in which it is produced is converted in forward, and
its gradient in backward. A tensor with several readers is converted once to a shared layout, which is a choice of its
own, and from there for each reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap

import numpy as np

from ascend_parallel.overlap.layer_shape import COLUMN, ROW
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Graph, Node, Value
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, Layout, Placement, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.edge_costs import EdgeEnd, FusibleMatmul, GatheredGroup
from ascend_parallel.sharding.planner.elimination import AssignmentProblem, Costs, TooWideError, solve
from ascend_parallel.sharding.planner.operator_cost import op_collective_steps
from ascend_parallel.sharding.planner.operator_cost import seconds as seconds_of
from ascend_parallel.sharding.planner.operator_strategy import OperatorStrategy, fitting, named_nodes
from ascend_parallel.sharding.planner.options import (
    Option,
    data_parallel_options,
    differentiable_values,
    expert_options,
    is_whole,
    signature,
    with_batch_cut_only_by,
    without_partials,
)
from ascend_parallel.sharding.planner.overlapped_matmul import (
    ColumnGroup,
    MatmulInputs,
    column_group,
    column_obstacle,
    matmul_of,
    reads_columns,
    row_obstacle,
    sums_rows,
)
from ascend_parallel.sharding.planner.pruning import solved_by_pruning
from ascend_parallel.sharding.planner.search_tables import SharedTables
from ascend_parallel.sharding.planner.sharding_plan import ADAM, ShardingPlan
from ascend_parallel.sharding.planner.shared_sequences import (
    exchange_prices,
    settled,
    shared_options,
    with_shared_sequences,
)
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware, find_hardware


def readers_of_marked_weights(
    graph: Graph, options: Mapping[str, Sequence[Option]], configured: Collection[str]
) -> set[str]:
    """Return the operators whose computing time counts with any objective: they read a weight that is marked.

    The weight lies in slices because the user wants it there. Gathering it, to compute the operator in full on every
    rank, has to be worth that time. Operators that read the weight alone (a transpose, a cast) pass it on.
    """
    weights = (node.name for node in graph.of_kind(PARAMETER) if node.name in configured)
    waiting = [name for name in weights if all(map(_shards, options[name]))]
    found, readers = set[str](), graph.readers()
    while waiting:
        for value in graph.nodes[waiting.pop()].values:
            for reader, _ in readers.get(value, ()):
                alone = len(graph.nodes[reader].inputs) == 1 and reader not in found
                found.add(reader)
                waiting += [reader] if alone else []
    return found


def _shards(option: Option) -> bool:
    return any(placement.kind == "shard" for layout in option.outputs for placement in layout)


# Seconds per byte that a rank holds: decides only between equal costs.
TIE_BREAK = 1e-21
# An operator without gradient is worth a choice if it takes more than these seconds whole.
WORTH_SHARDING = 1e-4
# Of the cost: a lower bound that is less below it proves it.
PROVEN = 1e-9
# The dimension of the inputs that is the sequence, after the batch.
SEQUENCE = 1


@dataclass
class Search:
    """A propagation: its assignment problem, and the plan of the solution.

    data, sequence, experts: the mesh dimensions that `propagate` calls data_dim (or semi_auto), sequence_dim and
    expert_dim. semi_auto: whether `data` is that of the semi-automatic mode.
    sharing: how attention exchanges a shared sequence, and in how many groups, "" and 0 where the search chooses by
    price; None: no attention exchanges.
    marked: strategies of nodes, used for nodes that no pattern of `strategies` names.
    overlap: the settings by which matmuls run with their collectives, which then cost what stays exposed (objective
    "time"); None: each collective costs its full time.
    shared: tables of other searches too.
    stopped: whether the search for the best choices of a problem has come to its limit of work.
    """

    graph: Graph
    mesh: ProcessMesh
    strategies: Mapping[str, OperatorStrategy]
    objective: str
    hardware: str | Hardware
    costs: MeshCosts
    data: str | None = None
    semi_auto: bool = False
    sequence: str | None = None
    experts: str | None = None
    sharing: tuple[str, int] | None = None
    only_data_cuts_batch: bool = False
    configured: dict[str, str] = field(default_factory=dict)
    marked: Mapping[str, OperatorStrategy] = field(default_factory=dict)
    overlap: Settings | None = None
    shared: SharedTables = field(default_factory=SharedTables)
    stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Find the options of every node, restricted by the strategies."""
        self._shape = self.mesh.shape
        if self.sequence is not None and self.sharing is not None:
            self.graph = with_shared_sequences(self.graph, self.mesh.size(self.sequence), *self.sharing)
        tables = self.shared.of(self.mesh, self.costs, self.objective, self.hardware, self.overlap)
        self._exposed, self.edges, self._interned = tables.exposed, tables.edges, tables.interned
        self._model = CostModel(find_hardware(self.hardware))
        self.differentiable = differentiable_values(self.graph)
        self.options: dict[str, Sequence[Option]] = {
            name: tables.options.of(node, self._gradients(node)) for name, node in self.graph.nodes.items()
        }
        for pattern, strategy in self.strategies.items():
            for node in named_nodes(self.graph, pattern):
                self.options[node.name] = fitting(node, self.options[node.name], strategy, self._shape)
                self.configured[node.name] = pattern
        for name, strategy in self.marked.items():
            if name not in self.configured:
                node = self.graph.nodes[name]
                self.options[name] = fitting(node, self.options[name], strategy, self._shape)
                self.configured[name] = str(node.mark or f"shard_tensor({node.source})")
        free = set(self.configured)
        if self.experts is not None:
            along = self.mesh.dim(self.experts)
            self.options, weights = expert_options(self.graph, self.options, along)
            if self.experts == self.data:
                free |= weights
            else:
                self.options = data_parallel_options(self.graph, self.options, free | weights, False, along)
        if self.data is not None:
            data = self.mesh.dim(self.data)
            self.options = data_parallel_options(self.graph, self.options, free, self.semi_auto, data)
            if self.only_data_cuts_batch:
                cut_by = {data} if self.experts is None else {data, self.mesh.dim(self.experts)}
                self.options = with_batch_cut_only_by(self.graph, self.options, self.configured, cut_by)
        if self.sequence is not None:
            along = self.mesh.dim(self.sequence)
            self.options = data_parallel_options(self.graph, self.options, self.configured, False, along, SEQUENCE)
            self.options = shared_options(self.graph, self.options, self.configured, along, self._shape)
        self._drop_averages()
        self.readers = self.graph.readers()
        self._returned = frozenset(self.graph.returned)
        self._order = {name: place for place, name in enumerate(self.graph.nodes)}
        self._timed = readers_of_marked_weights(self.graph, self.options, self.configured)
        self._fixed: set[str] = set()
        self._fix_replicated()
        self._known = {name: self._interned.options(options) for name, options in self.options.items()}

    def _drop_averages(self) -> None:
        """Drop options that read a tensor as an average over ranks which no option produces as an average."""
        averages: set[Value] = set()
        for node in self.graph.nodes.values():
            can_be = tuple(value in averages for value in node.inputs)
            options = self._interned.options(self.options[node.name])
            kept, produced = self._interned.result(
                ("averages", can_be), (options,), partial(_without_averages, options, can_be)
            )
            self.options[node.name] = kept
            averages |= {Value(node.name, index) for index in produced}

    def _fix_replicated(self) -> None:
        """Replicate nodes that depend on no parameter: without a gradient, any reader slices them at no cost.

        Fewer choices remain, and tensors that all layers read (rotary angles, masks) do not connect the layers'
        choices. No node reads a replicated tensor as partial either.
        """
        for node in self.graph.nodes.values():
            if node.name in self.configured or node.kind == PARAMETER:
                continue
            whole = [value.node in self._fixed for value in node.inputs]
            if any(whole):
                self.options[node.name] = without_partials(self.options[node.name], whole) or self.options[node.name]
            if not is_whole(self.options[node.name][0]):
                continue  # semi-automatic mode shards the node
            if all(value.node in self._fixed for value in node.inputs) and not self._is_worth_sharding(node):
                self.options[node.name] = self.options[node.name][:1]
                self._fixed.add(node.name)

    def _is_worth_sharding(self, node: Node) -> bool:
        """Tell whether a node can be sharded and takes long if every rank computes it in full (objective "time")."""
        if self.objective == "redistribution" or node.kind != CALL:
            return False
        whole, *rest = (self._own_cost(node, option) for option in self.options[node.name])
        return bool(rest) and whole > WORTH_SHARDING

    def problem(self, price: float = 0.0) -> AssignmentProblem:
        """Return the choices and their costs; nodes are choices by name, shared layouts by `_shared_name`.

        price: seconds per byte that a rank holds in a training step, added to all other costs.
        """
        problem = AssignmentProblem()
        for node in self.graph.nodes.values():
            costs = self._own_costs(node)
            problem.add(node.name, costs + price * self.bytes_held(node) if price else costs)
        for value, readers in self.readers.items():
            source, ends = value.node, self._sources(value)
            if self._has_shared(value, readers):
                source, ends = self._add_shared(problem, value, readers)
            for name, index in readers:
                problem.add_pair(source, name, self._reader_costs(value, ends, name, index))
        whole = (EdgeEnd((REPLICATE,) * len(self._shape)),)
        for value in self.graph.returned:
            matrix = self._matrix(value, self._sources(value), whole)
            problem.own[value.node] = problem.own[value.node] + matrix[:, 0]
        return problem

    def bytes_held(self, node: Node) -> Costs:
        """Return, by option, the bytes that `ShardingPlan.memory` counts for a node."""
        nbytes = np.zeros(len(self.options[node.name]))
        for value, meta in zip(node.values, node.outputs, strict=True):
            kept = node.kind == CALL and value in self.differentiable
            if kept or node.kind in (PARAMETER, BUFFER):
                times = 2 + ADAM / meta.dtype.itemsize if node.kind == PARAMETER else 1.0
                nbytes += [times * meta.local_bytes(layout, self._shape) for layout in self.produced(value)]
        return nbytes

    def solved(self, problem: AssignmentProblem) -> tuple[dict[str, int], float]:
        """Return the best choices and a lower bound of the cost, which equals their cost where that is proven."""
        try:
            chosen = solve(problem)
            return chosen, problem.cost(chosen)
        except TooWideError:
            found = solved_by_pruning(problem)
            self.stopped |= found.bound < found.cost * (1 - PROVEN)
            return dict(found.chosen), found.bound

    @property
    def overlaps(self) -> bool:
        """Whether collectives cost what stays exposed."""
        return self._exposed is not None

    def conversions(self, value: Value) -> Iterator[tuple[str, str, tuple[Layout, ...], tuple[Layout, ...]]]:
        """Yield the conversions of a tensor for its readers: the choices at both ends, and the layouts of each."""
        readers, source, held = self.readers[value], value.node, self.produced(value)
        if self._has_shared(value, readers):
            shared = tuple(end.layout for end in self._shared(value, readers))
            yield source, _shared_name(value), held, shared
            source, held = _shared_name(value), shared
        for name, index in readers:
            yield source, name, held, self._interned.inputs(self._known[name], index)

    def plan(self, problem: AssignmentProblem | None = None) -> ShardingPlan:
        """Return the plan of the best choices, with sums of gradients that cost their full time.

        problem: that of other costs. Default: the search's own.
        """
        problem = self.problem() if problem is None else problem
        chosen, bound = self.solved(problem)
        cost = problem.cost(chosen)
        return self.plan_of(problem, chosen, None if cost <= bound * (1 + PROVEN) else bound)

    def plan_of(
        self, problem: AssignmentProblem, chosen: Mapping[str, int], bound: float | None = None
    ) -> ShardingPlan:
        """Return the plan of these choices."""
        picked = {name: self.options[name][chosen[name]] for name in self.graph.nodes}
        layouts = {
            Value(name, index): layout for name, option in picked.items() for index, layout in enumerate(option.outputs)
        }
        shared = {
            value: self._shared(value, readers)[chosen[_shared_name(value)]].layout
            for value, readers in self.readers.items()
            if self._has_shared(value, readers)
        }
        return ShardingPlan(
            graph=settled(self.graph, picked, self.costs, self._model, computes=self._computes),
            mesh=self.mesh,
            costs=self.costs,
            objective=self.objective,
            layouts=layouts,
            inputs={name: option.inputs for name, option in picked.items()},
            shared_layouts=shared,
            differentiable=self.differentiable,
            configured=self.configured,
            single={name for name, options in self.options.items() if len(options) == 1},
            cost=problem.cost(chosen),
            bound=bound,
            overlap=None if self._exposed is None else self.overlap,
        )

    def _gradients(self, node: Node) -> tuple[bool, ...]:
        """Tell whether each input has a gradient, and then whether the outputs have."""
        outputs = not self.differentiable.isdisjoint(node.values)
        return (*(value in self.differentiable for value in node.inputs), outputs)

    def _has_shared(self, value: Value, readers: Sequence[tuple[str, int]]) -> bool:
        """Tell whether a tensor gets a shared layout: it has several readers and is not fixed."""
        return len(readers) > 1 and value.node not in self._fixed

    def produced(self, value: Value) -> tuple[Layout, ...]:
        """Return the layouts in which a tensor can be produced."""
        return self._interned.outputs(self._known[value.node], value.index)

    def _add_shared(
        self, problem: AssignmentProblem, value: Value, readers: Sequence[tuple[str, int]]
    ) -> tuple[str, tuple[EdgeEnd, ...]]:
        """Add the choice of a tensor's shared layout with the conversion to it; return its name and candidates."""
        ends, shared, meta = self._shared(value, readers), _shared_name(value), self.graph.meta(value)
        costs = self._interned.result(
            ("bytes", meta),
            (ends,),
            lambda: np.array([TIE_BREAK * meta.local_bytes(end.layout, self._shape) for end in ends]),
        )
        problem.add(shared, costs)
        problem.add_pair(value.node, shared, self._matrix(value, self._sources(value), ends))
        return shared, ends

    def _shared(self, value: Value, readers: Sequence[tuple[str, int]]) -> tuple[EdgeEnd, ...]:
        """Return the candidates for a tensor's shared layout: the layouts in which it is produced or read.

        Where all matmuls that read it can run as one with its gather, that is a candidate of its own: it costs what
        stays exposed, and allows only the options of readers that run so.
        """
        known = [self._known[name] for name, _ in readers]
        kind = tuple(index for _, index in readers), value.index, value in self.differentiable
        late = self._is_late(readers)

        def compute() -> tuple[EdgeEnd, ...]:
            read = (
                option.inputs[index] for (_, index), options in zip(readers, known, strict=True) for option in options
            )
            layouts = dict.fromkeys(chain(self.produced(value), read))
            return (*map(EdgeEnd, layouts), *(() if late else self._groups(value, readers)))

        return self._interned.result(("shared", kind, late), (self._known[value.node], *known), compute)

    def _is_late(self, readers: Sequence[tuple[str, int]]) -> bool:
        """Tell whether matmuls cannot run as one, at the first of them: another input of theirs is computed later."""
        names = [name for name, index in readers if self._reads_as_x(name, index)]
        inputs = (value.node for name in names for value in self.graph.nodes[name].inputs)
        return bool(names) and any(self._order[name] > self._order[names[0]] for name in inputs)

    def _reads_as_x(self, name: str, index: int) -> bool:
        matmul = self._matmul(self.graph.nodes[name])
        return matmul is not None and matmul.x == index

    def _groups(self, value: Value, readers: Sequence[tuple[str, int]]) -> Iterator[EdgeEnd]:
        """Yield the ways in which all matmuls that read a tensor run as one with its gather, or its gradient's sum."""
        members = [name for name, index in readers if self._reads_as_x(name, index)]
        if self._exposed is None or not members:
            return
        for mesh_dim, size in enumerate(self._shape):
            if size == 1 or not self._exposed.knows(mesh_dim):
                continue
            ways = [self._columns(self.graph.nodes[name], mesh_dim) for name in members]
            for group, matmul in ways[0].items():
                if not all(group in way for way in ways):
                    continue
                joined = matmul.shape._replace(n=sum(way[group].shape.n for way in ways))
                for placement in matmul.placements:
                    if self._others_read(readers, members, mesh_dim, placement):
                        one = FusibleMatmul(joined, mesh_dim, frozenset((placement,)))
                        yield EdgeEnd(group.read, (one,), GatheredGroup(mesh_dim, placement, group))

    def _others_read(
        self, readers: Sequence[tuple[str, int]], members: Sequence[str], mesh_dim: int, placement: Placement
    ) -> bool:
        """Tell whether all readers beside `members` can read a tensor that is `placement` on a mesh dimension."""
        return all(
            name in members or any(option.inputs[index][mesh_dim] == placement for option in self._known[name])
            for name, index in readers
        )

    def _columns(self, node: Node, mesh_dim: int) -> dict[ColumnGroup, FusibleMatmul]:
        """Return, by what makes matmuls run as one, those of a node's options that read columns along `mesh_dim`."""
        return self._interned.result(
            ("columns", signature(node), mesh_dim),
            (self._known[node.name],),
            lambda: {
                self._group(node, option): matmul
                for option, end in zip(self._known[node.name], self._column_ends(node), strict=True)
                for matmul in end.matmuls
                if matmul.mesh_dim == mesh_dim
            },
        )

    def _group(self, node: Node, option: Option) -> ColumnGroup:
        matmul = self._matmul(node)
        assert matmul is not None and node.call is not None
        return column_group(matmul, option.inputs, option.outputs[0], node.call.inputs[matmul.weight].dtype)

    def _reader_costs(self, value: Value, ends: tuple[EdgeEnd, ...], name: str, index: int) -> Costs:
        """Return the costs from a tensor's layouts, or shared layouts, to the options of a reader."""
        node = self.graph.nodes[name]
        targets = self._targets(value, node, index)
        if not any(end.group for end in ends):
            return self._matrix(value, ends, targets)
        return self._interned.result(
            ("of a group", self.graph.meta(value), value in self.differentiable, signature(node), index),
            (ends, targets),
            lambda: self._group_costs(value, ends, node, index, targets),
        )

    def _group_costs(
        self, value: Value, ends: tuple[EdgeEnd, ...], node: Node, index: int, targets: tuple[EdgeEnd, ...]
    ) -> Costs:
        """Return the costs to a reader, with only the options that run as each group does."""
        costs: Costs = self._matrix(value, tuple(EdgeEnd(end.layout) for end in ends), targets).copy()
        options, member = self._known[node.name], self._reads_as_x(node.name, index)
        known = [self._group(node, option) for option in options] if member else []
        for place, end in enumerate(ends):
            group = end.group
            if group is None:
                continue
            if member:
                fits = [columns == group.columns for columns in known]
            else:
                fits = [option.inputs[index][group.mesh_dim] == group.placement for option in options]
            costs[place, ~np.array(fits)] = np.inf
        return costs

    def _matmul(self, node: Node) -> MatmulInputs | None:
        """Return the operands of a matmul that may run with a collective."""
        return None if node.call is None or self._exposed is None else matmul_of(node.call)

    def _sources(self, value: Value) -> tuple[EdgeEnd, ...]:
        """Return the layouts in which a tensor is produced, with the matmuls that can sum it."""
        node, options = self.graph.nodes[value.node], self._known[value.node]
        read_once = bool(self.readers.get(value)) != (value in self._returned)
        return self._interned.result(
            ("sources", value.index, read_once),
            (options,),
            lambda: tuple(
                EdgeEnd(option.outputs[value.index], self._row_matmul(node, option) if read_once else ())
                for option in options
            ),
        )

    def _row_matmul(self, node: Node, option: Option) -> tuple[FusibleMatmul, ...]:
        """Return the matmul of an option that leaves partial sums, and the placements to which it can sum them."""
        matmul = self._matmul(node)
        if matmul is None or node.call is None or self._exposed is None:
            return ()
        shape, output = node.outputs[0].shape, option.outputs[0]
        for mesh_dim, size in enumerate(self._shape):
            if size > 1 and sums_rows(matmul, option.inputs, output, mesh_dim) and self._exposed.knows(mesh_dim):
                placements = frozenset(
                    placement
                    for placement in (REPLICATE, *map(shard, range(len(shape))))
                    if not row_obstacle(matmul, shape, output, self.mesh, mesh_dim, placement)
                )
                local = self._exposed.shape(ROW, node.call, matmul, option.inputs, mesh_dim)
                return (FusibleMatmul(local, mesh_dim, placements),)
        return ()

    def _targets(self, value: Value, node: Node, index: int) -> tuple[EdgeEnd, ...]:
        """Return the layouts in which a node reads a tensor, with the matmuls that can gather it.

        Of several matmuls that read the tensor, none gathers it alone: they run as one (`_groups`).
        """
        options = self._known[node.name]
        if self._reads_as_x(node.name, index) and sum(starmap(self._reads_as_x, self.readers[value])) == 1:
            return self._column_ends(node)
        return self._interned.result(
            ("targets", index), (options,), lambda: tuple(EdgeEnd(option.inputs[index]) for option in options)
        )

    def _column_ends(self, node: Node) -> tuple[EdgeEnd, ...]:
        """Return the layouts in which a matmul reads x, with the matmuls that can gather it, or sum its gradient."""
        matmul, options = self._matmul(node), self._known[node.name]
        assert matmul is not None
        return self._interned.result(
            "column ends",
            (options,),
            lambda: tuple(EdgeEnd(option.inputs[matmul.x], self._column_matmuls(node, option)) for option in options),
        )

    def _column_matmuls(self, node: Node, option: Option) -> tuple[FusibleMatmul, ...]:
        """Return the matmul of an option by the mesh dimensions along which its weight has columns."""
        matmul = self._matmul(node)
        assert matmul is not None and node.call is not None and self._exposed is not None
        shape, read, output = node.call.inputs[matmul.x].shape, option.inputs[matmul.x], option.outputs[0]
        dims = [dim for dim, size in enumerate(self._shape) if size > 1 and self._exposed.knows(dim)]
        if any(sums_rows(matmul, option.inputs, output, dim) for dim in dims):
            return ()
        return tuple(
            FusibleMatmul(
                self._exposed.shape(COLUMN, node.call, matmul, option.inputs, dim),
                dim,
                frozenset(
                    placement
                    for placement in (REPLICATE, *map(shard, range(len(shape))))
                    if not column_obstacle(matmul, shape, read, output, self.mesh, dim, placement)
                ),
            )
            for dim in dims
            if reads_columns(matmul, option.inputs, dim)
        )

    def _matrix(self, value: Value, sources: tuple[EdgeEnd, ...], targets: tuple[EdgeEnd, ...]) -> Costs:
        meta, differentiable = self.graph.meta(value), value in self.differentiable
        return self._interned.result(
            ("matrix", meta, differentiable),
            (sources, targets),
            lambda: self.edges.matrix(meta, sources, targets, differentiable),
        )

    def _own_costs(self, node: Node) -> Costs:
        options, timed = self._known[node.name], node.name in self._timed
        return self._interned.result(
            ("own", signature(node), timed),
            (options,),
            lambda: np.array([self._own_cost(node, each) for each in options]),
        )

    def computation(self, node: Node) -> Costs:
        """Return the seconds of a call's computation, by option."""
        call, options = node.call, self._known[node.name]
        assert call is not None
        return self._interned.result(
            ("computation", signature(node)),
            (options,),
            lambda: np.array([seconds_of(call, each, self._shape, self._model) for each in options]),
        )

    @property
    def _computes(self) -> bool:
        """Whether computation counts."""
        return self.objective == "time"

    def _own_cost(self, node: Node, option: Option) -> float:
        nbytes = sum(meta.local_bytes(out, self._shape) for meta, out in zip(node.outputs, option.outputs, strict=True))
        cost = TIE_BREAK * nbytes
        if node.call is not None and (
            prices := exchange_prices(node.call, option, self.costs, self._model, computes=self._computes)
        ):
            return cost + prices[0].forward + prices[0].backward
        if node.call is not None:
            cost += sum(step.seconds for step in op_collective_steps(node.call, option.inputs, self.costs))
        if node.call is not None and (self.objective == "time" or node.name in self._timed):
            cost += seconds_of(node.call, option, self._shape, self._model)
        return cost


def _without_averages(options: Sequence[Option], can_be: Sequence[bool]) -> tuple[tuple[Option, ...], tuple[int, ...]]:
    """Return the options that read averages only where `can_be` allows them, and the outputs that can be averages."""
    kept = tuple(
        option
        for option in options
        if all(average or AVERAGE not in layout for average, layout in zip(can_be, option.inputs, strict=True))
    )
    produced = {index for option in kept for index, layout in enumerate(option.outputs) if AVERAGE in layout}
    return kept, tuple(produced)


def _shared_name(value: Value) -> str:
    return f"shared layout of {value.node} {value.index}"
