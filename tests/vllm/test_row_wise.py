"""Every class of the table of row-wise modules: a call with some rows gives the results of these rows, bit for bit."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from ascend_parallel.ops.unfinished import is_unfinished
from ascend_parallel.patches.vllm.row_wise import ACTIVATIONS, MATMULS, MODULES, NORMS

FEATURES = 256


@pytest.fixture(autouse=True)
def config():
    torch.set_num_threads(1)  # several threads cut GELU anywhere, where its vectors' ends have other bits
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
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


def test_what_is_finished_goes_straight_through():
    x = torch.randn(300, FEATURES)
    assert not any(is_unfinished(y) for each in ACTIVATIONS if each.exists() for y in listed(made(each)(x)))
