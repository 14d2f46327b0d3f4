"""COC_SPLIT_WEIGHT_GRADIENT on Megatron-core's real row layer: main_grad, DDP's flag and FSDP's parameters."""

import pytest
import torch
from fused_gradients import install
from layers import Layers
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.base import in_range
from ascend_parallel.patches.megatron import installed_version

KNOWS_FSDP = in_range(installed_version(), ">=0.14,<1")
SHAPE = (128, 2, 512)  # rows of the whole sequence, batch, this rank's inputs


@pytest.mark.parametrize(
    "owner",
    [
        "nobody",
        "DDP",
        pytest.param("FSDP", marks=pytest.mark.skipif(not KNOWS_FSDP, reason="known to layers since 0.14")),
    ],
)
@on_ranks(2)
def test_main_grad(group, owner):
    """Return whether the gradient was added to main_grad, the flag, and the largest relative error."""
    install()
    found = []
    with Layers(group.size(), gradient_accumulation_fusion=True, sequence_parallel=True) as layers:
        for settings in ({"num_chunks": 1}, {"num_chunks": 4, "split_weight_gradient": True}):
            ascend_parallel.configure(**settings)
            layer = layers.make("RowParallelLinear", (SHAPE[-1] * group.size(), 192), skip_bias_add=True)
            start = torch.ones(layer.weight.shape)
            layer.weight.main_grad = start.clone()
            if owner == "DDP":
                layer.weight.grad_added_to_main_grad = False
            elif owner == "FSDP":
                layer.weight.__fsdp_param__ = True
                layer.weight.get_main_grad = lambda start=start: start.clone()
            torch.manual_seed(5 + group.rank())
            x = torch.randn(SHAPE, requires_grad=True)
            for _ in range(2):  # two micro-batches
                layer(x)[0].square().sum().backward()
            flag = getattr(layer.weight, "grad_added_to_main_grad", None)
            found.append((layer.weight.main_grad, flag, layer.weight.grad is None, x.grad))
        ascend_parallel.configure(num_chunks=1, split_weight_gradient=False)
    (plain, *plain_rest, plain_dx), (split, *split_rest, split_dx) = found
    assert plain_rest == split_rest
    assert torch.equal(plain_dx, split_dx)
    assert (plain - split).abs().max() < 2e-6 * plain.abs().max()
    assert not torch.equal(plain, split), "nothing was split"
