"""A row layer as one operator: what is traced, in one graph and in pieces, and what decides inside."""

import functools
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from vllm.compilation.backends import split_graph
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm

from ascend_parallel.patches.vllm import operators
from ascend_parallel.patches.vllm.auto import Sum
from ascend_parallel.patches.vllm.layers import Vllm, all_reduce, row_forward
from ascend_parallel.patches.vllm.row_wise import NORMS, row_wise_call
from ascend_parallel.settings import Settings

K, N = 32, 48


class Row(torch.nn.Module):
    """A row layer on one rank, where vLLM's own forward runs."""

    tp_size = 1

    def __init__(self, skip_bias_add):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(N, K)), torch.nn.Parameter(torch.randn(N))
        self.output_size, self.skip_bias_add, self.return_bias = N, skip_bias_add, skip_bias_add

    def own(self, input_):
        y = torch.nn.functional.linear(input_, self.weight, None if self.skip_bias_add else self.bias)
        return (y, self.bias) if self.return_bias else y


Row.forward = row_forward(Row.own, Vllm(Settings(num_chunks=4), "0.32.0"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Row(False), Row(True)

    def forward(self, x):
        y = torch.ops.aten.tanh(self.first(x)).sum(-1, keepdim=True)  # the graph is cut at tanh, as at attention
        z, bias = self.second(x * y)
        return z + bias


class Traced:
    """A backend that keeps the graphs, and runs each in pieces."""

    def __init__(self):
        self.graphs, self.pieces = [], []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        cut, pieces = split_graph(graph, ["aten::tanh"])
        self.pieces.append(len(pieces))
        return cut.forward


def calls(graph):
    return [node for node in graph.graph.nodes if operators.NAME in str(node.target)]


def context(layers, mode=CUDAGraphMode.NONE):
    return override_forward_context(
        ForwardContext(no_compile_layers=layers, attn_metadata={}, slot_mapping={}, cudagraph_runtime_mode=mode)
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Model()
    with torch.inference_mode():
        yield made


def compiled(model):
    torch._dynamo.reset()
    backend = Traced()

    def run(x):
        torch._dynamo.mark_dynamic(x, 0)
        return traced(x)

    traced = torch.compile(model, backend=backend, fullgraph=True)
    return run, backend


def test_a_layer_is_one_operator_of_an_unbroken_graph_for_every_number_of_tokens(model):
    layers = {}
    assert operators.give_names(model, set(model.children()), layers) == 2
    run, backend = compiled(model)
    with context(layers):
        for tokens in (600, 7, 300, 2048):
            x = torch.randn(tokens, K)
            assert torch.equal(run(x), model(x))
    assert [len(calls(graph)) for graph in backend.graphs] == [2]  # one graph, traced once
    assert backend.pieces == [3]
    assert [node.args[1:] for node in calls(backend.graphs[0])] == [(N, "first"), (N, "second")]


def test_a_layer_without_a_name_is_traced_as_it_is(model):
    run, backend = compiled(model)
    x = torch.randn(600, K)
    assert torch.equal(run(x), model(x)) and not calls(backend.graphs[0])


def test_names_do_not_clash_with_those_of_another_model(model):
    other, layers = Model(), {"first": object()}
    operators.give_names(model, {model.first}, layers)
    operators.give_names(other, {other.first, other.second}, layers)
    assert layers["first.2"] is model.first and layers["first.3"] is other.first and layers["second"] is other.second
    operators.give_names(other, {other.first}, layers)
    assert len(layers) == 4


def test_the_operator_is_what_torch_asks_of_one(model):
    layers = {"first": model.first}
    with context(layers), torch.inference_mode(False):
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.ascend_parallel.vllm_row_linear.default, (torch.randn(300, K), N, "first"), test_utils=checks
        )


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_nothing_is_cut_while_a_device_graph_is_captured(model, mode):
    framework, summed = Vllm(Settings(num_chunks=4), "0.32.0"), Sum(K, N, torch.float32)
    assert framework.covers(2048, "cpu", summed)
    with context({}):
        assert framework.covers(2048, "cpu", summed)
    with context({}, mode):
        assert not framework.covers(2048, "cpu", summed)


def test_a_pass_that_fuses_all_reduces_keeps_them():
    for passes, name in (({"fuse_allreduce_rms": True}, "fuse_allreduce_rms"), ({"enable_sp": None}, None)):
        compilation = SimpleNamespace(pass_config=SimpleNamespace(**passes))
        assert operators.fusing_pass(SimpleNamespace(compilation_config=compilation)) == name


def functions_of(run):
    """Return the functions of this package that ``run()`` calls."""
    called = Counter()

    def look(frame, event, _):
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("ascend_parallel."):
            called[frame.f_code.co_qualname] += 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def test_a_call_with_few_tokens_runs_few_functions_of_this_package(model):
    framework, layers, x = Vllm(Settings(num_chunks=4), "0.32.0"), {}, torch.randn(8, K)
    operators.give_names(model, {model.first}, layers)
    with set_current_vllm_config(VllmConfig()), context(layers):
        norm = functools.partial(row_wise_call(RMSNorm.forward, NORMS[0]), RMSNorm(K))
        reduce = functools.partial(all_reduce(lambda group, x: x, framework), None)
        calls = {
            "row layer": (model.first, 1),
            "norm": (norm, 2),
            "all-reduce": (reduce, 1),
            "operator": (lambda x: torch.ops.ascend_parallel.vllm_row_linear(x, N, "first"), 5),
        }
        for name, (call, most) in calls.items():
            call(x)
            called = functions_of(lambda call=call: call(x))
            assert 0 < sum(called.values()) <= most, (name, called)
