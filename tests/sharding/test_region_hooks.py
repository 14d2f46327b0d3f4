"""Regions of planned graphs under hooks on saved tensors: copied rows have to be finished, checkpoints drop them."""

from contextlib import nullcontext

import pytest
import torch
from late import late_collectives
from sharded import column_and_row, compare, made, mesh_of
from test_row_regions import REGION, Norm, chunks_seen, traced
from torch.utils.checkpoint import checkpoint

from ascend_parallel import Settings
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule


def copying():
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def hooked(group, checkpointed):
    """Compare with the unsharded model; return the chunks that a region sent."""
    model, x = made(Norm), torch.randn((64, 3, 24), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = propagate(traced(model, x), mesh_of((group.size(),)), column_and_row(), objective="redistribution")
    sharded = ShardedModule(model, plan, settings=Settings(**REGION))
    if checkpointed:
        forward = sharded.forward
        sharded.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    patch, seen = chunks_seen()
    with late_collectives(), patch, nullcontext() if checkpointed else copying():
        compare(model, sharded, x)
    return len(seen)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_hooks_on_saved_tensors(ranks, checkpointed):
    sent = ranks(2).run(hooked, checkpointed)
    assert all(sent) if checkpointed else sent == [0, 0]
