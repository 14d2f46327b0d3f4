"""Advice after the four published principles, and the published examples with their short configurations."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from small_models import GPT, Llama, ResNet
from torch import nn

from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_strategy import named_nodes, operator_name
from ascend_parallel.sharding.planner.propagate import propagate, slice_replicated
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.advice import advise, step_seconds

FILE = Path(__file__).parents[2] / "examples" / "sharding" / "published.py"
SPEC = importlib.util.spec_from_file_location("published_examples", FILE)
published = importlib.util.module_from_spec(SPEC)
sys.modules["published_examples"] = published  # its dataclass looks its own module up
SPEC.loader.exec_module(published)

MESH = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])


def layouts(plan):
    """Return the layouts of every operator's inputs and outputs, by operator name."""
    return {
        node.name: (
            plan.inputs[node.name],
            *(plan.layouts[Value(node.name, index)] for index in range(len(node.outputs))),
        )
        for node in plan.graph.nodes.values()
        if node.kind == CALL
    }


def named(graph, patterns):
    return {node.name for pattern in patterns for node in named_nodes(graph, pattern)}


@pytest.mark.parametrize("name", published.EXAMPLES)
def test_the_short_configuration_gives_the_manual_layouts(name):
    """Compare all operators, with the published objective; without a configuration the layouts differ."""
    example = published.EXAMPLES[name]()
    graph = trace(example.model, example.args)
    assert set(example.minimal) < set(example.manual)
    manual = propagate(graph, MESH, example.manual)
    short = propagate(graph, MESH, example.minimal)
    assert layouts(slice_replicated(short)) == layouts(slice_replicated(manual))
    assert slice_replicated(short).seconds == short.seconds == pytest.approx(manual.seconds, rel=1e-9)
    assert layouts(propagate(graph, MESH)) != layouts(manual)


@pytest.mark.parametrize("name", published.EXAMPLES)
def test_advice_names_the_published_minimal_set(name):
    example = published.EXAMPLES[name]()
    graph = trace(example.model, example.args)
    advice = advise(example.model, example.args, MESH)
    assert not advice.notes
    assert named(graph, advice.strategies) == named(graph, example.minimal)
    assert propagate(graph, MESH, advice.strategies).configured.keys() == named(graph, example.minimal)


PRINCIPLES = {
    "RowParallelLinear": {"layer.matmul:matmul": (1,)},
    "CoreAttention": {"layer.bmm_qk:matmul": (2,), "layer.bmm_qkv": (2,), "layer.merge_head_transpose": (2,)},
    "FlashAttention": {"layer": (4,)},
}


@pytest.mark.parametrize("name", PRINCIPLES)
def test_operators_are_named_by_their_published_principle(name):
    example = published.EXAMPLES[name]()
    advice = advise(example.model, example.args, MESH)
    assert {advised.pattern: advised.principles for advised in advice.advised} == PRINCIPLES[name]


@pytest.mark.slow
def test_leaving_out_costs_what_propagation_without_it_costs():
    """Compare with two propagations; a layer without the strategy of its only weight is replicated."""
    example = published.EXAMPLES["LlamaForCausalLM"]()
    graph = trace(example.model, example.args)
    advice = advise(example.model, example.args, MESH)
    assert advice.seconds == pytest.approx(step_seconds(propagate(graph, MESH, advice.strategies)), rel=1e-12)
    costs = {advised.pattern: advised.seconds for advised in advice.advised}
    for pattern in ("lm_head", "model.layers.*.feed_forward.w2"):
        rest = {other: strategy for other, strategy in advice.strategies.items() if other != pattern}
        assert costs[pattern] == pytest.approx(step_seconds(propagate(graph, MESH, rest)) - advice.seconds, rel=1e-9)
        assert costs[pattern] > 1e-3
    assert {advised.count for advised in advice.advised if "layers" in advised.pattern} == {
        2,
        4,
        6,
    }  # once for both layers


def test_the_time_of_a_step_is_the_objective_time():
    example = published.EXAMPLES["LlamaForCausalLM"]()
    plan = propagate(trace(example.model, example.args), MESH, objective="time")
    assert step_seconds(plan) == pytest.approx(
        plan.cost, rel=1e-4
    )  # the objective may count an operator as replicated that is narrowed later


def test_the_boundary_between_a_data_parallel_front_and_a_model_parallel_back_is_named():
    """The published case of principle 3: convolutions, then a classifier of very many classes."""
    with torch.device("meta"):
        args = (torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.long))
        advice = advise(ResNet(channels=256, classes=262144), args, ProcessMesh([0, 1, 2, 3], ["mp"]))
    found = {advised.pattern: advised for advised in advice.advised}
    assert [pattern for pattern in found if 3 in found[pattern].principles] == ["wide"]
    assert "before it the strategy along mp changes from S(0) to R" in found["wide"].reason
    assert found["conv1"].in_strategy[0] == ("mp", 1, 1, 1)
    assert found["head"].in_strategy == ((1, 1), ("mp", 1), ("mp",))
    assert found[":mean"].principles == (2,)


