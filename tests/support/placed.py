"""For the tests of reshard: tensors cut over meshes, their truth, and pairs of placements resharded on real ranks."""

import itertools

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.sharding.layout import bounds
from ascend_parallel.sharding.marked.dtensors import reshard, unshard
from ascend_parallel.sharding.mesh import ProcessMesh
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
