"""Every class of vLLM in ops/row_wise.py: a call with some rows gives the results of these rows, bit for bit."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

from ascend_parallel.ops.row_wise import ACTIVATIONS, MATMULS, MODULES, NORMS, QUANTISED_MATMULS
from ascend_parallel.ops.unfinished import is_unfinished
from ascend_parallel.patches.vllm.row_wise import multiplies_by_rows

FEATURES = 256


# Of an eager model, and of a compiled one outside its graphs: vLLM compiles some activations alone there.
MODE = "mode" if "mode" in CompilationConfig.__dataclass_fields__ else "level"  # in 0.11


@pytest.fixture(autouse=True, params=[0, pytest.param(3, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def config(request):
    torch.set_num_threads(1)  # several threads cut GELU anywhere, where its vectors' ends have other bits
    compilation = CompilationConfig(**{MODE: request.param})
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)), torch.inference_mode():
        torch.manual_seed(0)
        yield


def made(each, dtype=torch.float32):
    """Return a module of the class with drawn weights, as of a model of this dtype."""
    kind = each.kind()
    torch.set_default_dtype(dtype)
    try:
        module = kind(FEATURES) if each in NORMS else kind()
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def listed(results):
    return results if isinstance(results, (tuple, list)) else (results,)


CASES = [(each, residual) for each in (*NORMS, *ACTIVATIONS) for residual in (False, True)[: len(each.rows)]]


@pytest.mark.parametrize(("each", "residual"), CASES, ids=lambda value: getattr(value, "owner", value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_know_of_each_other(each, residual, dtype):
    if each.kind() is None:
        pytest.skip("this vLLM has no such class")
    module = made(each, dtype)
    inputs = [torch.randn(300, FEATURES, dtype=dtype) for _ in range(1 + residual)]
    whole = listed(module(*(x.clone() for x in inputs)))
    for rows in (slice(0, 128), slice(128, 300), slice(7, 201)):
        part = listed(module(*(x[rows].clone() for x in inputs)))
        assert all(torch.equal(some, every[rows]) for some, every in zip(part, whole, strict=True))
    for x in inputs:
        x[200:] = torch.nan
    changed = listed(module(*inputs))
    assert all(torch.equal(some[:200], every[:200]) for some, every in zip(changed, whole, strict=True))


def test_the_table_has_no_class_without_a_test():
    assert len(MODULES) == len(NORMS) + len(ACTIVATIONS) + len(MATMULS)
    assert len(MATMULS) == 1  # test_generation.py: its kernels need a loaded layer
    assert len(QUANTISED_MATMULS) == 3  # test_features.py, of the methods that this vLLM runs on CPUs


QUANTISED = {  # linear method, scheme of the layer -> whether a row has its product alone
    ("compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod", "CompressedTensorsW8A8Int8"): True,
    ("compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod", "CompressedTensorsWNA16"): True,
    ("compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod", "CompressedTensorsW8A8Fp8"): False,
    ("auto_gptq.AutoGPTQLinearMethod", None): True,
    ("auto_awq.AutoAWQLinearMethod", None): False,
    ("auto_awq.AutoAWQMarlinLinearMethod", None): False,
    ("fp8.Fp8LinearMethod", None): False,
}


@pytest.mark.parametrize(("name", "scheme"), QUANTISED)
def test_a_scale_over_all_rows_and_a_weight_that_is_unpacked_in_each_call_are_left_out(name, scheme):
    module, _, method = name.rpartition(".")
    folder = "vllm.model_executor.layers.quantization"
    kind = getattr(pytest.importorskip(f"{folder}.{module}"), method)
    schemes = importlib.import_module(f"{folder}.compressed_tensors.schemes")
    layer = SimpleNamespace(quant_method=object.__new__(kind))
    if scheme:
        layer.scheme = object.__new__(getattr(schemes, scheme))
    assert multiplies_by_rows(layer) is QUANTISED[name, scheme]


def test_what_is_finished_goes_straight_through():
    x = torch.randn(300, FEATURES)
    assert not any(is_unfinished(y) for each in ACTIVATIONS if each.exists() for y in listed(made(each)(x)))
