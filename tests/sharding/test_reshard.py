"""Every pair of placements on real gloo processes: values, gradients, and no more bytes moved than planned."""

import itertools
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.process_groups import group_timeout, time_limit
from ascend_parallel.sharding.layout import bounds
from ascend_parallel.sharding.marked.dtensors import dtensor_from_fn, reshard, shard_tensor, unshard
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.redistribute.collectives import recorded
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.redistribute.edges import layout_of
from ascend_parallel.sharding.redistribute.shortest_path import plan_redistribution

PARTIALS = [Partial("sum"), Partial("avg"), Partial("max"), Partial("min")]
REDUCE = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}


def placements_for(dims, mesh_dims, partials=PARTIALS):
    """All that commute."""
    every = itertools.product([Replicate(), *map(Shard, range(dims)), *partials], repeat=mesh_dims)
    return [
        one for one in every if len(ops := {p.reduce_op for p in one if p.is_partial()}) < 2 or ops == {"sum", "avg"}
    ]


def parts_of(shape, mesh, placements):
    """The tensor as a whole, and what each coordinate of the mesh has of it before it is cut: [*mesh, *shape]."""
    kept = [size if one.is_partial() else 1 for one, size in zip(placements, mesh.shape, strict=True)]
    parts = np.random.default_rng(3).standard_normal((*kept, *shape))
    whole = parts
    for dim, one in enumerate(placements):
        whole = REDUCE[one.reduce_op](whole, axis=dim, keepdims=True) if one.is_partial() else whole
    return whole.reshape(shape), np.broadcast_to(parts, (*mesh.shape, *shape))


def cut(whole, mesh, placements, place):
    layout = layout_of(placements, mesh, whole.ndim)
    return whole[tuple(slice(*ends) for ends in bounds(whole.shape, layout, mesh.shape, place))]


def put_together(shape, mesh, placements, locals_by_rank):
    """The whole tensor from what each rank holds; fails where two ranks that should agree do not."""
    # lines in whose groups torch orders the ranks otherwise sum in another order
    limit = 0 if mesh.process_ids == sorted(mesh.process_ids) else 1e-14
    reduced = np.full((*mesh.shape, *shape), np.nan)
    for place in np.ndindex(mesh.shape):
        reduced[place] = np.inf  # what nobody holds
        held = locals_by_rank[mesh.array[place]]
        view = cut(reduced[place], mesh, placements, place)
        assert view.shape == held.shape
        view[...] = held
    for dim, one in enumerate(placements):
        if one.is_partial():
            reduced = REDUCE[one.reduce_op](reduced, axis=dim, keepdims=True)
        elif one.is_replicate():
            first = reduced.take([0], axis=dim)
            np.testing.assert_allclose(np.broadcast_to(first, reduced.shape), reduced, rtol=limit, atol=limit)
            reduced = first
        else:
            reduced = reduced.min(axis=dim, keepdims=True)  # inf where another rank has it
    return reduced.reshape(shape)


def gradient_for(weight, parts, mesh, placements, place):
    """The derivative of (whole * weight).sum() by what the rank at `place` holds, before it is cut."""
    gradient = weight
    extremes = [dim for dim, one in enumerate(placements) if one.is_partial() and one.reduce_op in ("max", "min")]
    for dim, one in enumerate(placements):
        if one == Partial("avg"):
            gradient = gradient / mesh.shape[dim]
    if extremes:
        reduced = REDUCE[placements[extremes[0]].reduce_op](parts, axis=tuple(extremes), keepdims=True)
        gradient = gradient * (parts == reduced)[place]
    return gradient


