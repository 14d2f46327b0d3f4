"""USE_COC_FUSED_KERNEL=1: a row layer of vLLM reaches torch_npu's operator where its page allows the call.

torch_npu is a stub whose operator computes what its page says; tests/ops holds our calls against its schemas, and
tests/ascend runs them on the real torch_npu. The stub stays here: vLLM 0.32 on CPUs asks for a torch that no torch_npu
has, and its NPU platform (vllm-ascend) is a package of its own.
"""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from ranks import on_two_ranks

K, N = 512, 96


def stub(group, calls):
    """Let calls of this process choose as on an NPU whose operators are sums over gloo."""
    import torch

    from ascend_parallel.ops import npu, operators
    from ascend_parallel.ops.call import matmul_of
    from ascend_parallel.ops.npu_limits import FUSED_OPERATORS
    from ascend_parallel.patches.vllm import fused

    def npu_mm_all_reduce_base(x1, x2, hcom, *, reduce_op, comm_turn):
        assert (hcom, reduce_op, comm_turn) == ("tensor parallel", "sum", 0)
        calls.append(len(x1))
        y = x1.float() @ x2.float()
        torch.distributed.all_reduce(y, group=group)
        return y.to(x1.dtype)

    sys.modules["torch_npu"] = ModuleType("torch_npu")
    sys.modules["torch_npu"].npu_mm_all_reduce_base = npu_mm_all_reduce_base
    npu._HCCL_NAMES[group] = "tensor parallel"
    npu.soc_name = lambda: "Ascend910B1"
    names = frozenset({"input", "x2", "hcom", "reduce_op", "comm_turn"})
    npu.arguments = lambda operator: names if operator in FUSED_OPERATORS else frozenset()
    fused.matmul_of = operators.matmul_of = lambda *call: replace(matmul_of(*call), device="npu")


def layer_in(dtype, **options):
    """Return a row layer of vLLM whose weight no kernel of CPUs has packed."""
    import torch
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear(2 * K, N, params_dtype=dtype, **options)
    layer.cpu_linear = torch.nn.functional.linear
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(layer.tp_rank)).to(dtype)
    if layer.bias is not None:
        layer.bias.data.fill_(3)  # the same on every rank
    return layer


def rows(folder):
    """Return for each case the rows of the fused calls, and the largest difference from vLLM's own output."""
    import torch
    from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import ForwardContext, override_forward_context

    import ascend_parallel

    calls, found = [], {}

    def case(name, layer, tokens, mode=CUDAGraphMode.NONE, **settings):
        x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(7 + layer.tp_rank)).to(layer.params_dtype)
        ascend_parallel.configure(num_chunks=1)
        expected = layer(x.clone())
        ascend_parallel.configure(fused=True, frameworks=("vllm",), **settings)
        calls.clear()
        with override_forward_context(ForwardContext({layer.prefix: layer}, {}, {}, cudagraph_runtime_mode=mode)):
            if name == "compiled":
                y = torch.ops.ascend_parallel.vllm_row_linear(x, N, layer.prefix)
                expected = expected[0]
            else:
                y = layer(x)
        pairs = zip(y, expected, strict=True) if isinstance(y, tuple) else [(y, expected)]
        far = [(a.double() - b.double()).abs().max().item() for a, b in pairs if a is not None]
        found[name] = [list(calls), max(far) / expected[0].abs().max().item()]

    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        parallel_state.init_distributed_environment(backend="gloo")
        parallel_state.initialize_model_parallel(2)
        stub(parallel_state.get_tp_group().device_group, calls)
        layer = layer_in(torch.bfloat16, prefix="down")
        case("prefill", layer, 600)
        case("compiled", layer, 600)
        case("few tokens", layer, 8)
        case("captured", layer, 600, CUDAGraphMode.FULL)
        case("bias of the caller", layer_in(torch.bfloat16, skip_bias_add=True), 600)
        case("checked", layer_in(torch.bfloat16, prefix="checked", skip_bias_add=True), 600, verify_every=1)
        found["checked"].append(ascend_parallel.verification().as_dict()["passed"])
        case("no bias", layer_in(torch.bfloat16, bias=False), 600)
        case("fp32", layer_in(torch.float32), 600)
        quantised = layer_in(torch.bfloat16)
        quantised.quant_method = type("Int8LinearMethod", (type(quantised.quant_method),), {})()
        case("quantised", quantised, 600)
        layer.weight.data = -layer.weight.data
        case("replaced weight", layer, 600)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_two_ranks(rows, tmp_path_factory.mktemp("fused"))


@pytest.mark.parametrize("case", ["prefill", "compiled", "bias of the caller", "checked", "no bias", "replaced weight"])
def test_a_call_that_the_operator_takes_is_fused(case, results):
    for found in results[0]:
        calls, far, *checked = found[case]
        assert calls == [600] and far < 0.02 and all(checked)


@pytest.mark.parametrize("case", ["few tokens", "captured", "fp32", "quantised"])
def test_another_call_is_not(case, results):
    for found in results[0]:
        calls, far = found[case]
        assert not calls and far < 0.02


def test_the_log_says_why(results):
    assert results[1].count("USE_COC_FUSED_KERNEL=1: RowParallelLinear is not fused: ") == 1
    assert "matmul_all_reduce takes torch.float16 or torch.bfloat16, not torch.float32" in results[1]