@pytest.mark.slow
def test_operators_that_share_a_name_but_not_a_strategy_have_numbers():
    """The small Llama transposes heads there and back in the same module; queries and keys are rotated alike."""
    tokens = torch.zeros(4, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = Llama(layers=3, width=1024, heads=16, groups=8, wide=2816, vocabulary=32000, length=512)
    advice = advise(model, (tokens, tokens), MESH)
    assert not advice.notes
    counts = {advised.pattern: advised.count for advised in advice.advised}
    assert counts["layers.*.attention:chunk"] == 6
    assert counts["layers.*.norm1:mean"] == 3
    assert counts["embedding"] == counts["head"] == 1
    transposes = [pattern for pattern in counts if ":transpose#" in pattern]
    assert len(transposes) > 1
    assert {counts[pattern] for pattern in transposes} == {3}


def test_the_linears_of_a_sequential_are_no_repeated_layers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
        advice = advise(model, (torch.zeros(512, 4096),), ProcessMesh([0, 1], ["mp"]))
    assert [advised.pattern for advised in advice.advised] == ["0", "2"]


def test_advice_reads_as_a_table():
    with torch.device("meta"):
        args = (torch.zeros(2, 64, dtype=torch.long),) * 2
        advice = advise(GPT(2, 256, 4, 512, 64), args, ProcessMesh([0, 1], ["mp"]))
    head, first, why, *_ = str(advice).splitlines()
    assert head.split() == ["configure", "operators", "proposed", "strategy", "left", "out"]
    assert first.startswith("tokens ")
    assert "1 x embedding" in first
    assert first.endswith(" ms")
    assert why == "    (1) has the weight [512, 256]: its strategy decides which part a rank holds"


class Attention(nn.Module):
    """Attention of functional matmuls: two in one module, with different strategies."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).view(*x.shape[:2], 8, 64).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)).softmax(-1)
        return self.o(torch.matmul(scores, v).transpose(1, 2).reshape(x.shape))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def advice_of_attention(data_dim):
    with torch.device("meta"):
        model = Layers()
        return model, advise(model, (torch.zeros(512, 64, 512),), MESH, data_dim=data_dim)


def test_only_the_data_dimension_cuts_the_batch():
    model, advice = advice_of_attention("dp")
    cuts = [entry for advised in advice.advised for entry in advised.in_strategy]
    activations = [entry for entry in cuts if len(entry) > 2]
    assert activations
    assert {entry[0] for entry in activations} == {"dp"}
    assert not any("dp" in str(entry) for entry in cuts if len(entry) == 2)
    free = advice_of_attention(None)[1]
    assert any("mp" in str(entry[0]) for advised in free.advised for entry in advised.in_strategy if len(entry) > 2)
    assert propagate(trace(model, (torch.zeros(512, 64, 512, device="meta"),)), MESH, advice.strategies, data_dim="dp")


def test_functional_matmuls_have_names_and_equal_suggestions_share_a_line_of_reasons():
    model, advice = advice_of_attention("dp")
    assert not advice.notes
    named = {advised.pattern: advised.count for advised in advice.advised}
    assert named["layers.*:matmul"] == 4
    assert named["layers.*:transpose#0"] == 2
    graph = trace(model, (torch.zeros(512, 64, 512, device="meta"),))
    first, second = (named_nodes(graph, f"layers.*:matmul#{number}") for number in (0, 1))
    assert [node.inputs[1].node.startswith("transpose") for node in (*first, *second)] == [True] * 4
    assert {node.name for node in (*first, *second)} == named_of(graph, "matmul")
    assert not {node.name for node in first} & {node.name for node in second}
    lines = str(advice).splitlines()
    linears = [
        number for number, line in enumerate(lines) if line.startswith(("layers.*.q ", "layers.*.k ", "layers.*.v "))
    ]
    assert linears == list(range(linears[0], linears[0] + 3))
    assert sum("has the weight [512, 512]" in line for line in lines) < 4


def named_of(graph, operator):
    return {node.name for node in graph.nodes.values() if node.call and operator_name(node) == operator}


def test_each_principle_says_what_it_names_and_saves():
    model, advice = advice_of_attention(None)
    ends = {line[:3]: line for line in str(advice).splitlines() if line[:1] == "("}
    assert ends["(1)"].startswith("(1) operators with weights: layers.*.q, ")
    assert ends["(1)"].endswith(f"without them {1e3 * advice.savings[1]:+.3f} ms")
    assert ends["(4)"] == "(4) fused operators: none"
    graph = trace(model, (torch.zeros(512, 64, 512, device="meta"),))
    for number, saved in advice.savings.items():
        rest = {each.pattern: (each.in_strategy, None) for each in advice.advised if number not in each.principles}
        without = step_seconds(propagate(graph, MESH, rest))
        assert saved == pytest.approx(without - advice.seconds, abs=1e-12)


def test_the_example_proposes_the_batch_along_dp_alone():
    spec = importlib.util.spec_from_file_location("advice_example", FILE.parent / "advice.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    advice, seconds = example.main()
    cuts = [entry for advised in advice.advised for entry in advised.in_strategy if len(entry) > 2]
    assert {entry[0] for entry in cuts} == {"dp"}
    assert 0 < seconds < advice.seconds
