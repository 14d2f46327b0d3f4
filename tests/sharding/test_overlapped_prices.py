"""Prices of collectives that run with matmuls: against events in time, the price of every plan, and the optimum."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.settings import current_settings, put_in_force
from ascend_parallel.sharding import explain
from ascend_parallel.sharding.graph import CALL, PARAMETER
from ascend_parallel.sharding.layout import local_shape, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.gradient_sums import is_sum
from ascend_parallel.sharding.planner.integer_program import optimum
from ascend_parallel.sharding.planner.operator_cost import seconds
from ascend_parallel.sharding.planner.operator_strategy import named_nodes
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.runtime.kernel_cost import exposed_collectives
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training import Strategy, plan_training
from ascend_parallel.training.degrees.folding import FoldedGraph
from ascend_parallel.training.degrees.work import work_of
from ascend_parallel.training.options import OverlapOptions
from ascend_parallel.tuning.cost_model.chunk_search import MOST_CHUNKS
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

CHUNKS = Settings(num_chunks=4)
RATE, LATENCY, WIRE = 40e9, 2e-5, 3e-9  # multiply-adds a second; seconds; seconds a byte
ROWS, WIDTH = 2560, 1024


def hardware():
    """Matmuls at a fixed rate, links of a fixed rate; memory, host and contention cost nothing."""
    known = find_hardware("cpu-gloo")
    steps = ((float("inf"), LATENCY, 0.0, 0.0),)
    return replace(
        known,
        matmul=replace(known.matmul, frequency=RATE, launch=0.0),
        memory=replace(known.memory, bandwidth=1e30),
        collectives=replace(
            known.collectives, all_reduce=steps, all_gather=steps, reduce_scatter=steps, whole_gather=1.0
        ),
        link=replace(known.link, rate=8 / WIRE, efficiency=1.0, processor=0.0),
        host=replace(known.host, launch=0.0),
    )


class TwoLayers(nn.Module):
    """Two linear layers, and a softmax that needs whole rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).softmax(-1).square().sum()


def on(*sizes):
    names = ["dp", "mp"][-len(sizes) :]
    return ProcessMesh(torch.arange(int(np.prod(sizes))).view(sizes).tolist(), names)


def ends(tasks):
    """Return the end of the last of tasks (lane, seconds, tasks that it waits for), each lane in the order given."""
    free, done = {}, []
    for lane, took, after in tasks:
        done.append(max([free.get(lane, 0.0), *(done[task] for task in after)]) + took)
        free[lane] = done[-1]
    return max(done)


def matmul(m, k, n):
    return m * k * n / RATE


def collective(elements, times, ranks=2):
    """Seconds of an all-reduce (times=2), or a gather or scatter (1), of so many fp32 elements over all ranks."""
    return LATENCY + 4 * elements * times * (ranks - 1) / ranks * WIRE


