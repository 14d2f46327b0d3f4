"""COC_REGION=1 in decoders of transformers and of torch: bits, truth, and rows that are NaN until they are finished."""

import pytest
import torch
from delayed_collectives import DelayedWork, delayed_collectives
from pairwise import base_choice
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch_parallel import decoder, parallel
from torch_parallel import step as torch_step

import ascend_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import Written, count_of, load, step, unequal, worst

REGION = {"num_chunks": 4, "region": True, "region_rows": 4}


def both_ways(model, run):
    """Return plain's values, those of late regions, and the calls that left rows."""
    ascend_parallel.configure(num_chunks=1)
    plain = run(model)
    ascend_parallel.configure(**REGION)
    before = count_of("region")
    with delayed_collectives():
        late = run(model)
    calls, left = count_of("region") - before, DelayedWork.unfinished
    ascend_parallel.configure(num_chunks=1)
    return plain, late, calls, left


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("models"))


def hugging_face(group, path):
    model, truth = load(group, path, torch.float32), load(group, path, torch.float64, tensor_parallel=False)
    plain, late, calls, left = both_ways(model, step)
    right = step(truth)
    return unequal(plain, late), worst(late, {name: right[name] for name in right if name in plain}), calls, left


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "count"),
    [("Llama", 2), ("Qwen2", 2), ("Mistral", 2), ("GPTNeoX", 2), ("Llama", 3), ("Phi3", 2), ("Qwen2", 4)],
)
def test_decoders_of_transformers(ranks, path, name, count):
    for different, (error, where), calls, left in ranks(count).run(hugging_face, path(name)):
        if count == 2 and name != "GPTNeoX":  # whose row biases are added after the sum
            assert different == []
        assert error < 2e-5, where
        assert calls == 4  # o_proj and down_proj of two layers
        assert left == 0


@pytest.mark.sample("3-layers")
@pytest.mark.parametrize(
    ("count", "plan"), base_choice([2, 3, 4], ["plain", "layers", "sequence"], (2, "layers")), ids=str
)
@on_ranks()
def test_decoders_of_torch(group, plan):
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(), init_device_mesh("cpu", (group.size(),)), plan)
    plain, late, calls, left = both_ways(model, torch_step)
    right = torch_step(decoder(dtype=torch.float64))
    different, (error, where) = unequal(plain, late), worst(late, right)
    if group.size() == 2:
        assert different == []
    assert error < 2e-5, where
    assert calls == 4
    assert left == 0
