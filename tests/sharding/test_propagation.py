"""From a few configured operators to the layouts of all: against Megatron-core's plan, the optimum and the baseline."""

import collections
import itertools

import pytest
import torch
from pairwise import pairwise
from small_models import GPT, Bert, Llama, ResNet
from torch import nn
from torch.distributed.tensor import Replicate

from ascend_parallel import Settings
from ascend_parallel.sharding import explain
from ascend_parallel.sharding.graph import CALL, PARAMETER, Value
from ascend_parallel.sharding.layout import REPLICATE, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.integer_program import optimum
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, strategy
from ascend_parallel.sharding.planner.propagate import MemoryLimitError, propagate
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.planner.search_tables import SharedTables
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.tracing.trace import trace


def mesh(**sizes):
    shape = tuple(sizes.values())
    return ProcessMesh(torch.arange(int(torch.tensor(shape).prod())).view(shape).tolist(), list(sizes))


# Sizes of real layers, on the meta device: with small ones every collective costs its latency, whatever it moves.
TOKENS = torch.zeros(4, 512, dtype=torch.long, device="meta")
WIDE = {"width": 1024, "heads": 16, "vocabulary": 32000, "length": 512}
MODELS = {
    "llama": (Llama, {**WIDE, "groups": 8, "wide": 2816}, (TOKENS, TOKENS)),
    "gpt": (GPT, WIDE, (TOKENS, TOKENS)),
    "bert": (Bert, WIDE, (TOKENS, torch.ones(4, 512, dtype=torch.bool, device="meta"), TOKENS[:, 0])),
    "resnet": (ResNet, {"channels": 256, "classes": 1024}, (torch.zeros(32, 3, 32, 32, device="meta"), TOKENS[0, :32])),
}
GRAPHS = {}


def graph_of(name):
    if name not in GRAPHS:
        kind, options, args = MODELS[name]
        with torch.device("meta"):
            GRAPHS[name] = trace(kind(**options), args)
    return GRAPHS[name]


def layouts(plan, pattern):
    """The layouts of inputs and outputs of the operators a pattern names, as text."""
    rows = []
    for node in named_nodes(plan.graph, pattern):
        inputs = ["".join(map(str, layout)) for layout in plan.inputs[node.name]]
        outputs = ["".join(map(str, plan.layouts[Value(node.name, i)])) for i in range(len(node.outputs))]
        rows.append((*inputs, *outputs))
    return rows


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_column_then_row_needs_one_reduction_each_way():
    plan = propagate(
        trace(Two(), (torch.zeros(2048, 1024),)),
        mesh(mp=2),
        {"up": ([None, ("mp", 1)], None)},
        objective="redistribution",
    )
    assert layouts(plan, "up") == [("R", "S(0)", "S(1)")]
    assert layouts(plan, "down") == [("S(1)", "S(1)", "P(sum)")]
    assert plan.collectives() == {"all_reduce": 1}  # the input of the model has no gradient
    assert "configured: up" in explain(plan)


def test_the_published_derivation():
    """Paddle 3.0: B cut by rows, A replicated: A is cut by columns, C is partial, D = relu(C) reduces it first."""

    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(4096, 1024))

        def forward(self, a):
            return torch.relu(a @ self.b)

    graph = trace(Derived(), (torch.zeros(2048, 4096),))
    strategies = {"weights:b": (None, [("x", 1)]), "inputs:a": (None, [(1, 1)])}
    plan = propagate(graph, mesh(x=2), strategies, objective="time")
    assert layouts(plan, ":matmul") == [("S(1)", "S(0)", "P(sum)")]
    assert layouts(plan, ":relu") == [("R", "R")]
    assert [conversion.ahead.steps[0].kind for conversion in plan.conversions] == ["slice", "all_reduce"]


# The residual stream of every layer, its two additions: whole, or cut along the sequence.
STREAM = {
    "tensor": ({"layers.*:add": (None, [[Replicate()]])}, {"all_reduce": 2}, {"all_reduce": 2}),
    "sequence": (
        {"layers.*:add": (None, [(1, "mp", 1)])},
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 2, "reduce_scatter": 2},
    ),
}
LINEARS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")


