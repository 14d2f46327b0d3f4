"""A row layer as one operator: what is traced, in one graph and in pieces, and what decides inside."""

import functools
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.compilation.backends import split_graph
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from ascend_parallel.ops.row_wise import NORMS
from ascend_parallel.patches.vllm import operators, start
from ascend_parallel.patches.vllm.auto import StepVariant, Sum
from ascend_parallel.patches.vllm.layers import Vllm, all_reduce, make_row_forward
from ascend_parallel.patches.vllm.row_wise import row_wise_call
from ascend_parallel.settings import Settings

K, N = 32, 48


class Multiply:
    """What multiplies in a layer."""

    def apply(self, layer, x, bias):
        return torch.nn.functional.linear(x, layer.weight, bias)


class Row(RowParallelLinear):
    """A row layer of vLLM, made without its groups; on one rank vLLM's own forward runs."""

    def __init__(self, skip_bias_add, tp_size=1, tp_rank=0):
        torch.nn.Module.__init__(self)
        self.weight, self.bias = torch.nn.Parameter(torch.randn(N, K)), torch.nn.Parameter(torch.randn(N))
        self.output_size, self.skip_bias_add, self.return_bias = N, skip_bias_add, skip_bias_add
        self.tp_size, self.tp_rank, self.input_is_parallel, self.reduce_results = tp_size, tp_rank, True, True
        self.quant_method = Multiply()


class Doubling(Row):
    """A layer of a model, with work of its own around the forward of its base."""

    def forward(self, input_):
        return 2 * super().forward(input_ + 1)


class Model(torch.nn.Module):
    def __init__(self, first=Row):
        super().__init__()
        self.first, self.second = first(False), Row(True)

    def forward(self, x):
        y = torch.ops.aten.tanh(self.first(x)).sum(-1, keepdim=True)  # the graph is cut at tanh, as at attention
        z, bias = self.second(x * y)
        return z + bias


