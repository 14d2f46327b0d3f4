"""What Megatron-core's grouped experts need of packages with CUDA kernels, for CPUs: torch's grouped matmul in place.

``grouped_gemm.ops.gmm`` and TransformerEngine's grouped layer are autograd functions in Python, as in the packages:
they compute both gradients whenever their backward runs; `gmm` refuses counts that are all zero. torch._grouped_mm
computes each expert's product; where this torch does not have it, a loop of matmuls, which has the same bits
(tests/patches/test_grouped_experts.py).
"""

import contextlib
import functools
import importlib
import types
import weakref
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


def gmm(a, b, batch_sizes, trans_b=False, gemm_fusion=False, original_weight=None):
    """Stands for ``grouped_gemm.ops.gmm``, and for MindSpeed's function of that name."""
    assert not gemm_fusion
    return _Gmm.apply(a, b, batch_sizes, trans_b)


class _GroupedLinear(torch.autograd.Function):
    """The product of each expert's rows with its weight [out, in], and its bias; gradients as TransformerEngine's.

    With `fused` the gradient of a weight goes to its main_grad: written there in the first micro-batch of a step, added
    in the others. What autograd gets in its place is not to be read.
    """

    @staticmethod
    def forward(ctx, x, m_splits, fused, first, *parameters):
        count = len(m_splits)
        weights, biases = parameters[:count], parameters[count:]
        ctx.m_splits, ctx.fused, ctx.first, ctx.biased = m_splits, fused, first, bool(biases)
        ctx.originals = [weakref.ref(weight) for weight in weights]
        ctx.save_for_backward(x, *weights)
        y = grouped_mm(x, torch.stack(weights).transpose(1, 2), m_splits)
        return y + torch.cat([b.expand(m, -1) for b, m in zip(biases, m_splits, strict=True)]) if biases else y

    @staticmethod
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        dy = dy.contiguous()
        dx = grouped_mm(dy, torch.stack(weights), ctx.m_splits)
        d_weights = list(grouped_mm_of_rows(dy, x, ctx.m_splits))
        d_biases = [rows.sum(0) for rows in dy.split(ctx.m_splits)] if ctx.biased else []
        if ctx.fused:
            d_weights = [_to_main_grad(ref(), d, ctx.first) for ref, d in zip(ctx.originals, d_weights, strict=True)]
        return dx, None, None, None, *d_weights, *d_biases


def _to_main_grad(weight, gradient, first):
    (weight.main_grad.copy_ if first else weight.main_grad.add_)(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, torch.nan)


class _TEGroupedLinear(torch.nn.Module):
    """Stands for Megatron-core's TEGroupedLinear, whose methods read `num_gemms` weights by their names."""

    def __init__(self, num_gemms, input_size, output_size, *, config, init_method, bias, skip_bias_add, **_):
        super().__init__()
        ranks = config.expert_tensor_parallel_size or 1
        output_size, input_size = (
            (output_size // ranks, input_size) if self.column else (output_size, input_size // ranks)
        )
        self.num_gemms, self.config, self.use_bias = num_gemms, config, bias
        self.te_return_bias = skip_bias_add and bias
        self.is_first_microbatch = True
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.empty(output_size, input_size)))
            init_method(getattr(self, f"weight{index}").data)
            empty = torch.empty(0)
            bias_of = torch.nn.Parameter(torch.randn(output_size)) if bias else empty
            setattr(self, f"bias{index}", bias_of)
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def _tensors(self, name):
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]

    def forward(self, x, m_splits):
        """Return the product, and the biases if they are not added."""
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        biases = self._tensors("bias") if self.use_bias else []
        added = [] if self.te_return_bias else biases
        fused, first = self.config.gradient_accumulation_fusion, self.is_first_microbatch
        y = _GroupedLinear.apply(x, m_splits, fused, first, *self._tensors("weight"), *added)
        self.is_first_microbatch = False
        return y, biases if self.te_return_bias else None


def te_linear(kind):
    """Return the class that stands for Megatron-core's grouped layer of a kind, "Column" or "Row"."""
    name, module = f"TE{kind}ParallelGroupedLinear", "megatron.core.extensions.transformer_engine"
    return type(name, (_TEGroupedLinear,), {"__module__": module, "column": kind == "Column"})


TE_COLUMN, TE_ROW = te_linear("Column"), te_linear("Row")


def te_grouped_mlp():
    """Return the specification of Megatron-core's TEGroupedMLP with layers that need no TransformerEngine."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts, moe_layer
    from megatron.core.transformer.spec_utils import ModuleSpec

    kind = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)
    submodules = kind(linear_fc1=TE_COLUMN, linear_fc2=TE_ROW)
    if hasattr(moe_layer, "ExpertsBuilder"):  # since 0.17
        return functools.partial(experts.TEGroupedMLP, submodules=submodules)
    return ModuleSpec(module=experts.TEGroupedMLP, submodules=submodules)


@contextlib.contextmanager
def grouped_experts_on_cpu():
    """Run Megatron-core's grouped experts inside this context; GroupedMLP's activation would be under torch.compile."""
    experts = importlib.import_module(f"{MOE}.experts")
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    with contextlib.ExitStack() as stack:
        if hasattr(experts, "GroupedMLP"):
            util, ops = importlib.import_module(f"{MOE}.grouped_gemm_util"), types.SimpleNamespace(gmm=gmm)
            stack.enter_context(mock.patch.object(util, "grouped_gemm", types.SimpleNamespace(ops=ops)))
            stack.enter_context(mock.patch.object(util, "ops", ops))
            stack.enter_context(mock.patch.object(experts, "jit_fuser", lambda function: function))
        for name, value in NO_FP8.items():
            stack.enter_context(mock.patch.object(random, name, value, create=True))
        yield
