"""What a rank holds: a plan for a part of the job, and the shards of every parameter."""

import pytest
import small_models
import torch
import torch.distributed as dist
from one_card import box_of
from plans import by_hand
from pool import on_ranks
from sharded_models import BATCHES, EXACT, S0, C, R, made, mesh_of, planned
from test_gradient_reduction import Stack
from torch import nn

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

SMALL = 3000  # bytes of a bucket: a model has several


@pytest.mark.slow
@on_ranks(4)
def test_a_plan_for_a_part_of_the_job(group):
    """Two meshes, each with a plan of its own, as pipeline stages have."""
    model, x = made(Stack, 4), torch.ones(4, 8, dtype=torch.float64)
    meshes = [ProcessMesh(ranks, ["of_stage"]) for ranks in ([0, 1], [2, 3])]  # without process groups
    groups = [dist.new_group(mesh.process_ids) for mesh in meshes]
    stage = group.rank() // 2
    half = nn.Module()
    half.layers = nn.Sequential()
    for index in (2 * stage, 2 * stage + 1):
        half.layers.add_module(str(index), model.layers[index])
    half.forward = half.layers.forward
    graph = trace(half, (x,))
    calls = {name: ([S0, C, C], S0) for name, node in graph.nodes.items() if "linear" in name and node.call}
    plan = by_hand(graph, meshes[stage], {next(iter(graph.nodes.values())).source: R}, calls)
    with pytest.raises(RuntimeError, match="has no process groups"):
        ShardedModule(model, plan, group=groups[stage])
    for mesh in meshes:
        mesh.device_mesh()
    with pytest.raises(ValueError, match=r"group has the ranks \[0, 1, 2, 3\]"):
        ShardedModule(model, plan, group=group)
    sharded = ShardedModule(model, plan, group=groups[stage])
    assert set(sharded.state_dict()) == {f"layers.{name}" for name in half.layers.state_dict()}
    for module in (half, sharded):
        module(x).square().sum().backward()
    found = {name: param.grad for name, param in half.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), found, **EXACT)


@on_ranks(4)
def test_tensor_shards(group):
    whole, batch = made(small_models.GPT), BATCHES["GPT"](torch.Generator().manual_seed(7))
    sharded = ShardedModule(whole, planned("GPT", trace(whole, batch), mesh_of((2, 2))))
    found = sharded.tensor_shards()
    assert set(found) == set(whole.state_dict())
    for name, tensor in whole.state_dict().items():
        piece = found[name]
        assert piece.shape == tensor.shape
        assert torch.equal(piece.local, tensor[box_of(piece)])
    assert found["layers.0.up.weight"].local is sharded.get_parameter("layers.0.up.weight")
    assert any(piece.local.shape != piece.shape for piece in found.values())
