"""The cost model: closed forms against event simulation, bounds, the search, and published times."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published.gains import with_fixed_cost
from simulation import Task, call_tasks, length, simulate

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, OPERATORS, REDUCE_SCATTER, Matmul
from ascend_parallel.ops.rows import ROW_TILE, split_rows
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.process_groups import collectives
from ascend_parallel.tuning.cost_model.chunk_pipeline import ChunkedCall, makespan, makespan_beside
from ascend_parallel.tuning.cost_model.chunk_search import best_sizes, equal_sizes
from ascend_parallel.tuning.cost_model.cost import COLLECTIVES, CostModel
from ascend_parallel.tuning.cost_model.hardware import all_hardware, find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import LinearPass
from ascend_parallel.tuning.cost_model.models import Batch, all_models, layer_linears
from ascend_parallel.tuning.cost_model.tables import PlanningError

SECONDS = st.floats(min_value=0, max_value=1, allow_nan=False)
CHUNKS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)
COSTS = {name: CostModel(hardware) for name, hardware in all_hardware().items()}


@st.composite
def calls(draw):
    chunks, first = draw(CHUNKS), draw(st.booleans())
    return ChunkedCall(
        compute=tuple(compute for compute, _ in chunks),
        collective=tuple(collective for _, collective in chunks),
        communicate_first=first,
        own=draw(SECONDS) if first else 0.0,
        before=tuple(draw(st.lists(SECONDS, max_size=4))),
        tail=draw(SECONDS),
        issue=draw(st.sampled_from([0.0, 0.01, 0.3])),
    )


@st.composite
def problems(draw):
    operator, ranks = draw(st.sampled_from(OPERATORS)), draw(st.sampled_from([2, 3, 8, 16, 64]))
    rows = draw(st.integers(1, 3000))
    k, n = draw(st.integers(1, 9000)), draw(st.integers(1, 9000))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    return Matmul(operator, rows * (1 if operator == ALL_REDUCE else ranks), k, n, dtype, "npu", ranks)


# Closed form and simulation


@settings(max_examples=400, deadline=None)
@given(calls())
def test_closed_form_is_what_the_simulation_finds(call):
    assert makespan(call) == pytest.approx(length(simulate(call_tasks(call))), rel=1e-9, abs=1e-12)


@settings(max_examples=400, deadline=None)
@given(calls())
def test_lanes_at_full_speed_take_what_the_closed_form_says(call):
    call = replace(call, issue=0.0)
    assert makespan_beside(call, 1.0, 1.0) == pytest.approx(makespan(call), rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(calls(), st.integers(1, 4), st.integers(1, 4))
def test_lanes_that_slow_each_other_down_against_exact_fractions(call, compute_quarters, collective_quarters):
    """Return the exact makespan: a lane runs at four quarters alone, and at fewer beside the other lane."""
    whole = replace(
        call,
        issue=0.0,
        own=float(round(8 * call.own)),
        tail=float(round(8 * call.tail)),
        compute=tuple(float(round(8 * time)) for time in call.compute),
        collective=tuple(float(round(8 * time)) for time in call.collective),
        before=tuple(float(round(8 * time)) for time in call.before),
    )
    found = makespan_beside(whole, compute_quarters / 4, collective_quarters / 4)
    assert found == pytest.approx(exactly(whole, compute_quarters, collective_quarters), abs=1e-6)


def exactly(call, compute_quarters, collective_quarters):
    """Run the tasks of `call_tasks` in fractions, independently of the tested code."""
    left = {task.name: round(48 * task.seconds) for task in call_tasks(call)}
    after = {task.name: set(task.after) for task in call_tasks(call)}
    lanes = {lane: [task.name for task in call_tasks(call) if task.lane == lane] for lane in ("compute", "communicate")}
    left = {name: ticks for name, ticks in left.items() if not name.startswith("issue")}
    speed = {"compute": compute_quarters, "communicate": collective_quarters}
    elapsed = 0.0
    while True:
        while ended := [name for name in heads(lanes) if not left[name] and ready(after, name)]:
            for queue in lanes.values():
                queue[:] = [name for name in queue if name not in ended]
            for waits in after.values():
                waits.difference_update(ended)
        running = {lane: queue[0] for lane, queue in lanes.items() if queue and ready(after, queue[0])}
        if not running:
            return elapsed
        rate = {lane: speed[lane] if len(running) == 2 else 4 for lane in running}
        step = min(Fraction(left[name], rate[lane]) for lane, name in running.items())
        for lane, name in running.items():
            left[name] -= step * rate[lane]
        elapsed += float(step) * 4 / 48


def heads(lanes):
    return [queue[0] for queue in lanes.values() if queue]


def ready(after, name):
    return not {task for task in after[name] if not task.startswith("issue")}


@settings(deadline=None)
@given(calls())
def test_a_call_takes_at_least_each_lane_and_at_most_everything_in_turn(call):
    computing = sum(call.compute) + call.own + call.tail
    communicating = sum(call.collective) + sum(call.before)
    issuing = call.issue * (2 * len(call.compute) + len(call.before) + call.communicate_first)
    assert max(computing, communicating) <= makespan(call) * (1 + 1e-9)
    assert makespan(call) <= (computing + communicating + issuing) * (1 + 1e-9) + 1e-12


@settings(deadline=None)
@given(calls(), st.integers(0, 11), SECONDS)
def test_a_longer_chunk_never_shortens_a_call(call, index, more):
    index %= len(call.compute)
    longer = list(call.compute)
    longer[index] += more
    assert makespan(replace(call, compute=tuple(longer))) >= makespan(call) * (1 - 1e-12)
    longer = list(call.collective)
    longer[index] += more
    assert makespan(replace(call, collective=tuple(longer))) >= makespan(call) * (1 - 1e-12)


def test_the_formula_of_the_overlap_page():
    """A = 2, B = 1, four chunks of 1 : 2 : 2 : 1: the last collective is exposed."""
    shares = [1 / 6, 2 / 6, 2 / 6, 1 / 6]
    call = ChunkedCall(compute=tuple(2 * share for share in shares), collective=tuple(shares))
    assert makespan(call) == pytest.approx(2 + 1 / 6)


def test_the_simulation_keeps_the_order_of_a_lane():
    spans = simulate([Task("a", "x", 1.0), Task("b", "x", 1.0, ("c",)), Task("d", "x", 1.0), Task("c", "y", 5.0)])
    assert {span.task.name: span.start for span in spans} == {"a": 0.0, "c": 0.0, "b": 5.0, "d": 6.0}


def test_the_simulation_refuses_tasks_that_wait_for_each_other():
    with pytest.raises(ValueError, match="'a' never starts"):
        simulate([Task("a", "x", 1.0, ("b",)), Task("b", "x", 1.0)])
    with pytest.raises(ValueError, match="which is not a task"):
        simulate([Task("a", "x", 1.0, ("z",))])


# Costs


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(COSTS)), problems(), st.sampled_from([0.0, 1e-4, 5e-3]), st.booleans())
def test_no_sizes_beat_the_bound_and_the_search_beats_equal_chunks(name, problem, tail, again):
    costs, again = COSTS[name], again and problem.operator == REDUCE_SCATTER

    def seconds(sizes):
        return makespan(costs.call(problem, sizes, tail=tail, gathers_input=again))

    best = best_sizes(problem.rows, seconds)
    assert costs.bound(problem, tail=tail, gathers_input=again) <= best.seconds * (1 + 1e-12)
    assert best.seconds <= best.equal_seconds <= best.one_chunk
    assert best.seconds <= min(seconds(split_rows(problem.rows, count)) for count in (1, 2, 4, 8)) * (1 + 1e-6)
    assert best.seconds == seconds(best.sizes)
    assert sum(best.sizes) == problem.rows
    assert min(best.sizes) >= 1 and not any(size % ROW_TILE for size in best.sizes[:-1])


@settings(deadline=None)
@given(st.sampled_from(sorted(COSTS)), problems(), st.integers(1, 2000))
def test_more_rows_and_bytes_never_take_less(name, problem, more):
    costs, item = COSTS[name], problem.dtype.itemsize
    wide = (problem.k, problem.n, item)
    util = costs.utilisation(problem.m, *wide)
    assert costs.matmul(problem.m + more, *wide, utilisation=util) >= costs.matmul(problem.m, *wide, utilisation=util)
    size = problem.m * problem.n * item
    after = costs.collective(COLLECTIVES[problem.operator], size + more, problem.ranks)
    # The fitted curves have small steps where their parts meet.
    assert after >= costs.collective(COLLECTIVES[problem.operator], size, problem.ranks) * 0.98


@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.5, 4.0])
def test_uneven_chunks_beat_the_best_equal_ones_where_overlap_pays(ratio):
    """Linear costs with a fixed part: unequal chunks are strictly better, shorter at the exposed end."""

    def seconds(sizes):
        fixed = 1e-3
        compute = tuple(size / 4096 + fixed for size in sizes)
        return makespan(ChunkedCall(compute=compute, collective=tuple(ratio * size / 4096 + fixed for size in sizes)))

    best = best_sizes(4096, seconds)
    assert len(best.sizes) > 1 and best.seconds < best.equal_seconds
    if ratio > 1:
        assert best.sizes[0] < max(best.sizes)  # the first matmul is exposed
    if ratio < 1:
        assert best.sizes[-1] < max(best.sizes)  # the last collective is


@pytest.mark.slow
def test_uneven_chunks_of_the_presets_beat_equal_ones():
    """Never worse than equal chunks, and better unless equal chunks hide everything."""
    costs, cut, better = COSTS["ascend-910b2"], 0, 0
    for model in all_models().values():
        for linear in layer_linears(model, Batch(sequence=4096, micro_batch=2, tp=8)):
            for part in (LinearPass(costs, linear, direction) for direction in (FORWARD, BACKWARD)):
                assert part.best.seconds <= part.best.equal_seconds
                cut += len(part.best.equal) > 1
                better += part.best.seconds < part.best.equal_seconds
    assert better > 0.9 * cut > 40


def test_one_chunk_where_overlap_loses():
    hardware = find_hardware("910b")
    slower = tuple((limit, fixed + 1e-3, *rest) for limit, fixed, *rest in hardware.collectives.all_reduce)
    costs = CostModel(replace(hardware, collectives=replace(hardware.collectives, all_reduce=slower)))
    problem = Matmul(ALL_REDUCE, 2048, 512, 1024, torch.bfloat16, "npu", 8)
    assert best_sizes(problem.rows, lambda sizes: makespan(costs.call(problem, sizes))).sizes == (2048,)


def test_a_host_that_is_slow_to_issue_ends_many_chunks():
    quick, slow = (CostModel(find_hardware("910b").with_launch(seconds)) for seconds in (0.0, 500e-6))
    problem = Matmul(ALL_REDUCE, 8192, 2048, 8192, torch.bfloat16, "npu", 8)
    sizes = split_rows(problem.rows, 16)
    assert makespan(slow.call(problem, sizes)) > 31 * 500e-6 > makespan(quick.call(problem, sizes))


def test_times_of_the_planner_s_fit():
    """Huawei's own points: 18 us at 64 KiB; 13.58491263 x + 61.508333 us above 8 MiB; half of it for a gather."""
    costs = COSTS["ascend-910b2"]
    assert costs.collective(collectives.ALL_REDUCE, 65536, 8) == pytest.approx(18e-6)
    large = costs.collective(collectives.ALL_REDUCE, 64 * 2**20, 8)
    assert large == pytest.approx((13.58491263 * 64 + 61.508333) * 1e-6, rel=1e-5)
    assert costs.collective(collectives.ALL_GATHER, 64 * 2**20, 8) == pytest.approx(large / 2)
    assert costs.collective(collectives.ALL_REDUCE, 2**20, 1) == 0


