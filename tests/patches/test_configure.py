"""A failing configure() changes nothing on its rank, and the other ranks learn of the failure."""

import os
from pathlib import Path

import pytest
import torch
from layers import Layers
from marks import promise

import ascend_parallel


def half_way(group, folder):
    """A recording cannot be written on rank 0: rank 0 keeps its settings, and rank 1 learns of the error."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    mine = folder / str(group.rank())
    mine.mkdir()
    os.chdir(mine)  # the same settings, but a separate folder for each rank
    with Layers(group.size()) as layers:
        layer = layers.make("RowParallelLinear")
        ascend_parallel.configure(num_chunks=2, timeline="timeline")
        layer(torch.randn(64, 48))
        in_force = ascend_parallel.status()
        if group.rank() == 0:
            (mine / "timeline").write_text("a file where the folder should be")
            with pytest.raises(OSError) as failed:
                ascend_parallel.configure(num_chunks=4)
            kept = ascend_parallel.status()
            found = kept.settings == in_force.settings and kept.patches == in_force.patches
            found = found and hasattr(RowParallelLinear.forward, "ascend_parallel") and "Error" in repr(failed.value)
            torch.distributed.barrier(group)
            torch.distributed.barrier(group)
            (mine / "timeline").unlink()
        else:
            ascend_parallel.configure(num_chunks=4)
            torch.distributed.barrier(group)
            with pytest.raises(ascend_parallel.DisagreementError) as error:
                layer(torch.randn(64, 48))
            found = "configure() failed on rank 0, which kept what was in force" in str(error.value)
            torch.distributed.barrier(group)
        ascend_parallel.configure(num_chunks=4)
        layer(torch.randn(64, 48))
        return found, ascend_parallel.status().settings.num_chunks


@promise("configure-whole")
def test_a_configure_that_fails_changes_nothing_and_is_told(ranks, tmp_path):
    try:
        assert ranks(2).run(half_way, tmp_path) == [(True, 4)] * 2
    finally:
        ranks(2).run(back, str(Path.cwd()))


def back(group, folder):
    os.chdir(folder)
