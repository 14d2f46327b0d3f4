"""Tests meshes, costs of collectives, and the cheapest redistributions between layouts, without processes."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from links import link_costs

from ascend_parallel.process_groups.collectives import ALL_GATHER
from ascend_parallel.sharding.layout import AVERAGE, PARTIAL_GRAD, REPLICATE, SUM, Placement, cuts, is_even, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import KINDS, MeshCosts
from ascend_parallel.sharding.redistribute.shortest_path import all_pairs, plan_redistribution
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware

S0, S1, S2 = shard(0), shard(1), shard(2)
MAX = Placement("partial", op="max")
# A slow first dimension, a fast second; latency that matters and none.
COSTS = {
    "rate": link_costs((2, 4), 0.0, (4e-10, 1e-10)),
    "latency": link_costs((2, 4), 1e-5, 1e-12),
    "910b": MeshCosts.of(ProcessMesh(np.arange(8).reshape(2, 4)), "910b"),
    "910b over nodes": MeshCosts.of(ProcessMesh(8 * np.arange(8).reshape(2, 4)), "910b"),
}


def layouts(shape, mesh_shape):
    states = [REPLICATE, SUM, AVERAGE, *map(shard, range(len(shape)))]
    candidates = itertools.product(states, repeat=len(mesh_shape))
    return [layout for layout in candidates if is_even(shape, layout, mesh_shape)]


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_no_way_round_is_cheaper(costs):
    shape = (64, 16, 256)
    seconds = all_pairs(shape, 2, (2, 4), layouts(shape, (2, 4)), costs)
    round_about = seconds[:, :, None] + seconds[None, :, :]  # from, by way of, to
    assert (seconds[:, None, :] <= round_about * (1 + 1e-12)).all()
    assert seconds.max() > 0
    assert (np.diagonal(seconds) == 0).all()


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_all_pairs_are_the_plans(costs):
    shape = (64, 16)
    ends = layouts(shape, (2, 4))
    plans = [
        [plan_redistribution(shape, 4, (2, 4), source, target, costs).seconds for target in ends] for source in ends
    ]
    np.testing.assert_allclose(all_pairs(shape, 4, (2, 4), ends, costs), plans, rtol=1e-12)
    some = [ends[5], ends[1], ends[7]]  # whatever is asked for, all ways are looked at
    np.testing.assert_allclose(all_pairs(shape, 4, (2, 4), some, costs), np.array(plans)[np.ix_([5, 1, 7], [5, 1, 7])])


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("shape", [(64, 16), (5, 3)], ids=str)
def test_steps_lead_from_source_to_target_and_keep_slices_whole(costs, shape):
    states = [REPLICATE, SUM, AVERAGE, S0, S1]
    for source, target in itertools.product(itertools.product(states, repeat=2), repeat=2):
        plan = plan_redistribution(shape, 4, (2, 4), source, target, costs)
        at = list(source)
        for step in plan.steps:
            assert at[step.mesh_dim] == step.source != step.target
            later = [state for state in at[step.mesh_dim + 1 :] if state.kind == "shard"]
            assert step.source not in later
            assert step.target not in later
            at[step.mesh_dim] = step.target
        assert at == list(target)
        assert plan.seconds == sum(step.seconds for step in plan.steps)
        if is_even(shape, source, (2, 4)) and is_even(shape, target, (2, 4)):
            assert all(size % count == 0 for size, count in zip(shape, cuts(tuple(at), (2, 4), 2), strict=True))


def exhaustive(shape, mesh_shape, source, target, costs, depth):
    """Try every sequence of collectives, priced by the textbook's formulas."""
    if source == target:
        return 0.0
    if depth == 0:
        return float("inf")
    best = float("inf")
    states = [REPLICATE, SUM, *map(shard, range(len(shape)))]
    for dim, state in itertools.product(range(len(source)), states):
        later = [inner.dim for inner in source[dim + 1 :] if inner.kind == "shard"]
        if state == source[dim] or {state.dim, source[dim].dim} & {cut for cut in later if cut >= 0}:
            continue
        after = (*source[:dim], state, *source[dim + 1 :])
        if not is_even(shape, after, mesh_shape):
            continue
        ranks, item = mesh_shape[dim], 4
        before_local, after_local = (
            item * np.prod(shape) / np.prod(cuts(layout, mesh_shape, len(shape))) for layout in (source, after)
        )
        link = costs.dims[dim]
        messages, sent = {
            ("shard", "replicate"): (ranks - 1, (ranks - 1) * before_local),
            ("shard", "shard"): (ranks - 1, (ranks - 1) * before_local / ranks),
            ("partial", "replicate"): (2 * (ranks - 1), 2 * (ranks - 1) * before_local / ranks),
            ("partial", "shard"): (ranks - 1, (ranks - 1) * after_local),
        }.get((source[dim].kind, state.kind), (0, 0))
        took = messages * link.latency + sent * link.seconds_per_byte
        best = min(best, took + exhaustive(shape, mesh_shape, after, target, costs, depth - 1))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS["rate"], COSTS["latency"]], ids=["rate", "latency"])
def test_no_sequence_of_up_to_four_steps_is_cheaper(costs):
    shape = (8, 8)
    ends = [layout for layout in layouts(shape, (2, 4)) if AVERAGE not in layout]
    for source, target in itertools.product(ends[::2], ends[1::2]):
        planned = plan_redistribution(shape, 4, (2, 4), source, target, costs).seconds
        assert planned <= exhaustive(shape, (2, 4), source, target, costs, 4) * (1 + 1e-12)