class Step(torch.nn.Module):
    """A model that computes nothing."""

    def forward(self, positions):
        return positions


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


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """A tensor-parallel group of one rank, and vLLM's forward replaced."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(_all_reduce_out_place=lambda y: y))
    framework = Vllm(Settings(num_chunks=4), "0.32.0")
    monkeypatch.setattr(RowParallelLinear, "forward", make_row_forward(RowParallelLinear.forward, framework))
    framework.put_in_force()
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    framework.put_out_of_force()


@pytest.fixture
def model():
    return Model()


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


def test_what_a_subclass_does_around_the_forward_is_done_once():
    model, layers = Model(Doubling), {}
    operators.give_names(model, {model.first}, layers)
    run, backend = compiled(model)
    with context(layers):
        for tokens in (600, 7):
            x = torch.randn(tokens, K)
            assert torch.equal(run(x), model(x))
    assert len(calls(backend.graphs[0])) == 1


def test_what_a_later_patch_does_around_the_forward_is_done_once(model, monkeypatch):
    ours, layers = RowParallelLinear.forward, {}
    monkeypatch.setattr(RowParallelLinear, "forward", lambda self, input_: 2 * ours(self, input_ + 1))
    operators.give_names(model, {model.first}, layers)
    run, backend = compiled(model.first)
    with context(layers):
        for tokens in (600, 7):
            x = torch.randn(tokens, K)
            assert torch.equal(run(x), model.first(x))
    assert len(calls(backend.graphs[0])) == 1


def test_operators_run_vllms_own_code_once_the_patches_are_reverted(model):
    x, framework = torch.randn(600, K), RowParallelLinear.forward.ascend_parallel
    with context({"first": model.first}):
        expected = torch.ops.ascend_parallel.vllm_row_linear(x, N, "first")
        framework.put_out_of_force()
        assert not hasattr(RowParallelLinear, operators.FORWARD)
        assert torch.equal(torch.ops.ascend_parallel.vllm_row_linear(x, N, "first"), expected)


def test_hooks_of_all_models_go_with_the_patches_and_come_back_once():
    framework, models = RowParallelLinear.forward.ascend_parallel, [Step(), Step()]

    def left():
        """Return which models leave their graphs in a dummy step in chunks outside these."""
        found = []
        for model in models:
            with context({}), framework.trying(StepVariant(4, eager=True)):
                model(positions=torch.zeros(600))
                found.append((get_forward_context().skip_compiled, len(model._forward_pre_hooks)))
        return found

    for model in models:
        framework.may_leave_graphs(model)
    assert left() == [(True, 1)] * 2
    framework.put_out_of_force()
    assert left() == [(False, 0)] * 2
    for _ in range(2):  # after an error; and once another module is imported
        framework.put_in_force()
    assert left() == [(True, 1)] * 2


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_step_of_few_tokens_has_what_the_forward_of_vllm_returns(monkeypatch, skip_bias_add, tp_rank):
    summed = SimpleNamespace(all_reduce=lambda y: 3 * y, _all_reduce_out_place=lambda y: 3 * y)
    monkeypatch.setattr(parallel_state, "_TP", summed)
    layer, x = Row(skip_bias_add, tp_size=2, tp_rank=tp_rank), torch.randn(7, K)
    expected = operators.output_of(RowParallelLinear.forward.__wrapped__(layer, x))
    with context({"row": layer}):
        assert torch.equal(torch.ops.ascend_parallel.vllm_row_linear(x, N, "row"), expected)
        layer.quant_method.apply = lambda layer, x, bias: x.new_ones(len(x), N)  # asked in each call
        assert torch.equal(torch.ops.ascend_parallel.vllm_row_linear(x, N, "row"), x.new_full((7, N), 3))


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
    assert framework.covered_chunks(2048, "cpu", summed)
    with context({}):
        assert framework.covered_chunks(2048, "cpu", summed)
    with context({}, mode):
        assert not framework.covered_chunks(2048, "cpu", summed)


def test_a_pass_that_fuses_all_reduces_keeps_them():
    for passes, name in (({"fuse_allreduce_rms": True}, "fuse_allreduce_rms"), ({"enable_sp": None}, None)):
        compilation = SimpleNamespace(pass_config=SimpleNamespace(**passes))
        assert operators.fusing_pass(SimpleNamespace(compilation_config=compilation)) == name


@pytest.mark.parametrize(
    ("settings", "config", "own"),
    [
        ({"auto": True}, {}, True),
        ({"auto": True}, {"device": "cuda", "captures": "NONE"}, True),
        ({"auto": True}, {"device": "cuda", "captures": "PIECEWISE"}, False),
        ({"auto": True}, {"device": "cuda", "captures": "FULL"}, False),
        ({"auto": True}, {"mode": 1}, False),  # torch compiles the whole model
        ({"auto": True}, {"replicas": 2}, False),  # nothing is timed
        ({"auto": True, "region": False}, {}, False),
        ({"auto": True, "fused": True}, {}, True),  # without effect there
        ({"auto": True, "fused": True}, {"device": "npu"}, False),
        ({"tune": "plan.json"}, {"worker": None}, False),  # it is not asked then
        ({"num_chunks": 4}, {"worker": None}, False),
    ],
)
def test_auto_puts_no_operator_into_graphs_where_nothing_hides_its_cost(settings, config, own):
    worker = SimpleNamespace(model_runner=SimpleNamespace(_dummy_run=None))
    given = {"mode": 2, "replicas": 1, "captures": "NONE", "device": "cpu", "worker": worker, **config}
    compilation = SimpleNamespace(mode=given["mode"], cudagraph_mode=CUDAGraphMode[given["captures"]])
    parallel = SimpleNamespace(data_parallel_size=given["replicas"])
    vllm_config = SimpleNamespace(compilation_config=compilation, parallel_config=parallel)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=SimpleNamespace(type=given["device"]))]))
    assert start.keeps_own_graphs(vllm_config, given["worker"], model, Vllm(Settings(**settings), "0.32.0")) is own


def test_without_vllms_switch_the_graphs_have_operators(monkeypatch):
    config = SimpleNamespace(compilation_config=SimpleNamespace(mode=3))
    assert operators.can_leave_graphs(config)
    monkeypatch.delattr(ForwardContext, "skip_compiled")
    assert not operators.can_leave_graphs(config)


def test_a_cached_graph_is_of_one_number_of_operators():
    framework = Vllm(Settings(auto=True), "0.32.0")
    start.mark_caches(framework)
    try:
        keys = []
        for framework.operators in (0, 2, 0):
            keys.append(envs.compile_factors()[start.CACHE_KEY])
    finally:
        start.unmark_caches()
    assert keys[0] == keys[2] != keys[1]


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
            "operator": (lambda x: torch.ops.ascend_parallel.vllm_row_linear(x, N, "first"), 3),
        }
        for name, (call, most) in calls.items():
            call(x)
            called = functions_of(lambda call=call: call(x))
            assert 0 < sum(called.values()) <= most, (name, called)