@pytest.mark.parametrize("parallelism", STREAM)
def test_two_configured_operators_a_layer_give_megatrons_plan(parallelism):
    """The plan shards the linear layers as Megatron-core does, with collectives of the same number, kind and size.

    Without sequence parallelism attention.o ties: two all-gathers around columns cost what an all-reduce of rows does.
    """
    configured, ahead, back = STREAM[parallelism]
    of_rows = {"layers.*.attention.o": ([None, (1, "mp")], None)} if parallelism == "tensor" else {}
    with torch.device("meta"):
        model = Llama(layers=3, width=4096, heads=32, groups=8, wide=11008, vocabulary=32000, length=2048)
    tokens = torch.zeros(2, 2048, dtype=torch.long, device="meta")
    graph = trace(model.bfloat16(), (tokens, tokens))
    plan = propagate(graph, mesh(mp=8), configured | of_rows, objective="time")
    if of_rows:
        assert propagate(graph, mesh(mp=8), configured, objective="time").cost == pytest.approx(plan.cost, rel=1e-9)
    for name in LINEARS:
        assert layouts(plan, f"layers.*.{name}") == [("R*", "S(0)", "S(2)")] * 3, name
    for name in ("attention.o", "mlp.down"):
        assert layouts(plan, f"layers.*.{name}") == [("S(2)", "S(1)", "P(sum)")] * 3, name
    # Of the middle layer, what moves activations: [2, 2048, 4096] in bf16, 1/8 of it for each of 7 others.
    inside = [
        conversion
        for conversion in plan.conversions
        if "layers.1." in where(plan, conversion) and conversion.nbytes > 1e6
    ]
    for direction, expected in (("ahead", ahead), ("back", back)):
        steps = [step for conversion in inside for step in getattr(conversion, direction).steps if step.nbytes]
        kinds = [step.kind for step in steps]
        assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == expected
        assert {step.nbytes for step in steps} == {2 * 2048 * 4096 * 2 * 7 / 8 * (2 if "all_reduce" in expected else 1)}


def where(plan, conversion):
    """Return the modules that read the converted tensor, or the producer if it is attention.o or mlp.down."""
    readers = [plan.graph.nodes[name].module for name in conversion.reader.split(", ") if name]
    own = plan.graph.nodes[conversion.value.node].module
    return " ".join([own] if "attention.o" in own or "mlp.down" in own else readers) + "."


LAYER = {
    "layers.*.attention.o": ([None, (1, "mp")], None),
    "layers.*.mlp.down": ([None, (1, "mp")], None),
}
CONFIGURED = {
    "llama": LAYER,
    "gpt": {"layers.*.up": ([None, ("mp", 1)], None), "layers.*.o": ([None, (1, "mp")], None)},
    "bert": {"up": ([None, ("mp", 1)], None), "o": ([None, (1, "mp")], None)},
    "resnet": {"conv1": ([("mp", 1, 1, 1), None], None), "head": ([None, (1, "mp")], None)},
}


def written_for(strategies, on):
    """Return the strategies as an operator's, by pattern."""
    return {pattern: strategy(*written, on.sizes) for pattern, written in strategies.items()}


def breadth_first(problem, start):
    """Propagate as MindSpore does: outward from `start`, each choice by its own cost and the edge to it."""
    near = {name: [] for name in problem.sizes}
    for (first, second), costs in problem.pairs.items():
        near[first].append((second, costs))
        near[second].append((first, costs.T))
    chosen = {}
    queue = collections.deque()

    def decide(name, costs):
        if name not in chosen:
            chosen[name] = int(costs.argmin())
            queue.append(name)

    for name in start:
        decide(name, problem.own[name])
    for name in problem.sizes:  # what nothing configured reaches begins by itself
        decide_all(queue, near, chosen, problem, decide)
        decide(name, problem.own[name])
    decide_all(queue, near, chosen, problem, decide)
    return chosen


