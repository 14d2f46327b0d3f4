"""Every pair of placements on real gloo processes: values, gradients, and no more bytes moved than planned."""

import itertools
import types

import pytest
import torch
import torch.distributed as dist
from placed import PARTIALS, check, check_bytes, check_bytes_across, every_pair, placements_for
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.process_groups import group_timeout, time_limit
from ascend_parallel.sharding.marked.dtensors import dtensor_from_fn, reshard, shard_tensor, unshard
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.redistribute.collectives import recorded


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
        ([[0, 1], [2, 3]], (5, 3), 1),
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


@pytest.mark.sample(1)
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


def published_examples(group):
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
    return sharded.placements


def test_the_published_example_of_shard_tensor(ranks):
    assert ranks(6).run(published_examples) == [(Shard(0), Shard(1))] * 6


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


def kinds_of_tensors(group):
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


def test_parameters_leaves_and_results(ranks):
    ranks(2).run(kinds_of_tensors)


def integers_and_halves(group):
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


def test_integers_and_halves(ranks):
    ranks(3).run(integers_and_halves)


def twice_the_same(group):
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


def test_meshes_and_their_groups(ranks):
    ranks(2).run(twice_the_same)


@pytest.mark.parametrize(("available", "device"), [(False, "cpu"), (True, "cuda")])
def test_the_device_of_a_torch_built_for_an_accelerator(monkeypatch, available, device):
    """Such a torch names its accelerator also where there is none, and gloo's groups have it among their devices."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    group = types.SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")])
    assert default_device(group) == device


def limits(group):
    mesh = ProcessMesh([[0, 1]])
    return {group_timeout(mesh.group(dim)) for dim in (0, 1)} == {time_limit(group)}


def test_the_groups_of_a_mesh_wait_as_long_as_the_programs_default_group(ranks):
    """Of torch's own DeviceMesh a group of a part of the ranks has half an hour."""
    assert ranks(2).run(limits) == [True, True]
