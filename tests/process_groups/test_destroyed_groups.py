"""Layers of a process group that the program has destroyed say so."""

import pytest
import torch
import torch.distributed as dist
from layers import Layers
from pool import on_ranks

import ascend_parallel

SENTENCE = "the process group of this layer was destroyed .*: make the model anew"


@on_ranks(2)
def test_a_layer_of_a_destroyed_group_names_the_cause(group):
    kinds = ("RowParallelLinear", "ColumnParallelLinear")
    with Layers(group.size()) as layers:
        for warm in (True, False):
            made = {kind: layers.make(kind, (64, 96), config={"sequence_parallel": True}) for kind in kinds}
            ascend_parallel.configure(num_chunks=4)
            x = {"RowParallelLinear": torch.randn(256, 1, 32), "ColumnParallelLinear": torch.randn(128, 1, 64)}
            old = dist.new_group()
            for kind, layer in made.items():
                layer.tp_group = old
                if warm:
                    layer(x[kind])
            dist.destroy_process_group(old)
            for kind, layer in made.items():
                with pytest.raises(RuntimeError, match=SENTENCE):
                    layer(x[kind])
