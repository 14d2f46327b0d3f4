"""What Megatron-core's grouped experts need of packages with CUDA kernels, for CPUs: torch's grouped matmul in place.

``grouped_gemm.ops.gmm`` is an autograd function in Python, as in the package: it computes both gradients whenever its
backward runs, and refuses counts that are all zero. torch._grouped_mm computes each expert's product; where this
torch's CPU does not have it, a loop of matmuls, which has the same bits (tests/patches/test_grouped_experts.py).
"""

import contextlib
import importlib
import types
from unittest import mock

import torch

MOE = "megatron.core.transformer.moe"


class _NoFp8:
    """Stands for TransformerEngine's state of fp8, which 0.16 asks for in any recomputation of an activation."""

    is_fp8_enabled = staticmethod(lambda: False)


NO_FP8 = {
    "FP8GlobalStateManager": _NoFp8,
    "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
    "fp8_autocast": lambda **_: contextlib.nullcontext(),
}


def grouped_mm(x, weights, counts):
    """Return the product [M, N] of each expert's rows of x [M, K], `counts` of them, with its weight [K, N]."""
    if hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x, weights, offs=_ends(counts))
    return torch.cat([rows @ weight for rows, weight in zip(x.split(list(counts)), weights, strict=True)])


def grouped_mm_of_rows(x, dy, counts):
    """Return the product [E, K, N] of each expert's rows of x [M, K], transposed, with those of dy [M, N]."""
    if hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x.t(), dy, offs=_ends(counts))
    sizes = list(counts)
    return torch.stack([a.t() @ b for a, b in zip(x.split(sizes), dy.split(sizes), strict=True)])


def _ends(counts):
    return torch.as_tensor(counts).cumsum(0).to(torch.int32)


class _Gmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, batch_sizes, trans_b):
        assert torch.count_nonzero(batch_sizes) != 0
        assert (a.dtype, b.dtype) == (torch.bfloat16,) * 2
        assert batch_sizes.dtype == torch.int64
        assert len(batch_sizes) == len(b)
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return grouped_mm(a, b.transpose(1, 2) if trans_b else b, batch_sizes.tolist())

    @staticmethod
    def backward(ctx, dy):
        a, b, batch_sizes = ctx.saved_tensors
        counts, dy = batch_sizes.tolist(), dy.contiguous()
        da = db = None
        if ctx.needs_input_grad[0]:
            da = grouped_mm(dy, b if ctx.trans_b else b.transpose(1, 2), counts)
        if ctx.needs_input_grad[1]:
            db = grouped_mm_of_rows(dy, a, counts) if ctx.trans_b else grouped_mm_of_rows(a, dy, counts)
        return da, db, None, None


def gmm(a, b, batch_sizes, trans_b=False):
    """Stands for ``grouped_gemm.ops.gmm``."""
    return _Gmm.apply(a, b, batch_sizes, trans_b)


@contextlib.contextmanager
def grouped_gemm_on_cpu():
    """Run Megatron-core's GroupedMLP inside this context, whose activation would be under torch.compile."""
    util = importlib.import_module(f"{MOE}.grouped_gemm_util")
    experts = importlib.import_module(f"{MOE}.experts")
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    ops = types.SimpleNamespace(gmm=gmm)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(util, "grouped_gemm", types.SimpleNamespace(ops=ops)))
        stack.enter_context(mock.patch.object(util, "ops", ops))
        for name, value in NO_FP8.items():
            stack.enter_context(mock.patch.object(random, name, value, create=True))
        stack.enter_context(mock.patch.object(experts, "jit_fuser", lambda function: function))
        yield
