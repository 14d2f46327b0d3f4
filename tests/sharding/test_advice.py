"""Advice after the four published principles, and the published examples with their short configurations."""

import html
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from small_models import GPT, Llama, ResNet
from torch import nn

from ascend_parallel.sharding.graph import CALL, Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_strategy import StrategyError, named_nodes, operator_name
from ascend_parallel.sharding.planner.propagate import propagate, slice_replicated
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.advice import advise, step_seconds
from ascend_parallel.sharding.visualize.page import to_html
from ascend_parallel.sharding.visualize.proposals import in_strategy, proposals

FILE = Path(__file__).parents[2] / "examples" / "sharding" / "guide_examples.py"
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
    manual = propagate(graph, MESH, example.manual, objective="redistribution")
    short = propagate(graph, MESH, example.minimal, objective="redistribution")
    assert layouts(slice_replicated(short)) == layouts(slice_replicated(manual))
    assert slice_replicated(short).seconds == short.seconds == pytest.approx(manual.seconds, rel=1e-9)
    assert layouts(propagate(graph, MESH, objective="redistribution")) != layouts(manual)


def principled(model, args, mesh=MESH, **options):
    """Return the operators that the principles name, as `advise` finds them."""
    plan = propagate(trace(model, args), mesh, objective="time", **options)
    return [each for each in proposals(plan) if each.principles]


def strategies_of(advised):
    return {each.pattern: (each.in_strategy, None) for each in advised}


@pytest.mark.parametrize("name", published.EXAMPLES)
def test_the_principles_name_the_published_minimal_set(name):
    example = published.EXAMPLES[name]()
    graph = trace(example.model, example.args)
    strategies = strategies_of(principled(example.model, example.args))
    assert named(graph, strategies) == named(graph, example.minimal)
    assert propagate(graph, MESH, strategies, objective="redistribution").configured.keys() == named(
        graph, example.minimal
    )


PRINCIPLES = {
    "RowParallelLinear": {"layer.matmul:matmul": (1,)},
    "CoreAttention": {"layer.bmm_qk:matmul": (2,), "layer.bmm_qkv": (2,), "layer.merge_head_transpose": (2,)},
    "FlashAttention": {"layer": (4,)},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PRINCIPLES)
def test_operators_are_named_by_their_published_principle(name):
    example = published.EXAMPLES[name]()
    advice = advise(example.model, example.args, MESH)
    assert {advised.pattern: advised.principles for advised in advice.named} == PRINCIPLES[name]
    assert len(advice.advised) == 1


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
        advised = principled(ResNet(channels=256, classes=262144), args, ProcessMesh([0, 1, 2, 3], ["mp"]))
    found = {each.pattern: each for each in advised}
    assert [pattern for pattern in found if 3 in found[pattern].principles] == ["wide"]
    assert "before it the strategy along mp changes from S(0) to R" in found["wide"].reason
    assert found["conv1"].in_strategy[0] == ("mp", 1, 1, 1)
    assert found["head"].in_strategy == ((1, 1), ("mp", 1), ("mp",))
    assert found[":mean"].principles == (2,)


def small_llama():
    tokens = torch.zeros(4, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = Llama(layers=3, width=1024, heads=16, groups=8, wide=2816, vocabulary=32000, length=512)
    return model, (tokens, tokens)


def test_operators_that_share_a_name_and_a_strategy_are_one_proposal():
    """The small Llama transposes heads there and back in the same module; queries and keys are rotated alike."""
    model, args = small_llama()
    counts = {advised.pattern: advised.count for advised in principled(model, args)}
    assert counts["layers.*.attention:chunk"] == 6
    assert counts["layers.*.attention:transpose"] == 12
    assert counts["layers.*.norm1:mean"] == counts["layers.*.norm2:mean"] == 3
    assert counts["embedding"] == counts["head"] == 1


def test_every_operator_that_computes_is_proposed_once():
    """Also where the first and the last layer have a strategy of their own: they are named by their numbers."""
    model, args = small_llama()
    plan = propagate(trace(model, args), MESH, objective="time")
    found = proposals(plan)
    named = {each.pattern: named_nodes(plan.graph, each.pattern) for each in found}
    names = [node.name for nodes in named.values() for node in nodes]
    assert len(names) == len(set(names))
    computing = {
        node.name
        for node in plan.graph.nodes.values()
        if node.call and node.inputs and any(meta.dtype.is_floating_point for meta in node.outputs)
    }
    assert set(names) == computing
    for each in found:
        assert len(named[each.pattern]) == each.count
        assert {repr(in_strategy(plan, node)) for node in named[each.pattern]} == {repr(each.in_strategy)}


def test_the_linears_of_a_sequential_are_no_repeated_layers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
        advised = principled(model, (torch.zeros(512, 4096),), ProcessMesh([0, 1], ["mp"]))
    assert [each.pattern for each in advised] == ["0", "2"]


def small_gpt():
    with torch.device("meta"):
        return GPT(1, 1024, 16, 8192, 256), (torch.zeros(8, 256, dtype=torch.long),) * 2


def mlp():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096)), (torch.zeros(512, 4096),)