@pytest.mark.parametrize(
    ("operator", "k", "n", "serial", "overlapped"),
    [
        (ALL_REDUCE, 768, 1024, 108.2, 77.5),
        (ALL_REDUCE, 1536, 1024, 141.9, 95.9),
        (REDUCE_SCATTER, 512, 1024, 60.5, 45.6),
        (REDUCE_SCATTER, 1024, 1024, 83.5, 61.7),
        (ALL_GATHER, 1024, 512, 76.9, 40.0),
        (ALL_GATHER, 1024, 1024, 102.9, 60.5),
    ],
)
def test_the_shaped_link_as_measured(operator, k, n, serial, overlapped):
    """benchmarks/README.md, 8 chunks of 1, 2, 3, 4, 4, 3, 2, 1; its overlapped times were not used for any number."""
    costs = CostModel(find_hardware("cpu-gloo").with_link("1gbit"))
    problem = Matmul(operator, 2048, k, n, torch.float32, "cpu", 2)
    tiles, weights = problem.rows // ROW_TILE, (1, 2, 3, 4, 4, 3, 2, 1)
    cuts = [ROW_TILE * round(tiles * sum(weights[:i]) / sum(weights)) for i in range(9)]
    sizes = tuple(stop - start for start, stop in pairwise(cuts))
    assert makespan(costs.call(problem, (problem.rows,))) == pytest.approx(serial * 1e-3, rel=0.08)
    assert makespan(costs.call(problem, sizes)) == pytest.approx(overlapped * 1e-3, rel=0.13)