def test_the_plan_in_words():
    costs = link_costs((2, 4), 1e-6, 1e-11)
    plan = plan_redistribution((2048, 2048), 4, (2, 4), (REPLICATE, S0), (S1, REPLICATE), costs)
    assert plan.text(["dp", "mp"]) == "slice(dim 1, dp); all_gather(dim 0, mp) 6.29 MB 0.066 ms"
    assert str(plan) == "slice(dim 1, d0); all_gather(dim 0, d1) 6.29 MB 0.066 ms"
    assert str(plan_redistribution((4,), 4, (2, 4), (S0, REPLICATE), (S0, PARTIAL_GRAD), costs)) == "nothing"
    across = plan_redistribution((2048, 2048), 4, (2, 4), (SUM, S1), (S0, S0), costs)
    assert [step.kind for step in across.steps] == ["reduce_scatter", "all_to_all"]
    assert across.nbytes == 2048 * 2048 // 4 * 4 // 2 + 2048 * 2048 // 8 * 4 * 3 // 4


def test_costs_decide_the_way():
    """With a slow first dimension as little as possible goes over it."""
    source, target = (S0, S1), (REPLICATE, REPLICATE)
    slow_first = link_costs((2, 2), 0.0, (1e-8, 1e-11))
    slow_second = link_costs((2, 2), 0.0, (1e-11, 1e-8))
    first = [plan_redistribution((64, 64), 4, (2, 2), source, target, costs) for costs in (slow_first, slow_second)]
    assert [[step.mesh_dim for step in plan.steps] for plan in first] == [[0, 1], [1, 0]]


def test_what_cannot_be_planned_is_refused():
    costs = link_costs((2, 4), 0.0, 1e-9)
    for source, says in {
        (S0,): "a placement, and costs, for each dimension",
        (S0, S2): "dimensions 0 to 1",
        (SUM, MAX): "one kind, or sum and avg",
    }.items():
        with pytest.raises(ValueError, match=says):
            plan_redistribution((8, 8), 4, (2, 4), source, (S0, S1), costs)
    with pytest.raises(ValueError, match="give one of all_gather"):
        costs.seconds("gather", 1.0, 0)


def test_costs_of_a_mesh_are_the_models():
    """A line inside a node costs the fit, a line across nodes the network, and a line of both kinds both."""
    model = CostModel(find_hardware("910b"))
    mesh = ProcessMesh(np.arange(64).reshape(8, 8), ["dp", "mp"])
    costs = MeshCosts.of(mesh, "910b")
    size = 64e6
    assert costs.seconds("all_gather", size, 1) == model.collective(ALL_GATHER, size, 8)
    assert costs.seconds("all_gather", size, 0) == model.network(ALL_GATHER, size, 8)
    line = MeshCosts.of(ProcessMesh(range(16)), "910b")
    assert line.seconds("all_reduce", size, 0) == model.collective("all_reduce", size, 16)
    for kind in KINDS[:-1]:
        assert 0 < costs.seconds(kind, size, 1) < costs.seconds(kind, size, 0)
    assert costs.seconds("send", size, 0) == model.hardware.network.latency + size / model.hardware.network.bandwidth
    assert hash(costs) == hash(MeshCosts.of(mesh, "910b"))
    assert costs == MeshCosts.of(mesh, "910b") != MeshCosts.of(mesh, "910c")


def test_a_mesh_knows_its_ranks():
    mesh = ProcessMesh([[3, 1], [0, 7]], dim_names=["dp", "mp"])
    assert (mesh.shape, mesh.ndim, mesh.dim_names) == ((2, 2), 2, ("dp", "mp"))
    assert mesh.process_ids == [3, 1, 0, 7]
    assert (mesh.coordinate(7), mesh.coordinate(2)) == ((1, 1), None)
    assert mesh.size("mp") == 2
    assert ProcessMesh(torch.arange(3)).dim_names == ("d0",)
    assert mesh == ProcessMesh(np.array([[3, 1], [0, 7]]), ("dp", "mp")) != ProcessMesh([[3, 1], [0, 7]])
    assert len({mesh, pickle.loads(pickle.dumps(mesh))}) == 1
    assert eval(repr(mesh)) == mesh


def test_parts_of_a_mesh():
    mesh = ProcessMesh(np.arange(8).reshape(2, 4), dim_names=["dp", "mp"])
    assert mesh[1] == ProcessMesh([4, 5, 6, 7], ["mp"])
    assert mesh.get_mesh_with_dim("mp", 2) == ProcessMesh([2, 6], ["dp"])
    assert mesh.get_mesh_with_dim("mp") == ProcessMesh([[0, 4], [1, 5], [2, 6], [3, 7]], ["mp", "dp"])
    with pytest.raises(ValueError, match="mp has the size 4"):
        mesh.get_mesh_with_dim("mp", 4)
    with pytest.raises(ValueError, match="'tp' is no dimension of this mesh; there are dp, mp"):
        mesh.size("tp")


@pytest.mark.parametrize(
    ("mesh", "names", "says"),
    [
        ([0, 0], None, "once"),
        ([-1, 0], None, "0 or more"),
        ([], None, "nested lists"),
        ([0.5], None, "nested lists"),
        ([[0, 1]], ["dp"], "2 different names"),
        ([[0, 1]], ["dp", "dp"], "2 different names"),
        ([0], [1], "1 different names"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh, names, says):
    with pytest.raises(ValueError, match=says):
        ProcessMesh(mesh, names)
