"""Megatron's CUDA extension that adds weight gradients to main_grad, on CPUs."""

import types


class Extension(types.ModuleType):
    """Adds in float32; `wrong` multiplies what is added."""

    wrong = 1.0

    @classmethod
    def wgrad_gemm_accum_fp32(cls, x, dy, main_grad):
        main_grad.add_(cls.wrong * dy.float().t().matmul(x.float()))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def install():
    """Have Megatron-core find the extension."""
    from megatron.core.tensor_parallel import layers as module

    module.fused_weight_gradient_mlp_cuda, module._grad_accum_fusion_available = Extension("extension"), True