def small_vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(num_hidden_layers=2, hidden_size=1280, num_attention_heads=16)
    with torch.device("meta"):
        return transformers.ViTForImageClassification(config), (torch.zeros(64, 3, 224, 224),)


SEARCHED = {
    "mlp": (mlp, [0, 1], None, 1),
    "gpt data": (small_gpt, [[0, 1], [2, 3]], "dp", None),
    "vit": (small_vit, [[0, 1], [2, 3]], None, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SEARCHED)
def test_the_greedy_set_is_a_smallest_one_for_these_models(case):
    """Compare with all smaller sets, of the strategies of the plan of least time."""
    make, ids, data, size = SEARCHED[case]
    mesh = ProcessMesh(ids, ["dp", "mp"] if isinstance(ids[0], list) else ["mp"])
    options = {"data_dim": data, "only_data_cuts_batch": data is not None}
    model, args = make()
    advice = advise(model, args, mesh, data_dim=data)
    graph = trace(model, args)
    automatic = propagate(graph, mesh, objective="time", **options)

    def seconds(chosen):
        return step_seconds(propagate(graph, mesh, strategies_of(chosen), objective="redistribution", **options))

    assert advice.least == pytest.approx(step_seconds(automatic), rel=1e-12)
    assert seconds(advice.advised) == pytest.approx(advice.least, rel=1e-6)
    assert size in (None, len(advice.advised))
    candidates = proposals(automatic)
    for fewer in range(len(advice.advised)):
        for chosen in itertools.combinations(candidates, fewer):
            assert seconds(chosen) > advice.least * (1 + 1e-6), [each.pattern for each in chosen]
    for left in advice.advised:
        rest = [each for each in advice.advised if each is not left]
        assert left.seconds == pytest.approx(seconds(rest) - advice.seconds, rel=1e-9)
        assert left.seconds > 0


@pytest.mark.slow
def test_a_deep_vit_has_two_operators_to_configure():
    """12 blocks of transformers: the layers of all blocks are named once, and each of the two is needed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(num_hidden_layers=12, hidden_size=1280, num_attention_heads=16)
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
        advice = advise(model, (torch.zeros(64, 3, 224, 224),), ProcessMesh(list(range(8)), ["mp"]))
    assert [each.count for each in advice.advised] == [1, 24]  # docs/propagation.md has the table of 32 blocks
    assert advice.advised[1].pattern.startswith("vit.layers.*.")
    assert all(each.seconds > 1e-3 for each in advice.advised)
    assert advice.alone > 2 * advice.seconds
    assert len(advice.named) >= 12
    assert len(str(advice).splitlines()) < 10


def test_where_propagation_alone_is_best_nothing_needs_configuring():
    """A linear layer too small to gain from sharding."""
    with torch.device("meta"):
        advice = advise(nn.Linear(8, 8), (torch.zeros(4, 8),), ProcessMesh([0, 1], ["mp"]))
    assert advice.advised == ()
    assert advice.strategies == {}
    ms = f"{1e3 * advice.least:.3f} ms a step"
    assert str(advice) == (
        f"nothing needs configuring: propagation alone reaches {ms}, the least, with both objectives"
    )
    assert "(1) operators with weights: " in advice.text(full=True)
    assert advice.as_dict()["nothing_needs_configuring"] is True


def test_advice_reads_as_a_table_and_its_json_and_page_say_the_same():
    model, args = mlp()
    advice = advise(model, args, ProcessMesh([0, 1], ["mp"]))
    time, redistribution, head, *rows = str(advice).splitlines()
    assert time.startswith("objective time: nothing needs configuring, propagation alone reaches ")
    assert redistribution.endswith("ms, and each is needed")
    assert head.split() == ["configure", "operators", "proposed", "strategy", "left", "out"]
    assert len(rows) == 2 * len(advice.advised)
    (only,) = advice.advised
    assert rows[0].split()[0] == only.pattern
    assert rows[0].endswith(f"{1e3 * only.seconds:+.3f} ms")
    assert rows[1].strip() == only.reason
    found = json.loads(json.dumps(advice.as_dict()))
    assert found["advised"][0]["pattern"] == only.pattern
    assert found["advised"][0]["seconds"] == only.seconds
    page = html.unescape(to_html(advice.plan, advice))
    assert time in page
    assert redistribution in page
    assert f"<td>{only.strategy}</td>" in page
    assert f"{1e3 * only.seconds:+.3f}</td>" in page


def test_numbers_of_layers_can_be_named():
    model, args = small_llama()
    graph = trace(model, args)
    assert [node.module for node in named_nodes(graph, "layers.1-2.mlp.up")] == ["layers.1.mlp.up", "layers.2.mlp.up"]
    with pytest.raises(StrategyError, match="names nothing"):
        named_nodes(graph, "layers.3-9.mlp.up")


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


def advised_of_attention(**options):
    with torch.device("meta"):
        model = Layers()
        return model, principled(model, (torch.zeros(512, 64, 512),), MESH, **options)


@pytest.mark.slow
def test_only_the_data_dimension_cuts_the_batch():
    model, advised = advised_of_attention(data_dim="dp", only_data_cuts_batch=True)
    cuts = [entry for each in advised for entry in each.in_strategy]
    activations = [entry for entry in cuts if len(entry) > 2]
    assert activations
    assert {entry[0] for entry in activations} == {"dp"}
    assert not any("dp" in str(entry) for entry in cuts if len(entry) == 2)
    free = advised_of_attention()[1]
    assert any("mp" in str(entry[0]) for each in free for entry in each.in_strategy if len(entry) > 2)
    args = (torch.zeros(512, 64, 512, device="meta"),)
    assert propagate(trace(model, args), MESH, strategies_of(advised), data_dim="dp", objective="redistribution")
    assert {each.pattern for each in advise(model, args, MESH, data_dim="dp").advised} <= {
        each.pattern
        for each in proposals(
            propagate(trace(model, args), MESH, objective="time", data_dim="dp", only_data_cuts_batch=True)
        )
    }


def test_functional_matmuls_have_names():
    model, advised = advised_of_attention(data_dim="dp", only_data_cuts_batch=True)
    counts = {each.pattern: each.count for each in advised}
    assert counts["layers.*.o"] == 2
    assert counts["layers.0:matmul#0"] == counts["layers.1:matmul#0"] == 1  # of different strategies
    graph = trace(model, (torch.zeros(512, 64, 512, device="meta"),))
    first, second = (named_nodes(graph, f"layers.*:matmul#{number}") for number in (0, 1))
    assert [node.inputs[1].node.startswith("transpose") for node in (*first, *second)] == [True] * 4
    assert {node.name for node in (*first, *second)} == named_of(graph, "matmul")
    assert not {node.name for node in first} & {node.name for node in second}


def named_of(graph, operator):
    return {node.name for node in graph.nodes.values() if node.call and operator_name(node) == operator}


def test_the_full_text_has_a_line_for_each_principle():
    with torch.device("meta"):
        advice = advise(Layers(), (torch.zeros(512, 64, 512),), MESH)
    lines = advice.text(full=True).splitlines()
    ends = {line[:3]: line for line in lines if line[:1] == "("}
    assert ends["(1)"].startswith("(1) operators with weights: layers.*.q, ")
    assert ends["(4)"] == "(4) fused operators: none"
    rows = [number for number, line in enumerate(lines) if line.startswith(("layers.*.q ", "layers.*.k "))]
    assert rows[-1] - rows[-2] == 1  # equal strategies and reasons stand together
    assert str(advice) == advice.text() == "\n".join(lines[: lines.index("")])


@pytest.mark.slow
def test_the_example_proposes_the_batch_along_dp_alone():
    spec = importlib.util.spec_from_file_location("advice_example", FILE.parent / "advice.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    advice, seconds = example.main()
    cuts = [entry for advised in advice.advised for entry in advised.in_strategy if len(entry) > 2]
    assert {entry[0] for entry in cuts} <= {"dp"}
    assert advice.advised
    assert 0 < seconds < advice.seconds