def test_a_slower_link_takes_longer_and_other_hardware_has_none():
    fast, slow = (CostModel(find_hardware("cpu-gloo").with_link(rate)) for rate in ("10gbit", "100mbit"))
    assert slow.collective(collectives.ALL_REDUCE, 1e7, 2) > 5 * fast.collective(collectives.ALL_REDUCE, 1e7, 2)
    with pytest.raises(PlanningError, match="--link='1gbit' is not allowed with ascend-910b2"):
        find_hardware("910b").with_link("1gbit")
    with pytest.raises(PlanningError, match="--link='1 furlong' is not allowed"):
        find_hardware("cpu-gloo").with_link("1 furlong")


@pytest.mark.parametrize("name", ["ascend-910b2", "ascend-950", "h100-nvlink", "cpu-gloo"])
@pytest.mark.parametrize("kind", COLLECTIVES.values())
def test_a_fixed_cost_is_added_to_every_collective(name, kind):
    hardware = find_hardware(name)
    slower = CostModel(with_fixed_cost(hardware, 200e-6))
    for size in (1 << 10, 1 << 20, 1 << 28):
        ranks = hardware.collectives.fitted_ranks
        before, after = (costs.collective(kind, size, ranks, whole=False) for costs in (COSTS[name], slower))
        assert after - before == pytest.approx(200e-6)


def test_equal_sizes_are_equal_up_to_one_tile():
    assert equal_sizes(100, 3) == (32, 32, 36) and equal_sizes(10, 4) == (10,) and equal_sizes(64, 4) == (16,) * 4
    for rows in (16, 100, 1000):
        for count in (1, 2, 5, 16):
            sizes = equal_sizes(rows, count)
            assert sum(sizes) == rows and max(sizes) - min(sizes) <= ROW_TILE + rows % ROW_TILE
