"""convert: every pair of states and of 2-D layouts, values and gradients, against the definition of states."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from layout_definition import STATES, gradient_layout, join_all, split_all
from links import link_costs
from pool import on_ranks

from ascend_parallel.sharding.layout import AVERAGE, PARTIAL_GRAD, REPLICATE, SUM, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import recorded
from ascend_parallel.sharding.redistribute.edges import convert

S0, S1 = shard(0), shard(1)


def mesh_of(shape):
    mesh = ProcessMesh(torch.arange(math.prod(shape)).reshape(shape))
    mesh.device_mesh()
    return mesh, link_costs(shape, 1e-5, 1e-9)


def converted(group, mesh_shape, shape, pairs):
    """Run forward and backward of a conversion; return result and gradient, and the collectives of both."""
    mesh, costs = mesh_of(mesh_shape)
    place = mesh.coordinate(group.rank())
    found = []
    for source, target in pairs:
        whole, gradient = wholes(shape)
        generator = torch.Generator().manual_seed(0)
        local = split_all(whole, source, mesh_shape, generator)[place].clone().requires_grad_()
        arriving = split_all(gradient, gradient_layout(target), mesh_shape, generator)[place].clone()
        kept = local.detach().clone(), arriving.clone()
        with recorded() as ahead:
            result = convert(local, shape, mesh, source, target, costs)
        with recorded() as back:
            result.backward(arriving)
        assert torch.equal(local, kept[0]) and torch.equal(arriving, kept[1]), "an argument was changed"
        assert result.is_contiguous()
        found.append((result.detach(), local.grad, [record.kind for record in ahead], [record.kind for record in back]))
    return place, found


def wholes(shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def check(results, mesh_shape, shape, pairs):
    whole, gradient = wholes(shape)
    for index, (source, target) in enumerate(pairs):
        pair = f"{' '.join(map(str, source))} -> {' '.join(map(str, target))}"
        moved = join_all({place: found[index][0] for place, found in results}, target, mesh_shape)
        back = join_all({place: found[index][1] for place, found in results}, gradient_layout(source), mesh_shape)
        torch.testing.assert_close(moved, whole, rtol=1e-12, atol=1e-12, msg=lambda text, pair=pair: f"{pair}: {text}")
        torch.testing.assert_close(
            back, gradient, rtol=1e-12, atol=1e-12, msg=lambda text, pair=pair: f"gradient of {pair}: {text}"
        )


@pytest.mark.parametrize("shape", [(6, 12), (5, 7)], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_every_pair_of_states(ranks, count, shape):
    pairs = [((a,), (b,)) for a, b in itertools.product(STATES, repeat=2)]
    check(ranks(count).run(converted, (count,), shape, pairs), (count,), shape, pairs)


@pytest.mark.slow
def test_every_pair_of_layouts_on_two_dimensions(ranks):
    layouts = list(itertools.product(STATES, repeat=2))
    pairs = list(itertools.product(layouts, repeat=2))
    check(ranks(4).run(converted, (2, 2), (4, 8), pairs), (2, 2), (4, 8), pairs)


# Collectives of forward and backward; pairs that are not named have none.
COLLECTIVES = {
    (REPLICATE, PARTIAL_GRAD): ("", "all_reduce"),
    (REPLICATE, S0): ("", "all_gather"),
    (PARTIAL_GRAD, REPLICATE): ("", ""),
    (PARTIAL_GRAD, S0): ("", ""),
    (PARTIAL_GRAD, SUM): ("", ""),
    (S0, REPLICATE): ("all_gather", ""),
    (S0, PARTIAL_GRAD): ("all_gather", "reduce_scatter"),
    (S0, S1): ("all_to_all", "all_to_all"),
    (S0, SUM): ("", ""),
    (SUM, REPLICATE): ("all_reduce", ""),
    (SUM, PARTIAL_GRAD): ("all_reduce", "all_reduce"),
    (SUM, S0): ("reduce_scatter", "all_gather"),
    (SUM, AVERAGE): ("", ""),
    (AVERAGE, PARTIAL_GRAD): ("all_reduce", "all_reduce"),
    (REPLICATE, SUM): ("", ""),
}


def test_no_more_collectives_than_needed(ranks):
    pairs = [((a,), (b,)) for a, b in COLLECTIVES]
    for _, found in ranks(2).run(converted, (2,), (6, 12), pairs):
        ran = {
            pair: (" ".join(ahead), " ".join(back))
            for pair, (_, _, ahead, back) in zip(COLLECTIVES, found, strict=True)
        }
        assert ran == COLLECTIVES


@on_ranks(2)
def test_odd_cases(group):
    """No conversion returns the same tensor; integers and 16-bit types convert; a slice frees the whole tensor."""
    mesh, costs = mesh_of((2,))
    x = torch.arange(12.0).reshape(4, 3)
    found = {"same": convert(x, (4, 3), mesh, (S0,), (S0,), costs) is x}
    ids = convert(torch.arange(4), (4,), mesh, (REPLICATE,), (S0,), costs)
    found["integers"] = ids.tolist() == [[0, 1], [2, 3]][group.rank()]
    found["memory"] = ids.untyped_storage().nbytes() == 16
    half = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    total = convert(half, (4, 3), mesh, (SUM,), (PARTIAL_GRAD,), costs)
    total.sum().backward()  # an expanded gradient, of stride 0
    found["bfloat16"] = total.dtype == half.grad.dtype == torch.bfloat16 and bool(
        (total == 2).all() & (half.grad == 2).all()
    )
    with torch.no_grad():
        found["without gradient"] = not convert(half, (4, 3), mesh, (SUM,), (REPLICATE,), costs).requires_grad
    try:
        convert(x, (4, 3), mesh, (S0, S0), (S0,), costs)
    except ValueError as error:
        found["refused"] = "2 placements on a mesh of 1" in str(error)
    assert dist.get_world_size() == 2
    assert found == dict.fromkeys(["same", "integers", "memory", "bfloat16", "without gradient", "refused"], True)