def data_parallel():
    """Each rank has half of the rows; a weight's gradient is summed as soon as there is one."""
    once, summed = matmul(ROWS // 2, WIDTH, WIDTH), collective(WIDTH * WIDTH, 2)
    forward = [("compute", once, ()), ("compute", once, (0,))]
    backward = [
        ("compute", once, (1,)),
        ("link", summed, (2,)),
        ("compute", once, (2,)),
        ("compute", once, (4,)),
        ("link", summed, (5,)),
    ]
    return ends([*forward, *backward])


def tensor_parallel(rows):
    """Each rank has half of the inner width; the second layer's sum runs in chunks beside its matmul.

    rows: a rank gets its rows of the sum, and gathers their gradient in backward; otherwise it gets the whole sum.
    """
    half = WIDTH // 2
    tasks = [("compute", matmul(ROWS, WIDTH, half), ())]
    for size in split_rows(ROWS // 2 if rows else ROWS, 4):
        whole = 2 * size if rows else size
        tasks.append(("compute", matmul(whole, half, WIDTH), ()))
        tasks.append(("link", collective(whole * WIDTH, 1 if rows else 2), (len(tasks) - 1,)))
    start = len(tasks) - 1
    if rows:  # the own rows first, then those of the other rank, chunk by chunk
        tasks.append(("compute", matmul(ROWS // 2, WIDTH, half), (start,)))
        for size in split_rows(ROWS // 2, 4):
            tasks.append(("link", collective(2 * size * WIDTH, 1), (start,)))
            tasks.append(("compute", matmul(size, WIDTH, half), (len(tasks) - 1,)))
    else:
        tasks.append(("compute", matmul(ROWS, WIDTH, half), (start,)))
    tasks.append(("compute", matmul(WIDTH, ROWS, half), (len(tasks) - 1,)))
    tasks.append(("compute", matmul(WIDTH, ROWS, half), (len(tasks) - 1,)))
    return ends(tasks)


def test_what_overlaps_decides_and_is_faster_by_events_in_time():
    """Collectives in full favour data parallelism, which sums weights; their exposed part favours the tensors' sum."""
    with torch.device("meta"):
        graph = trace(TwoLayers(), (torch.zeros(ROWS, WIDTH),))
    plain, overlapped = (
        propagate(graph, on(2), hardware=hardware(), overlap=overlap, settings=CHUNKS) for overlap in (False, True)
    )
    (down,) = named_nodes(graph, "down")
    assert plain.inputs[down.name][0] == (shard(0),), "half of the rows, and a whole weight"
    assert overlapped.inputs[down.name] == ((shard(1),), (shard(1),)), "half of the inner width"
    assert plain.cost == pytest.approx(6 * matmul(ROWS // 2, WIDTH, WIDTH) + 2 * collective(WIDTH**2, 2), rel=2e-3)
    rows = overlapped.collectives().get("reduce_scatter", 0) > 0
    took = tensor_parallel(rows)
    assert took <= tensor_parallel(not rows), "of both ways to sum, the one that takes less time"
    # The planner counts a gradient of the model's input too. The sum of a number is beside.
    assert overlapped.cost - matmul(ROWS, WIDTH, WIDTH // 2) == pytest.approx(took, rel=2e-3)
    assert took < 0.97 * data_parallel(), "and less than data parallelism, sums of gradients under backward"


def in_events(plan):
    """Return when a step of a plan ends: a bucket of gradients starts when its last gradient has come.

    The gradients come from the last operator to the first. 1 MiB or a larger one is the first bucket, then 25 MiB.
    """
    nodes = [node for node in plan.graph.nodes.values() if node.kind == CALL]
    model, shape = CostModel(plan.costs.hardware), tuple(plan.mesh.shape)
    took = {
        node.name: seconds(node.call, Option(plan.inputs[node.name], plan.output_layouts(node)), shape, model) / 3
        for node in nodes
    }
    summed = [
        each for each in plan.conversions if plan.graph.nodes[each.value.node].kind == PARAMETER and each.back.seconds
    ]
    tasks = [("compute", took[node.name], ()) for node in nodes]
    tasks += [("compute", each.seconds, ()) for each in plan.conversions if each not in summed]
    held, room, before = 0, 1 << 20, 0
    for place, node in enumerate(reversed(nodes)):
        tasks.append(("compute", 2 * took[node.name], ()))
        ready = len(tasks) - 1
        for each in (each for each in summed if each.reader == node.name):
            nbytes = plan.graph.meta(each.value).nbytes
            if held and held + nbytes > room:
                tasks.append(("link", collective(held // 4, 2), (before,)))
                held, room = 0, 25 << 20
            held, before = held + nbytes, ready
        if place == len(nodes) - 1 and held:
            tasks.append(("link", collective(held // 4, 2), (before,)))
    return ends(tasks)


class Tower(nn.Module):
    """Linear layers of several widths."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("rows", [128, 1024, 4096])
@pytest.mark.parametrize("widths", [(1024, 1024, 2048), (2048, 512, 512, 4096), (64, 4096, 2048)], ids=str)
def test_sums_of_gradients_under_the_backward_by_events_in_time(rows, widths):
    """Every plan with whole weights: its cost is the end of its events; the chosen one's is within 2 % of the least."""
    with torch.device("meta"):
        graph = trace(Tower(*widths), (torch.zeros(rows, widths[0]),))
    whole = {"layers.*": ([None, (1, 1)], None)}
    chosen = propagate(graph, on(2), whole, hardware=hardware(), overlap=True, settings=CHUNKS)
    found = []
    for cut in itertools.product(("mp", 1), repeat=len(widths)):
        layouts = {f"layers.{index}": ([(rows, 1), (1, 1)], None) for index, rows in enumerate(cut[1:])}
        given = {**layouts, "inputs:x": (None, [(cut[0], 1)])}
        plan = propagate(graph, on(2), given, hardware=hardware(), overlap=True, settings=CHUNKS)
        assert plan.cost == pytest.approx(in_events(plan), rel=1e-6)
        found.append(plan.cost)
    assert chosen.cost <= 1.02 * min(found)
    assert (chosen.bound or chosen.cost) <= min(found) * (1 + 1e-9), "no plan costs less than the bound"


@pytest.mark.parametrize("again", [True, False])
def test_a_second_gather_costs_only_where_it_runs_by_events_in_time(again):
    """A layer on half of the rows, then a column layer that gathers them: what its collectives add to its matmuls."""
    settings = Settings(mode=2, recompute_all_gather=again)
    with torch.device("meta"):
        graph = trace(Tower(WIDTH, WIDTH, 128), (torch.zeros(ROWS, WIDTH),))
    layouts = {"layers.0": ([("mp", 1), (1, 1)], [("mp", 1)]), "layers.1": ([(1, 1), ("mp", 1)], [(1, "mp")])}
    plan = propagate(graph, on(2), layouts, hardware=hardware(), overlap=True, settings=settings)
    ((forward, backward),) = exposed_collectives(plan).kernels.values()
    once, sent = matmul(ROWS, WIDTH, 64), collective(ROWS * WIDTH, 1)
    assert forward == pytest.approx(sent, rel=1e-6)
    first = [("link", sent, ()), ("compute", once, ())] if again else [("compute", once, ())]
    place = len(first)
    ended = ends([*first, ("link", sent, (place - 1,)), ("compute", once, tuple(range(place)))])
    assert backward == pytest.approx(ended - 2 * once, rel=1e-6)


class Gated(nn.Module):
    """Layers with two matmuls of one input; with `after` the norm is after the sum, and the residual reads it too."""

    def __init__(self, width, wide, after=False, layers=2):
        super().__init__()
        self.after, of_layers = after, range(layers)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in of_layers)
        self.gate = nn.ModuleList(nn.Linear(width, wide, bias=False) for _ in of_layers)
        self.up = nn.ModuleList(nn.Linear(width, wide, bias=False) for _ in of_layers)
        self.down = nn.ModuleList(nn.Linear(wide, width, bias=False) for _ in of_layers)

    def forward(self, x):
        for norm, gate, up, down in zip(self.norm, self.gate, self.up, self.down, strict=True):
            y = norm(x)
            x = (y if self.after else x) + down(torch.relu(gate(y)) * up(y))
        return x


def price(plan):
    """Return the seconds of a plan as its overlapped operators run it."""
    model, shape = CostModel(plan.costs.hardware), tuple(plan.mesh.shape)
    calls = [node for node in plan.graph.nodes.values() if node.kind == CALL]
    own = sum(
        seconds(each.call, Option(plan.inputs[each.name], plan.output_layouts(each)), shape, model) for each in calls
    )
    return own + exposed_collectives(plan).seconds


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["cpu-gloo", "910b"])
@pytest.mark.parametrize("after", [False, True], ids=["norm first", "norm after"])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_the_search_finds_the_least_price_of_all_plans(name, after, sizes):
    """The search's cost is the price of its plan as the overlap pass runs it; no other plan's price is lower."""
    wide = {"cpu-gloo": 1024, "910b": 8192}[name]
    with torch.device("meta"):
        graph = trace(Gated(wide, 2 * wide, after), (torch.zeros(16, 128, wide),))
    mesh = on(*sizes)
    search = Search(graph, mesh, {}, "time", name, MeshCosts.of(mesh, name), overlap=CHUNKS)
    problem = search.problem()
    chosen, bound = search.solved(problem)
    best = price(search.plan_of(problem, chosen))
    assert best == pytest.approx(problem.cost(chosen), rel=1e-9)
    assert bound == pytest.approx(best, rel=1e-9)
    solution = optimum(problem)
    assert solution.cost == pytest.approx(best, rel=1e-9)
    draw, looked_at, kernels = random.Random(1), 0, 0
    for _ in range(150):
        other = dict(chosen)
        for choice in draw.sample(list(problem.sizes), draw.randint(1, 6)):
            other[choice] = draw.randrange(problem.sizes[choice])
        if np.isfinite(problem.cost(other)):
            plan = search.plan_of(problem, other)
            looked_at, kernels = looked_at + 1, kernels + len(plan.fused(CHUNKS).kernels)
            assert best <= price(plan) * (1 + 1e-9)
    assert looked_at > 50
    assert kernels > looked_at, "matmuls overlap in the plans that were compared"


def test_a_plan_is_fused_once_and_a_kernel_has_one_shape():
    """Prices and all ranks read what was fused once; a kernel's shape is that of a call with its local tensors."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048), (torch.zeros(16, 128, 1024),))
    plan = propagate(graph, on(2, 2), objective="time", hardware="cpu-gloo", overlap=True, settings=CHUNKS)
    priced = exposed_collectives(plan)
    found = [plan_for_rank(plan, (1, 1), settings) for settings in (CHUNKS, Settings(num_chunks=2))]
    once, in_tree = plan.fused(CHUNKS), plan.fused(Settings(deterministic="tp"))
    assert all(kernel.fused is once.kernels[name] for each in found for name, kernel in each.kernels.items())
    assert in_tree is not once, "products in the tree are fused where nothing is communicated, too"
    for rank_plan in found:
        assert priced.kernels and rank_plan.kernels.keys() == priced.kernels.keys()
        for kernel in rank_plan.kernels.values():
            fused = kernel.fused
            operands = [
                [
                    torch.empty(local_shape(meta.shape, layout, plan.mesh.shape, (1, 1)), dtype=meta.dtype)
                    for meta, layout in zip(
                        graph.nodes[name].call.inputs, rank_plan.fused_plan.inputs[name], strict=True
                    )
                ]
                for name in fused.nodes
            ]
            pairs = list(zip(fused.matmuls, operands, strict=True))
            weights = [given[one.weight].t() if one.transposed else given[one.weight] for one, given in pairs]
            x, rows = operands[0][fused.matmuls[0].x], fused.row_dim is not None
            called = LayerShape.of(fused.kind, x, torch.cat(weights), 2, sequence_parallel=rows)
            assert rank_plan.shape(kernel, "cpu") == called


def test_the_search_for_degrees_prices_operators_as_the_plan_does():
    """Its operators' seconds are together the cost of the plan: what is hidden is in none of them."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048, layers=4), (torch.zeros(8, 128, 1024),))
    plan = propagate(graph, on(2), hardware="cpu-gloo", overlap=True, settings=CHUNKS)
    work = work_of(FoldedGraph(graph, np.arange(len(plan.inputs)), (), 4), plan, CHUNKS)
    parts = (work.forward, work.backward, work.forward_sent, work.backward_sent)
    summed = sum(one.back.seconds for one in plan.conversions if one.back and is_sum(plan, one))
    assert sum(part.sum() for part in parts) + summed == pytest.approx(price(plan), rel=1e-9)
    assert work.forward_sent.sum() + work.backward_sent.sum() < 0.7 * plan.seconds


def test_where_chunks_cost_more_than_they_hide_the_price_says_so():
    """Small rows on a fast link: four collectives of a latency each. The matmuls run so all the same."""
    with torch.device("meta"):
        graph = trace(Gated(512, 1024).bfloat16(), (torch.zeros(4, 64, 512, dtype=torch.bfloat16),))
    cuts = {"gate.*": ([None, ("mp", 1)], None), "up.*": ([None, ("mp", 1)], None), "down.*": ([None, (1, "mp")], None)}
    plain, chunked = (propagate(graph, on(4), cuts, overlap=overlap, settings=CHUNKS) for overlap in (False, True))
    assert chunked.cost == pytest.approx(price(chunked) - chunked.hidden_sums, rel=1e-9)
    assert chunked.cost + chunked.hidden_sums > plain.cost


def test_chunks_that_are_measured_in_the_run_cost_the_best_number_of_them():
    """Each pass of each kernel, beside that pass in every number of chunks; shapes for which some chunks win."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048, layers=1), (torch.zeros(8, 128, 1024),))
    cuts = {"gate.*": ([None, ("mp", 1)], None), "up.*": ([None, ("mp", 1)], None), "down.*": ([None, (1, "mp")], None)}
    given = [Settings(num_chunks=count, mode=2) for count in range(1, MOST_CHUNKS + 1)]
    fixed = Settings(auto=True, customized_coc={(1024, 1024, 1024): 1})
    auto, kept, *counted = (
        exposed_collectives(propagate(graph, on(2), cuts, hardware=hardware(), overlap=True, settings=settings)).kernels
        for settings in (Settings(auto=True), fixed, *given)
    )
    for name, passes in auto.items():
        best = [min(found) for found in zip(*(kernels[name] for kernels in counted), strict=True)]
        assert passes == pytest.approx(best, rel=1e-9)
    assert sum(map(sum, auto.values())) < 0.9 * sum(map(sum, counted[0].values()))
    (down,) = named_nodes(graph, "down.0")
    assert kept[down.name][0] == counted[0][down.name][0] > auto[down.name][0], "a count that is given is kept"


def test_a_setting_that_fits_only_some_options_is_no_error():
    """Sizes that are given for one operator: the search looks at options that never run."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048), (torch.zeros(8, 128, 1024),))
    counted = propagate(graph, on(2), hardware="cpu-gloo", overlap=True, settings=CHUNKS)
    given = Settings(num_chunks=4, customized_coc={(1024, 1024, 1024): (256, 256, 256, 256)}, strict=True)
    plan = propagate(graph, on(2), hardware="cpu-gloo", overlap=True, settings=given)
    assert plan.cost == pytest.approx(counted.cost, rel=1e-9)


def test_sums_in_a_tree_cost_their_full_time():
    """A price by which they move away from their matmuls would leave them without a tree."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048), (torch.zeros(8, 128, 1024),))
    whole = propagate(graph, on(2), hardware="cpu-gloo", overlap=False, settings=CHUNKS)
    tree = Settings(num_chunks=4, deterministic="tp")
    plan = propagate(graph, on(2), hardware="cpu-gloo", overlap=True, settings=tree)
    assert plan.cost == pytest.approx(whole.cost, rel=1e-9)


def test_the_settings_say_which_price_decides():
    """Without settings that ask for overlap, with overlap=False and with another objective collectives cost in full."""
    with torch.device("meta"):
        graph = trace(Gated(1024, 2048), (torch.zeros(8, 128, 1024),))
    before = current_settings()
    try:
        put_in_force(Settings())
        off = propagate(graph, on(2), hardware="cpu-gloo")
        asked = propagate(graph, on(2), hardware="cpu-gloo", overlap=True)
        put_in_force(CHUNKS)
        cut = propagate(graph, on(2), hardware="cpu-gloo")
        refused = propagate(graph, on(2), hardware="cpu-gloo", overlap=False)
        published = propagate(graph, on(2), {"*.*": (None, None)}, hardware="cpu-gloo", objective="redistribution")
    finally:
        put_in_force(before)
    assert [each.overlap for each in (off, refused, published)] == [None] * 3
    assert (asked.overlap, cut.overlap) == (Settings(), CHUNKS)
    assert off.cost == refused.cost > cut.cost
    first, second, *_ = explain(cut).splitlines()
    assert "objective time of matmuls that run with their collectives (4 chunks (COC_PARALLEL_NUM=4))" in first
    left = exposed_collectives(cut).seconds - cut.hidden_sums
    assert f"of which {1e3 * left:.3f} ms stay exposed" in second
    assert "run with their collectives" not in explain(off) and "stay exposed" not in explain(off)


def test_a_strategy_prices_what_its_step_will_run():
    """A training's plan costs what overlaps, unless the strategy runs no overlapped operators."""
    model, batch = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.zeros(64, 64),)

    def loss(model, x):
        return model(x).square().mean()

    def plan(**options):
        strategy = Strategy(mesh={"dp": 1, "tp": 2}, hardware="cpu-gloo", **options)
        return plan_training(strategy, model, batch, loss, settings=CHUNKS).plan

    assert plan().overlap == CHUNKS
    assert plan(overlap=OverlapOptions(operators=False)).overlap is None
