"""COC_SPLIT_WEIGHT_GRADIENT on Megatron-core's real row layer: main_grad, DDP's flag and FSDP's parameters."""

import types

import pytest
import torch
from layers import Layers

SHAPE = (128, 2, 512)  # rows of the whole sequence, batch, this rank's inputs


class Extension(types.ModuleType):
    """Stands for Megatron's CUDA extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x, dy, main_grad):
        main_grad.add_(dy.float().t().matmul(x.float()))


def fused(group, owner, dtype):
    """Return whether the gradient was added to main_grad, the flag, and the largest relative error."""
    from megatron.core.tensor_parallel import layers as module

    module.fused_weight_gradient_mlp_cuda, module._grad_accum_fusion_available = Extension("extension"), True
    found = []
    with Layers(group.size(), gradient_accumulation_fusion=True, sequence_parallel=True, params_dtype=dtype) as layers:
        import ascend_parallel

        for settings in ({"num_chunks": 1}, {"num_chunks": 4, "split_weight_gradient": True}):
            ascend_parallel.configure(**settings)
            layer = layers.make("RowParallelLinear", (SHAPE[-1] * group.size(), 96), skip_bias_add=True)
            start = torch.ones(layer.weight.shape)
            layer.weight.main_grad = start.clone()
            if owner == "DDP":
                layer.weight.grad_added_to_main_grad = False
            elif owner == "FSDP":
                layer.weight.__fsdp_param__ = True
                layer.weight.get_main_grad = lambda start=start: start.clone()
            torch.manual_seed(5 + group.rank())
            x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
            for _ in range(2):  # two micro-batches
                layer(x)[0].square().sum().backward()
            flag = getattr(layer.weight, "grad_added_to_main_grad", None)
            found.append((layer.weight.main_grad, flag, layer.weight.grad is None, x.grad))
        ascend_parallel.configure(num_chunks=1, split_weight_gradient=False)
    (plain, *plain_rest, plain_dx), (split, *split_rest, split_dx) = found
    assert plain_rest == split_rest
    assert torch.equal(plain_dx, split_dx)
    return torch.equal(plain, split), ((plain - split).abs().max() / plain.abs().max()).item()


@pytest.mark.parametrize("owner", ["nobody", "DDP", "FSDP"])
def test_main_grad(ranks, owner):
    for same, error in ranks(2).run(fused, owner, torch.float32):
        assert error < 2e-6
        assert not same, "nothing was split"