def decide_all(queue, near, chosen, problem, decide):
    """Spread from the queue."""
    while queue:
        name = queue.popleft()
        for other, costs in near[name]:
            decide(other, problem.own[other] + costs[chosen[name]])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "sizes", "objective"),
    pairwise(MODELS, [{"mp": 2}, {"dp": 2, "mp": 2}], ["redistribution", "time"]),
    ids=str,
)
def test_no_plan_costs_less(name, sizes, objective):
    """HiGHS solves the same problem as an integer program; breadth-first propagation never does better."""
    on = mesh(**sizes)
    strategies = CONFIGURED[name] if objective == "redistribution" else {}
    search = Search(graph_of(name), on, written_for(strategies, on), objective, "910b", MeshCosts.of(on, "910b"))
    problem, plan = search.problem(), search.plan()
    assert plan.bound is None
    solution = optimum(problem)
    assert solution.bound == pytest.approx(solution.cost, rel=1e-6)
    assert plan.cost == pytest.approx(solution.cost, rel=1e-9, abs=1e-15)
    spread = breadth_first(problem, [name for name in problem.sizes if name in search.configured])
    assert plan.cost <= problem.cost(spread) * (1 + 1e-12)


def test_semi_automatic_mode_cuts_the_rest_along_the_data_alone():
    configured = {"layers.*.mlp.up": ([None, ("mp", 1)], None), "layers.*.mlp.down": ([None, (1, "mp")], None)}
    plan = propagate(graph_of("llama"), mesh(dp=2, mp=2), configured, semi_auto="dp", objective="redistribution")
    read = {value.node for name in plan.configured for value in plan.graph.nodes[name].inputs}
    weights = [name for name in read if plan.graph.nodes[name].kind == PARAMETER]
    assert {str(plan.layouts[Value(name)]) for name in weights} == {str((REPLICATE, shard(dim))) for dim in (0, 1)}
    for node in plan.graph.nodes.values():
        if node.name not in (*plan.configured, *weights):
            layouts_of_node = [
                *plan.inputs[node.name],
                *(plan.layouts[Value(node.name, i)] for i in range(len(node.outputs))),
            ]
            assert {str(layout[1]) for layout in layouts_of_node} <= {"R", "R*"}, node
    assert layouts(plan, "inputs:tokens") == [("S(0)R",)]
    assert layouts(plan, "layers.*.attention.q") == [("S(0)R", "R*R", "S(0)R")] * 2
    assert layouts(plan, "layers.*.mlp.up") == [("S(0)R*", "R*S(0)", "S(0)S(2)")] * 2
    with pytest.raises(ValueError, match="semi_auto='tp': give one of the mesh dimensions dp, mp"):
        propagate(graph_of("llama"), mesh(dp=2, mp=2), configured, semi_auto="tp", objective="redistribution")


def test_a_data_dimension_cuts_the_batch_and_no_parameter():
    """The objective alone determines the plan on the other mesh dimension."""
    graph = graph_of("llama")
    plan = propagate(graph, mesh(dp=2, mp=2), objective="time", data_dim="dp")
    from_inputs = {name for name, node in graph.nodes.items() if node.source == "tokens"}
    for name, node in graph.nodes.items():
        layout = plan.layouts[Value(name)]
        if node.kind == PARAMETER:
            assert str(layout[0]) == "R", node.source
        elif any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
            assert str(layout[0]) == "S(0)" or layout[0].kind == "partial", name
    assert any("S" in str(plan.layouts[Value(node.name)][1]) for node in graph.nodes.values() if node.kind == CALL)
    with pytest.raises(ValueError, match="data_dim='dp': give one of the mesh dimensions dp, mp, and not semi_auto"):
        propagate(graph, mesh(dp=2, mp=2), semi_auto="dp", data_dim="dp", objective="redistribution")


@pytest.mark.parametrize("name", MODELS)
def test_the_price_of_memory_is_on_what_the_plan_counts(name):
    """Otherwise the bound of a limited plan would prove nothing."""
    on = mesh(dp=2, mp=2)
    search = Search(
        graph_of(name), on, written_for(CONFIGURED[name], on), "redistribution", "910b", MeshCosts.of(on, "910b")
    )
    problem = search.problem()
    chosen, _ = search.solved(problem)
    held = sum(search.bytes_held(node)[chosen[node.name]] for node in search.graph.nodes.values())
    assert held == pytest.approx(search.plan_of(problem, chosen).memory().total, rel=1e-12)


