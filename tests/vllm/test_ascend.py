"""Classes with the names, the bases and the methods of vllm-ascend's: which take the patches, and which keep theirs.

vllm-ascend needs torch_npu, so its operators are not run: the classes here multiply and normalise as vLLM does.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

import ascend_parallel
from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.unfinished import UnfinishedTensor, is_unfinished
from ascend_parallel.patches.vllm import layers
from ascend_parallel.settings import Settings

FEATURES = 64
LINEAR = """
import torch
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

class AscendUnquantizedLinearMethod(UnquantizedLinearMethod):
    {apply}

class AscendRowParallelLinear(RowParallelLinear):
    def forward(self, input_, **kwargs):
        return super().forward(input_) if self.custom_op is None else self.custom_op.apply(input_)
"""
OWN_APPLY = "def apply(self, layer, x, bias=None): return torch.nn.functional.linear(x, layer.weight, bias)"
NORMS = """
from vllm.model_executor.layers.layernorm import RMSNorm

class AscendRMSNorm(RMSNorm):
    pass

class OtherRMSNorm(RMSNorm):
    pass
"""


# A hook on an import runs once in a process, so that case comes first.
@pytest.fixture(params=[(OWN_APPLY, True), (OWN_APPLY, False), ("pass", False)], ids=["hooked", "own", "inherited"])
def package(request, tmp_path, monkeypatch):
    apply, configure_first = request.param
    ops = tmp_path / "vllm_ascend" / "ops"
    ops.mkdir(parents=True)
    for folder in (ops, ops.parent):
        (folder / "__init__.py").touch()
    (ops / "linear.py").write_text(LINEAR.format(apply=apply))
    (ops / "layernorm.py").write_text(NORMS)
    monkeypatch.syspath_prepend(tmp_path)
    if configure_first:
        ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    linear, norms = (importlib.import_module(f"vllm_ascend.ops.{name}") for name in ("linear", "layernorm"))
    if not configure_first:
        ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield linear, norms
    ascend_parallel.configure(num_chunks=1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


def on_their_way(x):
    """Return x as rows of which none has arrived."""
    value, bounds = torch.empty_like(x), [(0, 128), (128, len(x))]

    def fill(index):
        rows = slice(*bounds[index])
        value[rows] = x[rows]

    return UnfinishedTensor(value, Rows(LazyRows((128, len(x) - 128), fill), 1, 1))


def test_its_matmul_and_its_norm_run_on_the_rows_that_have_arrived(package):
    linear, norms = package
    x, weight = torch.randn(300, FEATURES), torch.randn(32, FEATURES)
    layer = torch.nn.Module()
    layer.weight, layer.cpu_linear = torch.nn.Parameter(weight), torch.nn.functional.linear
    y = linear.AscendUnquantizedLinearMethod().apply(layer, on_their_way(x), None)
    assert is_unfinished(y) and torch.equal(y.finished(), torch.nn.functional.linear(x, weight))
    norm = norms.AscendRMSNorm(FEATURES)
    z = norm(on_their_way(x))
    assert is_unfinished(z) and torch.equal(z.finished(), norm(x))


def test_a_subclass_of_another_name_waits(package):
    x = torch.randn(300, FEATURES)
    norm = package[1].OtherRMSNorm(FEATURES)
    assert not is_unfinished(norm(on_their_way(x)))


def test_a_row_layer_with_an_operator_of_its_own_keeps_it(package):
    kind, vllm = package[0].AscendRowParallelLinear, layers.Vllm(Settings(num_chunks=4), "0.32.0")
    assert layers_forward(kind).ascend_parallel.settings.num_chunks == 4
    common = {"tp_size": 2, "reduce_results": True, "input_is_parallel": True, "params_dtype": torch.bfloat16}
    ours = SimpleNamespace(**common, custom_op=None, out_dtype=torch.float32)
    theirs = SimpleNamespace(**common, custom_op=SimpleNamespace())
    assert vllm.uncovered(theirs) == "vllm-ascend runs it with an operator of its own (SimpleNamespace)"
    assert vllm.uncovered(ours) == "its result has another dtype (out_dtype=torch.float32)"


def layers_forward(kind):
    """Return the forward that a subclass reaches by super()."""
    return super(kind, kind).forward
