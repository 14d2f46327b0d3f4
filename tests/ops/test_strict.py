"""COC_STRICT=1: an unmet request is an error on every rank instead of a warning, before any communication."""

import pytest
import torch
from layers import Layers
from pool import on_ranks

import ascend_parallel
from ascend_parallel import Settings, UnmetRequestError, row_linear

STRICT = {"num_chunks": 4, "strict": True}


@on_ranks(2)
def test_every_rank_is_told(group):
    messages = []
    with Layers(group.size()) as layers:
        ascend_parallel.configure(**STRICT)
        layer = layers.make("RowParallelLinear", (64, 96))
        layer(torch.randn(128, 32))[0].sum().backward()  # a covered call runs
        expert = layers.make("RowParallelLinear", (64, 96), is_expert=True, skip_bias_add=True)
        expert.explicit_expert_comm = True
        for call in (lambda: layer(torch.randn(20, 32)), lambda: expert(torch.randn(64, 2, 32))):
            with pytest.raises(UnmetRequestError) as error:
                call()
            messages.append(str(error.value))
        layer(torch.randn(128, 32))[0].sum().backward()  # and still runs after an error
    with pytest.raises(UnmetRequestError) as error:
        row_linear(
            torch.ones(64, 8, dtype=torch.float64),
            torch.ones(8, 8, dtype=torch.float64),
            group=group,
            settings=Settings(fused=True, strict=True),
        )
    few_rows, uncovered, dtype = [*messages, str(error.value)]
    assert few_rows.startswith("COC_STRICT=1: matmul_all_reduce [20, 32, 96] float32 on 2 cpu ranks: COC_PARALLEL_")
    assert uncovered.startswith("COC_STRICT=1: RowParallelLinear runs without overlap: expert layers")
    assert "shm: dtype torch.float64" in dtype