def source_tensor(shape, mesh, placements):
    """A DTensor of `parts_of` and its leaf."""
    _, parts = parts_of(shape, mesh, placements)
    place = mesh.coordinate(dist.get_rank())
    held = cut(parts[place], mesh, placements, place) if place is not None else np.empty(0)
    leaf = torch.tensor(held).requires_grad_()
    stride = torch.empty(shape).stride()
    whole = DTensor.from_local(
        leaf, mesh.device_mesh(), placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole, leaf


def every_pair(group, shape, source_ranks, target_ranks, pairs):
    """Reshard, and send a gradient back through it; on all ranks."""
    source_mesh, target_mesh = ProcessMesh(source_ranks), ProcessMesh(target_ranks)
    source_mesh.device_mesh(), target_mesh.device_mesh()
    weight = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    results = []
    for source, target in pairs:
        x, leaf = source_tensor(shape, source_mesh, source)
        with recorded() as moved:
            y = reshard(x, target_mesh, target)
        assert y.placements == tuple(target)
        assert y.shape == torch.Size(shape)
        assert y.device_mesh == target_mesh.device_mesh()
        place = target_mesh.coordinate(group.rank())
        if any(one.is_partial() for one in target):
            held, ends = unshard(y), [Replicate()] * target_mesh.ndim
        else:
            held, ends = y.to_local(), target
        (held if place is None else held * torch.tensor(cut(weight, target_mesh, ends, place))).sum().backward()
        gradient = leaf.grad if source_mesh.coordinate(group.rank()) is not None else torch.empty(0)
        results.append(
            (y.to_local().detach().numpy(), gradient.numpy(), [(one.kind, one.mesh_dim, one.nbytes) for one in moved])
        )
    return results


def check(shape, source_mesh, target_mesh, pairs, results):
    weight = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    for index, (source, target) in enumerate(pairs):
        truth, parts = parts_of(shape, source_mesh, source)
        held = {rank: result[index][0] for rank, result in enumerate(results)}
        found = put_together(shape, target_mesh, target, held)
        np.testing.assert_allclose(found, truth, rtol=1e-13, atol=1e-14, err_msg=f"{source} to {target}")
        for place in np.ndindex(source_mesh.shape):
            wanted = gradient_for(weight, parts, source_mesh, source, place)
            wanted = cut(np.broadcast_to(wanted, shape), source_mesh, source, place)
            gradient = results[source_mesh.array[place]][index][1]
            np.testing.assert_allclose(gradient, wanted, rtol=1e-13, err_msg=f"{source} to {target} at {place}")


def check_bytes(shape, mesh, pairs, results, exact):
    costs = MeshCosts.of(mesh, "cpu-gloo")
    communicated = 0
    for index, (source, target) in enumerate(pairs):
        layouts = [layout_of(one, mesh, len(shape)) for one in (source, target)]
        plan = plan_redistribution(shape, 8, mesh.shape, *layouts, costs)
        for result in results:
            moved = result[index][2]
            assert sum(nbytes for _, _, nbytes in moved) <= plan.nbytes
            communicated += bool(moved)
            if exact:
                assert moved == [(step.kind, step.mesh_dim, step.nbytes) for step in plan.steps if step.nbytes]
    assert communicated > 0


def check_bytes_across(shape, source_mesh, target_mesh, pairs, results):
    """Beyond reducing, what is sent is what ranks lack, element by element; replicas share the sending."""
    for index, (source, target) in enumerate(pairs):
        reduced = [Replicate() if one.is_partial() else one for one in source]
        lacking = 0
        for place in np.ndindex(target_mesh.shape):
            if any(index and one == Partial("sum") for index, one in zip(place, target, strict=True)):
                continue  # holds zeros
            missing = np.zeros(shape)
            cut(missing, target_mesh, target, place)[...] = 1
            if (own := source_mesh.coordinate(int(target_mesh.array[place]))) is not None:
                cut(missing, source_mesh, reduced, own)[...] = 0
            lacking += int(missing.sum())
        sends = [[nbytes for kind, _, nbytes in result[index][2] if kind == "send"] for result in results]
        assert sum(map(sum, sends)) == 8 * lacking


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("count", "shape"), [(2, (5, 3)), (2, (4, 6)), (3, (5, 3)), (3, (2, 7, 1))], ids=lambda value: str(value)
)
def test_every_pair_on_a_line(ranks, count, shape):
    mesh = ProcessMesh(range(count))
    pairs = list(itertools.product(placements_for(len(shape), 1), repeat=2))
    results = ranks(count).run(every_pair, shape, list(range(count)), list(range(count)), pairs)
    check(shape, mesh, mesh, pairs, results)
    check_bytes(shape, mesh, pairs, results, exact=all(size % count == 0 for size in shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("array", "shape", "stride"),
    [
        ([[0, 1], [2, 3]], (5, 3), 3),
        ([[0, 1], [2, 3]], (4, 8), 11),
        ([[4, 1, 2], [0, 5, 3]], (7, 5), 11),
        ([[[3, 1]], [[2, 0]]], (3, 5), 463),
    ],
    ids=["uneven", "even", "2 x 3", "2 x 1 x 2"],
)
def test_every_pair_on_a_plane(ranks, array, shape, stride):
    """Among them both mesh dimensions cutting the same tensor dimension, unevenly; a minimum is as a maximum."""
    mesh = ProcessMesh(array)
    pairs = list(itertools.product(placements_for(2, mesh.ndim, PARTIALS[:3]), repeat=2))[::stride]
    results = ranks(len(mesh.process_ids)).run(every_pair, shape, array, array, pairs)
    check(shape, mesh, mesh, pairs, results)
    check_bytes(shape, mesh, pairs, results, exact=shape == (4, 8))


@pytest.mark.sample("apart")
@pytest.mark.parametrize(
    ("source", "target"),
    [([0, 1], [2, 3]), ([0, 1, 2], [3]), ([1, 0, 2], [1, 2, 3]), ([0, 1, 2, 3], [2, 1])],
    ids=["apart", "to one", "overlapping", "to a part"],
)
def test_every_pair_across_lines(ranks, source, target):
    shape = (5, 3)
    meshes = ProcessMesh(source), ProcessMesh(target)
    pairs = list(itertools.product(placements_for(2, 1), repeat=2))
    results = ranks(4).run(every_pair, shape, source, target, pairs)
    check(shape, *meshes, pairs, results)
    check_bytes_across(shape, *meshes, pairs, results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [([[0, 1], [2, 3]], [0, 1, 2, 3]), ([3, 0], [[0, 1], [2, 3]]), ([[0, 1, 2, 3]], [[0], [2]])]
)
def test_across_planes(ranks, source, target):
    shape = (5, 3)
    meshes = ProcessMesh(source), ProcessMesh(target)
    kinds = [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg")]
    ends = [list(itertools.product(kinds, repeat=mesh.ndim)) for mesh in meshes]
    pairs = list(itertools.product(*ends))[::3]
    results = ranks(4).run(every_pair, shape, source, target, pairs)
    check(shape, *meshes, pairs, results)
    check_bytes_across(shape, *meshes, pairs, results)


@on_ranks(6)
def test_the_published_example_of_shard_tensor(group):
    """A (4, 3) tensor on a 2 x 3 mesh."""
    mesh = ProcessMesh([[0, 1, 2], [3, 4, 5]], dim_names=["x", "y"])
    x = torch.arange(12.0).view(4, 3)
    with recorded() as moved:
        sharded = shard_tensor(x, mesh, [Shard(0), Shard(1)])
    row, column = mesh.coordinate(group.rank())
    assert moved == []
    assert sharded.to_local().shape == (2, 1)
    assert torch.equal(sharded.to_local(), x[2 * row : 2 * row + 2, column : column + 1])
    assert torch.equal(unshard(sharded), x)
    assert sharded.placements == (Shard(0), Shard(1))


def published_reshard(group):
    """Replicate on ranks 0 and 1 to Shard(0) on 2 and 3: each receives half, and from different ranks."""
    here, there = ProcessMesh([0, 1], dim_names=["x"]), ProcessMesh([2, 3], dim_names=["x"])
    x = torch.arange(12.0).view(4, 3)
    with recorded() as moved:
        out = reshard(shard_tensor(x, here, [Replicate()]), there, [Shard(0)])
    return out.placements, out.to_local().tolist(), [record.nbytes for record in moved]


def test_the_published_example_of_reshard(ranks):
    x = torch.arange(12.0).view(4, 3)
    placements, held, sent = zip(*ranks(4).run(published_reshard), strict=True)
    assert placements == ((Shard(0),),) * 4
    assert held == ([], [], x[:2].tolist(), x[2:].tolist())
    assert sent == ([24], [24], [], [])


@on_ranks(2)
def test_parameters_leaves_and_results(group):
    mesh = ProcessMesh([0, 1], dim_names=["mp"])
    whole = torch.arange(6.0).view(3, 2)
    parameter = shard_tensor(torch.nn.Parameter(whole.clone()), mesh, [Shard(0)])
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert parameter.is_leaf and parameter.requires_grad
    leaf = shard_tensor(whole.clone().requires_grad_(), mesh, [Shard(1)])
    assert leaf.is_leaf and leaf.requires_grad
    assert not shard_tensor(whole, mesh, [Shard(1)]).requires_grad
    base = whole.clone().requires_grad_()
    unshard(shard_tensor(2 * base, mesh, [Shard(-1)])).sum().backward()
    assert torch.equal(base.grad, torch.full((3, 2), 2.0))
    assert shard_tensor(base, mesh, [Shard(-1)]).placements == (Shard(1),)
    made = dtensor_from_fn(torch.full, mesh, [Partial()], (2, 2), 3.0)
    assert torch.equal(unshard(made), torch.full((2, 2), 3.0))
    assert torch.equal(made.to_local(), torch.full((2, 2), 3.0 if group.rank() == 0 else 0.0))
    torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    assert torch.equal(reshard(made, torch_mesh, [Shard(0)]).to_local(), torch.full((1, 2), 3.0))
    scalar = shard_tensor(torch.tensor(5), mesh, [Partial("max")])
    assert unshard(scalar).item() == 5
    kept = shard_tensor(whole, mesh, [Shard(0)]).to_local()
    kept.zero_()
    assert whole.sum() == 15
    for x, placements, says in [
        (made, [Shard(2)], r"Shard\(-2\) to Shard\(1\)"),
        (made, [Partial("product")], "one of 'sum', 'avg', 'max', 'min'"),
        (made, [Shard(0), Shard(1)], "one placement for each mesh dimension"),
        (scalar, [Shard(0)], "no Shard for a scalar"),
        (scalar, [Partial("avg")], "floating-point"),
    ]:
        with pytest.raises(ValueError, match=says):
            reshard(x, mesh, placements)


@on_ranks(3)
def test_integers_and_halves(group):
    mesh = ProcessMesh([0, 1, 2])
    for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.bool):
        whole = torch.arange(15).view(5, 3).to(dtype)
        for source, target in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
            x = reshard(shard_tensor(whole, mesh, [source]), mesh, [target])
            assert torch.equal(unshard(x), whole)
        if dtype is torch.int64:
            for partial in (Partial("sum"), Partial("max"), Partial("min")):
                x = reshard(shard_tensor(whole, mesh, [Shard(0)]), mesh, [partial])
                assert torch.equal(reshard(x, mesh, [Shard(1)]).full_tensor(), whole)


@on_ranks(2)
def test_meshes_and_their_groups(group):
    """Equal meshes share their groups, and a mesh of torch's keeps its own."""
    mesh = ProcessMesh([[0, 1]], dim_names=["dp", "mp"])
    assert mesh.device_mesh() is ProcessMesh([[0, 1]], dim_names=["dp", "mp"]).device_mesh()
    assert dist.get_process_group_ranks(mesh.group("mp")) == [0, 1]
    assert mesh["mp"] == ProcessMesh([0, 1], ["mp"])
    assert mesh["dp"] == ProcessMesh([group.rank()], ["dp"])
    assert mesh["mp", "dp"] == ProcessMesh([[0], [1]], ["mp", "dp"])
    torch_mesh = mesh.device_mesh()
    assert ProcessMesh.of(torch_mesh) == mesh
    assert ProcessMesh.of(torch_mesh).device_mesh() is torch_mesh


@pytest.mark.parametrize(("available", "device"), [(False, "cpu"), (True, "cuda")])
def test_the_device_of_a_torch_built_for_an_accelerator(monkeypatch, available, device):
    """Such a torch names its accelerator also where there is none, and gloo's groups have it among their devices."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    group = types.SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")])
    assert default_device(group) == device


@on_ranks(2)
def test_the_groups_of_a_mesh_wait_as_long_as_the_programs_default_group(group):
    """Of torch's own DeviceMesh a group of a part of the ranks has half an hour."""
    mesh = ProcessMesh([[0, 1]])
    assert {group_timeout(mesh.group(dim)) for dim in (0, 1)} == {time_limit(group)}
