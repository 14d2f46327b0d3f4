"""Finds a layout for every tensor from the strategies of a few operators, at the least cost.

Minimises exactly the cost of all conversions, plus each rank's computing time with the objective "time". Where sums of
gradients run under the backward, the best of a few such optima is taken (under_backward.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER, Graph, Node, collector_paused
from ascend_parallel.sharding.layout import REPLICATE, Layout
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.batch_norms import with_batch_norms
from ascend_parallel.sharding.planner.operator_cost import seconds
from ascend_parallel.sharding.planner.operator_strategy import (
    OperatorStrategy,
    StrategyError,
    TensorPlacements,
    strategy,
)
from ascend_parallel.sharding.planner.options import Option, Options
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.planner.search_tables import SharedTables
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.planner.shared_sequences import check_exchange, sharing_of
from ascend_parallel.sharding.planner.under_backward import plan_under_backward
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.rules import has_rule
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware

log = logging.getLogger("ascend_parallel")

OBJECTIVES = ("redistribution", "time")
# What the command and Python plan with if nothing else is asked for.
OBJECTIVE = "time"
# Prices of a byte to try until a plan keeps the memory limit, each ten times the last; then steps of bisection.
FIRST_PRICE = 1e-15
PRICES = 12
# Namespaces of operators that communicate.
COLLECTIVES = ("ascend_parallel.", "_c10d_functional", "c10d", "_dtensor.")
BISECTIONS = 8


class MemoryLimitError(ValueError):
    """No plan was found within the memory limit."""


def propagate(
    graph: Graph,
    mesh: ProcessMesh,
    strategies: Mapping[str, object] | None = None,
    *,
    objective: str = OBJECTIVE,
    semi_auto: str | None = None,
    data_dim: str | None = None,
    sequence_dim: str | None = None,
    sequence_exchange: str | None = None,
    sequence_groups: int | None = None,
    expert_dim: str | None = None,
    only_data_cuts_batch: bool = False,
    memory_limit: float | None = None,
    batch_norm: str = "sync",
    hardware: str = DEFAULT_HARDWARE,
    costs: MeshCosts | None = None,
    overlap: bool | None = None,
    settings: Settings | None = None,
    shared: SharedTables | None = None,
) -> ShardingPlan:
    """Return a plan with a layout for every tensor of `graph` on `mesh`.

    graph
        Parameters and buffers that were DTensors when traced keep their placements (`Graph.placed`).
    strategies
        {pattern (`named_nodes`): an `OperatorStrategy`, or a pair (in_strategy, out_strategy) as `strategy` takes it}.
        Calls that no pattern names keep the strategy that `shard` gave their function, if any.
        No strategies with the objective "time" is the fully automatic mode.
    objective
        "time": the least time of a step, of conversions and of each rank's computation; finds a plan for any model
        without strategies. "redistribution": the least cost of conversions alone, as in MindSpore's Sharding
        Propagation. Configure all operators with weights, because running them whole on every rank costs no conversion.
    semi_auto
        The mesh dimension of data parallelism. Tensors that are not configured are sharded along it or not at all, as
        in MindSpore's semi-automatic mode; inputs are sharded there along their first dimension. Parameters of
        configured operators are held in the layout in which these read them.
    data_dim
        The mesh dimension of data parallelism without semi-automatic mode: tensors computed from the inputs are sharded
        there where possible, and parameters are whole there. The other mesh dimensions are unrestricted.
    sequence_dim
        The mesh dimension of context parallelism: as `data_dim`, but inputs are sharded there along their second
        dimension, the sequence. Attention then exchanges the sequence for the heads, or gathers keys and values.
    sequence_exchange, sequence_groups
        How attention does: "heads" or "gather", and in how many groups of heads, each under the attention of another.
        None: what takes least time; groups of the settings, one group without overlap.
    expert_dim
        The mesh dimension of expert parallelism; it may be `data_dim`. The batch is sharded there too, the experts of
        each `mixture_of_experts` lie in slices, and tokens go to their experts. Other parameters are whole there,
        unless a strategy shards them: experts that are written with a capacity need one.
    only_data_cuts_batch
        With `data_dim`: no mesh dimension but it and `expert_dim` shards the first dimension of a batch, unless a
        strategy does.
    memory_limit
        Bytes that a rank may hold in a training step (`ShardingPlan.memory`). The plan's `bound` is then a lower bound
        of the cost of all plans within the limit.
    batch_norm
        In training, where a batch norm's batch is sharded: "sync": the statistics are those of the whole batch, as on
        one card. "local": each rank's part has its own, as with torch's DDP; running statistics are averages.
    costs
        Costs of collectives; by default from `hardware`.
    overlap
        Objective "time": whether the plan will run overlapped. A collective next to a matmul then costs what stays
        exposed beside the matmul, in the chunks of the settings, and sums of gradients what the backward leaves of
        them; where a memory limit decides, sums cost their full time. None: if the settings ask for overlap.
    settings
        Settings of the overlapped operators. Default: the current settings (`ascend_parallel.configure`).
    shared
        Tables that other propagations use too: what they have in common is computed once.

    A search that comes to its limit of work returns the best plan so far, with its `bound`, and logs a warning; the
    limit is a count, no time, so all ranks return the same plan.

    Raises `StrategyError` for an invalid strategy, `ValueError` for a graph that contains collectives, and
    `MemoryLimitError` if no plan found keeps the limit.
    """
    if not isinstance(graph, Graph) or not isinstance(mesh, ProcessMesh):
        kinds = f"{type(graph).__name__} and {type(mesh).__name__}"
        raise TypeError(f"propagate takes a Graph (from trace) and a ProcessMesh, not {kinds}")
    if memory_limit is not None and not isinstance(memory_limit, (int, float)):
        raise TypeError(f"memory_limit={memory_limit!r}: give bytes, such as 32e9")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: give one of {', '.join(OBJECTIVES)}")
    if semi_auto is not None and semi_auto not in mesh.dim_names:
        raise ValueError(f"semi_auto={semi_auto!r}: give one of the mesh dimensions {', '.join(mesh.dim_names)}")
    if data_dim is not None and (semi_auto is not None or data_dim not in mesh.dim_names):
        raise ValueError(
            f"data_dim={data_dim!r}: give one of the mesh dimensions {', '.join(mesh.dim_names)}, and not semi_auto too"
        )
    if sequence_dim is not None and (sequence_dim in (data_dim, semi_auto) or sequence_dim not in mesh.dim_names):
        raise ValueError(
            f"sequence_dim={sequence_dim!r}: give one of the mesh dimensions {', '.join(mesh.dim_names)}, another than "
            "that of the data"
        )
    check_exchange(sequence_exchange, sequence_groups, shared=sequence_dim is not None)
    if sequence_dim is not None and semi_auto is not None:
        raise ValueError(f"sequence_dim={sequence_dim!r} with semi_auto={semi_auto!r}: give data_dim in its place")
    if expert_dim is not None and (expert_dim not in mesh.dim_names or expert_dim in (sequence_dim, semi_auto)):
        raise ValueError(
            f"expert_dim={expert_dim!r}: give one of the mesh dimensions {', '.join(mesh.dim_names)}, another than "
            "sequence_dim and semi_auto"
        )
    _check_operators(graph, mesh, hardware)
    graph = with_batch_norms(graph, batch_norm)
    configured, costs = _read(strategies or {}, mesh), costs or MeshCosts.of(mesh, hardware)
    settings, overlapped = settings or current_settings(), overlap_settings(overlap, settings)
    search = Search(
        graph,
        mesh,
        configured,
        objective,
        hardware,
        costs,
        semi_auto or data_dim,
        semi_auto is not None,
        sequence_dim,
        expert_dim,
        only_data_cuts_batch=only_data_cuts_batch,
        sharing=sharing_of(sequence_exchange, sequence_groups, settings, overlapped),
        overlap=overlapped,
        marked={**_placed(graph, mesh), **_marked(graph, mesh)},
        shared=shared or SharedTables(),
    )
    with collector_paused():
        plan = plan_under_backward(search) if search.overlaps else search.plan()
    if memory_limit is not None and plan.memory().total > memory_limit:
        plan = _within(search, memory_limit)
    warn_if_unproven(search, plan)
    return slice_replicated(plan)


def warn_if_unproven(search: Search, plan: ShardingPlan) -> None:
    """Log how much less than this plan another may cost, if the search has come to its limit of work."""
    if search.stopped and plan.bound is not None:
        log.warning(
            "the search for layouts came to its limit of work: its best plan takes %s ms, and no plan takes less "
            "than %s ms (%s less)",
            f"{1e3 * plan.cost:.4g}",
            f"{1e3 * plan.bound:.4g}",
            f"{1 - plan.bound / plan.cost:.1%}",
        )


def overlap_settings(overlap: bool | None = None, settings: Settings | None = None) -> Settings | None:
    """Return the settings whose overlap the prices of a plan know; None: collectives cost their full time.

    With COC_DETERMINISTIC=tp they do: a tree is slower than a sum after the matmul, which would have no tree.

    overlap: None: if the settings ask for overlap. settings: None: the current settings.
    """
    used = settings or current_settings()
    asked = used.effective_mode == 2 if overlap is None else overlap
    return used if asked and used.arithmetic.hides_sums else None


def _check_operators(graph: Graph, mesh: ProcessMesh, hardware: str) -> None:
    """Refuse collectives; warn of operators without a rule, with the time that every rank spends on them in a step."""
    unknown: dict[str, list[Node]] = {}
    for node in graph.nodes.values():
        if node.call is not None and node.call.name.startswith(COLLECTIVES):
            raise ValueError(
                f"{node.call.name} in {node.module or 'the model'} is a rank's part of a parallel model: trace the "
                "single-device model; the plan adds the collectives, and overlaps them"
            )
        if node.call is not None and not has_rule(node.call):
            unknown.setdefault(node.call.name, []).append(node)
    shape, model = mesh.shape, CostModel(find_hardware(hardware)) if unknown else None
    for name, nodes in unknown.items():
        assert model is not None
        took = sum(
            seconds(node.call, _whole(node, len(shape)), shape, model) for node in nodes if node.call is not None
        )
        where = f" in {nodes[0].module}" if nodes[0].module else ""
        log.warning(
            "%s%s has no sharding rule: it runs whole on every rank, %s, %.3f ms a step by the cost model of %s "
            "(register_rule adds a rule)",
            name,
            where,
            f"{len(nodes)} times" if len(nodes) > 1 else "once",
            1e3 * took,
            hardware,
        )


def _whole(node: Node, dims: int) -> Option:
    """Return the option of a call that every rank computes in full."""
    assert node.call is not None
    whole = (REPLICATE,) * dims
    return Option((whole,) * len(node.call.inputs), (whole,) * len(node.call.outputs))


def _read(strategies: Mapping[str, object], mesh: ProcessMesh) -> dict[str, OperatorStrategy]:
    return {pattern: _strategy(repr(pattern), written, mesh) for pattern, written in strategies.items()}


def _marked(graph: Graph, mesh: ProcessMesh) -> dict[str, OperatorStrategy]:
    """Return, by node, the strategies that `shard` left on calls of functions."""
    return {
        name: _strategy(f"{node.mark} in {node.module or 'the model'}", node.mark.strategies, mesh)
        for name, node in graph.nodes.items()
        if node.mark is not None
    }


def _placed(graph: Graph, mesh: ProcessMesh) -> dict[str, OperatorStrategy]:
    """Return, by node, the placements of parameters and buffers that were DTensors when traced."""
    sizes = tuple(mesh.sizes.items())
    found = {}
    for name, node in graph.nodes.items():
        placed = graph.placed.get(node.source) if node.kind in (PARAMETER, BUFFER) else None
        if placed is None:
            continue
        if placed.mesh != sizes:
            raise StrategyError(
                f"{node.source} is placed on a mesh of {dict(placed.mesh)}, and the plan is for {dict(sizes)}: plan "
                "for the mesh of the marks"
            )
        found[name] = OperatorStrategy((), (TensorPlacements(placed.placements),))
    return found


def _strategy(place: str, written: object, mesh: ProcessMesh) -> OperatorStrategy:
    if isinstance(written, OperatorStrategy):
        return written
    if not isinstance(written, tuple) or len(written) != 2:
        raise StrategyError(f"{place}: give a pair (in_strategy, out_strategy), not {written!r}")
    try:
        return strategy(written[0], written[1], mesh.sizes)
    except StrategyError as error:
        raise StrategyError(f"{place}: {error}") from error


def _within(search: Search, limit: float) -> ShardingPlan:
    """Return the plan at the least price of a byte at which it keeps the limit, with a lower bound of the cost.

    The plan that is best at a price p per byte minimises cost + p * bytes. So every plan within the limit costs at
    least that minimum - p * limit (Lagrangian relaxation; Everett 1963, doi:10.1287/opre.11.3.399).
    """
    base = search.problem()
    best: ShardingPlan | None = None
    bound, low, high, least = 0.0, FIRST_PRICE / 10, FIRST_PRICE, float("inf")
    for step in range(PRICES + BISECTIONS):
        if best is None and step == PRICES:
            raise MemoryLimitError(
                f"memory_limit={limit:.4g} bytes: the least that was found is {least:.4g} bytes a rank"
            )
        price = high if best is None else (low * high) ** 0.5
        chosen, sum_at_price = search.solved(search.problem(price))
        bound = max(bound, sum_at_price - price * limit)
        plan = search.plan_of(base, chosen)
        least = min(least, plan.memory().total)
        if plan.memory().total <= limit:
            best, high = plan, price
        else:
            low, high = price, high * 10 if best is None else high
    assert best is not None
    return replace(best, bound=bound)


def slice_replicated(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with replicated operators sharded whose readers all take the same slice. Does not modify `plan`.

    Conversions cost the same, and the plan needs less memory. Propagation replicates tensors without a gradient that
    are computed from replicated tensors only (ids, masks, positions): their slices cost nothing, and the choices of
    distant operators stay independent. Where all readers take the same slice, the operator can compute only that slice;
    MindSpore's manual configurations do the same.
    """
    layouts, inputs, sliced = dict(plan.layouts), dict(plan.inputs), set()
    readers, options = plan.graph.readers(), Options(plan.mesh.shape)
    kept = plan.graph.kept | set(plan.shared_layouts)
    for node in reversed(list(plan.graph.nodes.values())):
        if not _is_free(plan, node):
            continue
        common = []
        for value in node.values:
            read = {inputs[name][index] for name, index in readers[value]}
            common += list(read) if len(read) == 1 and value not in kept else []
        option = _option(options, node, tuple(common))
        if option is not None:
            layouts |= dict(zip(node.values, option.outputs, strict=True))
            inputs[node.name] = option.inputs
            sliced.add(node.name)
    return replace(plan, layouts=layouts, inputs=inputs, single=plan.single - sliced) if sliced else plan


def _is_free(plan: ShardingPlan, node: Node) -> bool:
    """Tell whether an operator is replicated with all its inputs, and has no gradient."""
    if node.kind != CALL or node.name in plan.configured:
        return False
    tensors = [*node.inputs, *node.values]
    if any(value in plan.differentiable for value in tensors):
        return False
    whole: Layout = (REPLICATE,) * plan.mesh.ndim
    return all(plan.layouts[value] == whole for value in tensors)


def _option(options: Options, node: Node, outputs: tuple[Layout, ...]) -> Option | None:
    """Return the option that produces `outputs` from replicated inputs or their slices; None if nothing is sharded."""
    sharded = any(placement.kind == "shard" for layout in outputs for placement in layout)
    if len(outputs) != len(node.outputs) or not sharded:
        return None
    for option in options.of(node, (False,) * (len(node.inputs) + 1)):
        free = all(placement.kind in ("replicate", "shard") for layout in option.inputs for placement in layout)
        if free and option.outputs == outputs:
            return option
    return None
