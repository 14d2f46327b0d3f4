"""Training that continues from a checkpoint: random states, plain modules, modules of torch's own parallelism."""

import random

import numpy as np
import torch
from marks import promise
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint import (
    load,
    optimizer_tensor_shards,
    save,
    tensor_shards_of,
    whole_state,
)


def test_random_states_are_each_ranks_own_or_the_first_ones(ranks, tmp_path):
    drawn = ranks(2).run(draw_after_saving, tmp_path)
    assert drawn[0] != drawn[1]
    assert ranks(2).run(draw_after_loading, tmp_path) == drawn
    assert ranks(3).run(draw_after_loading, tmp_path) == [drawn[0]] * 3


def _draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), torch.randn(2).tolist()


def draw_after_saving(group, path):
    for seed in torch.manual_seed, random.seed, np.random.seed:
        seed(100 + group.rank())
    _draw()
    save(path, step=1, model={"w": TensorShard(torch.ones(1), (1,), (0,))})
    return _draw()


def draw_after_loading(group, path):
    torch.manual_seed(0)
    load(path, model={"w": TensorShard(torch.ones(1), (1,), (0,))})
    return _draw()


# Models of torch


class Small(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, width, dtype=torch.float64)
        self.second = torch.nn.Linear(width, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.tensor(4))

    def forward(self, x):
        return self.second(torch.nn.functional.dropout(self.first(x).tanh(), 0.2, self.training))


def train(module, optimizer, count, start):
    losses = []
    for step in range(start, start + count):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    return losses


@promise("resume-bits")
def test_training_goes_on_bit_for_bit(tmp_path):
    module = Small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    train(module, optimizer, 6, 0)
    save(tmp_path, step=6, model=tensor_shards_of(module), optimizer=optimizer_tensor_shards(module, optimizer))
    expected = train(module, optimizer, 10, 6)
    again = Small()
    fresh = torch.optim.AdamW(again.parameters(), lr=0.02)
    step = load(tmp_path, model=tensor_shards_of(again), optimizer=optimizer_tensor_shards(again, fresh)).step
    assert train(again, fresh, 10, step) == expected
    assert torch.equal(again.first.weight, module.first.weight)


def test_fully_sharded_training_goes_on_in_one_process_and_on_other_ranks(ranks, tmp_path):
    module = Small().eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    train(module, optimizer, 6, 0)
    expected = train(module, optimizer, 10, 6)
    ranks(3).run(train_sharded, tmp_path, 0, None)  # 8 rows on 3 ranks: 3, 3, 2
    for losses in ranks(2).run(train_sharded, tmp_path, 10, "fsdp") + ranks(4).run(train_sharded, tmp_path, 10, "2d"):
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=0)
    again = Small().eval()
    fresh = torch.optim.AdamW(again.parameters(), lr=0.02)
    load(tmp_path, model=tensor_shards_of(again), optimizer=optimizer_tensor_shards(again, fresh))
    torch.testing.assert_close(train(again, fresh, 10, 6), expected, rtol=1e-11, atol=0)


def train_sharded(group, path, count, load_as):
    module = Small().eval()
    if load_as == "2d":  # fully_shard over tensor parallel: strided shards
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (group.size(),)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    if load_as is None:
        train(module, optimizer, 6, 0)
        save(path, step=6, model=tensor_shards_of(module), optimizer=optimizer_tensor_shards(module, optimizer))
        return None
    load(path, model=tensor_shards_of(module), optimizer=optimizer_tensor_shards(module, optimizer))
    return train(module, optimizer, count, 6)


def test_stages_on_meshes_of_their_own(ranks, tmp_path):
    assert ranks(3).run(save_stages, tmp_path) == [["one"], ["one", "two"], ["two"]]
    found = whole_state(tmp_path)
    assert torch.equal(found["one"], torch.arange(10.0).view(5, 2))
    assert torch.equal(found["two"], -torch.arange(10.0).view(5, 2))


def save_stages(group, path):
    module = torch.nn.Module()
    for name, place, sign in ("one", [0, 1], 1), ("two", [1, 2], -1):
        mesh = DeviceMesh("cpu", place)
        part = distribute_tensor(sign * torch.arange(10.0).view(5, 2), mesh, [Shard(0)], src_data_rank=None)
        module.register_buffer(name, part)
    held = tensor_shards_of(module)
    save(path, step=1, model=held)
    return list(held)