def test_propagations_that_share_tables_give_the_plans_of_those_that_do_not():
    """Models, meshes, objectives, strategies and settings in turn: what they do not have in common stays apart."""
    shared = SharedTables()
    for name, on in itertools.product(("llama", "bert"), (ProcessMesh([1, 0], ["mp"]), mesh(mp=2), mesh(dp=2, mp=2))):
        for objective, overlap in (("redistribution", False), ("time", False), ("time", True)):
            for strategies in ({}, CONFIGURED[name]) if "dp" in on.dim_names else ({},):
                options = {"objective": objective, "overlap": overlap, "settings": Settings(num_chunks=4)}
                own = propagate(graph_of(name), on, strategies, **options)
                assert propagate(graph_of(name), on, strategies, **options, shared=shared).digest == own.digest


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_memory_limit_is_kept_and_its_price_is_bounded(share):
    free = propagate(graph_of("llama"), mesh(mp=2), LAYER, objective="redistribution")
    limit = share * free.memory().total
    tight = propagate(graph_of("llama"), mesh(mp=2), LAYER, memory_limit=limit, objective="redistribution")
    assert tight.memory().total <= limit
    assert free.cost <= tight.bound * (1 + 1e-9) <= tight.cost * (1 + 1e-9)
    with pytest.raises(MemoryLimitError, match="the least that was found is"):
        propagate(
            graph_of("llama"), mesh(mp=2), LAYER, memory_limit=0.1 * free.memory().total, objective="redistribution"
        )


def test_none_as_mindspore_writes_it_is_not_sharded():
    given = [(("mp", "None"), None), (("mp", None), None), (("mp", 1), None)]
    first, *others = (strategy(entry, None, {"mp": 2}) for entry in given)
    assert all(other == first for other in others)


def test_a_strategy_that_cannot_be_says_what_can():
    graph = trace(Two(), (torch.zeros(8, 1024),))
    with pytest.raises(StrategyError, match=r"up: aten.linear.default of \[8, 1024\], \[4096, 1024\] cannot have"):
        propagate(graph, mesh(mp=3), {"up": ([None, ("mp", 1)], None)}, objective="redistribution")
    with pytest.raises(StrategyError, match="uses mesh dimension mp twice"):
        propagate(graph, mesh(mp=2), {"up": ([None, ("mp", "mp")], None)}, objective="redistribution")
    with pytest.raises(StrategyError, match="is not the order of the mesh, dp, mp"):  # elsewhere mp's parts are larger
        propagate(graph, mesh(dp=2, mp=2), {"up": ([None, (("mp", "dp"), 1)], None)}, objective="redistribution")
    with pytest.raises(StrategyError, match="no mesh dimension is called 'tp'; there are mp"):
        propagate(graph, mesh(mp=2), {"up": ([None, ("tp", 1)], None)}, objective="redistribution")
    with pytest.raises(StrategyError, match="'upp' names nothing; there are down, up"):
        propagate(graph, mesh(mp=2), {"upp": ([None, ("mp", 1)], None)}, objective="redistribution")
    with pytest.raises(StrategyError, match=r"several mesh dimensions have the size 2 \(dp=2, mp=2\)"):
        propagate(graph, mesh(dp=2, mp=2), {"up": ([None, (2, 1)], None)}, objective="redistribution")
    with pytest.raises(ValueError, match="objective='speed': give one of redistribution, time"):
        propagate(graph, mesh(mp=2), objective="speed")


def test_one_row_on_one_replica_stays_whole():
    graph = trace(Two(), (torch.zeros(1, 1024),))
    rows = {"up": ([("dp", 1), ("mp", 1)], None), "down": ([("dp", "mp"), (1, "mp")], None)}
    plan = propagate(graph, mesh(dp=1, mp=2), rows, objective="redistribution")
    up = next(node for node in graph.nodes.values() if node.module == "up" and node.kind == CALL)
    assert plan.inputs[up.name][0][0] == REPLICATE
    assert plan.inputs[up.name][1][1] == shard(0)
    with pytest.raises(StrategyError, match=r"up: aten.linear.default of \[1, 1024\].* cannot have"):
        propagate(graph, mesh(dp=2, mp=2), rows, objective="redistribution")
