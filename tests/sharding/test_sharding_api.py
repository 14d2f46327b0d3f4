"""What users of sharding touch: the tracer, annotations, strategy files, explanations, the command, the example."""

import subprocess
from pathlib import Path

import pytest
import torch
from launch import forked_python
from pool import on_ranks
from small_models import GPT, Llama
from torch import nn

import ascend_parallel
from ascend_parallel.sharding import (
    ProcessMesh,
    ShardedModule,
    StrategyError,
    TraceError,
    annotated,
    diff,
    explain,
    propagate,
    read_strategies,
    register_rule,
    shard,
    trace,
)
from ascend_parallel.sharding.graph import CALL, PARAMETER, Ref, Value
from ascend_parallel.sharding.layout import REPLICATE, Placement
from ascend_parallel.sharding.rules import OpPlacements

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sharding"
TOKENS = torch.zeros(2, 16, dtype=torch.long)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, scale=1.0):
        first, second = self.up(x).chunk(2, dim=-1)
        return {"y": self.down(torch.cat((first, second), -1)) * scale, "first": first}


def test_a_trace_knows_modules_parameters_and_outputs():
    graph = trace(Block(), (torch.zeros(4, 8),), {"scale": 2.0})
    calls = [(node.module, node.call.name.split(".")[1]) for node in graph.nodes.values() if node.kind == CALL]
    assert calls == [("up", "linear"), ("", "chunk"), ("", "cat"), ("down", "linear"), ("", "mul")]
    assert [node.source for node in graph.nodes.values() if node.kind == PARAMETER] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert graph.outputs["first"] == Value("chunk", 0)
    assert graph.meta(graph.outputs["y"]).shape == (4, 8)
    linear = graph.nodes["linear"]
    assert linear.call.args == (Ref(0), Ref(1), Ref(2))
    assert graph.readers()[Value("chunk", 0)] == [("cat", 0)]


def test_a_tied_parameter_is_there_once():
    graph = trace(GPT(), (TOKENS, TOKENS))
    held = [node for node in graph.nodes.values() if node.kind == PARAMETER and node.outputs[0].shape == (64, 32)]
    assert len(held) == 1
    assert len(graph.readers()[Value(held[0].name)]) == 2


def test_one_tensor_passed_twice_is_two_inputs():
    class Two(nn.Module):
        def forward(self, x, y):
            return x - 2 * y

    x = torch.zeros(4)
    graph = trace(Two(), (x, x))
    (double, difference) = (node for node in graph.nodes.values() if node.kind == CALL)
    assert double.inputs == (Value("y"),)
    assert difference.inputs == (Value("x"), Value("mul"))


def test_what_cannot_be_traced_says_where():
    class Autocast(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match=r"test_sharding_api.py:\d+: autocast inside the forward.*x.to\(dtype\)"):
        trace(Autocast(), (torch.ones(2, 2),))
    with pytest.raises(
        TraceError, match=r"Branches cannot be traced .*test_sharding_api.py:\d+: .*choose by torch.where"
    ):
        trace(Branches(), (torch.ones(2),))


def test_in_place_operators_are_traced_as_what_they_compute():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x + 1
            y.mul_(2)
            return torch.relu_(y)

    names = [node.call.name for node in trace(InPlace(), (torch.ones(2),)).nodes.values() if node.kind == CALL]
    assert names == ["aten.add.Tensor", "aten.mul.Tensor", "aten.relu.default"]


def test_annotations_are_strategies():
    model = Block()
    assert shard(model.up, [None, ("mp", 1), ("mp",)]) is model.up
    assert annotated(model) == {"up": ([None, ("mp", 1), ("mp",)], None)}
    plan = propagate(
        trace(model, (torch.zeros(4, 8),)), ProcessMesh([0, 1], ["mp"]), annotated(model), objective="redistribution"
    )
    assert plan.configured == {"linear": "up"}
    with pytest.raises(StrategyError, match="give in_strategy, out_strategy or both"):
        shard(model.up)


def test_strategies_from_a_file(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('["layers.*.up"]\nin = [[], [["dp", "mp"], 1]]\nout = [[1, "mp"]]\n')
    assert read_strategies(path) == {"layers.*.up": ([None, (("dp", "mp"), 1)], [(1, "mp")])}
    for text, message in (
        ("[a", "is no valid TOML"),
        ("[a]\nwhat = 1", 'give a table with "in", "out" or both'),
        ('[a]\nin = ["mp"]', "give an array with an array for every tensor"),
    ):
        path.write_text(text)
        with pytest.raises(StrategyError, match=message):
            read_strategies(path)
    with pytest.raises(StrategyError, match="cannot be read"):
        read_strategies(tmp_path / "none.toml")


def test_an_explanation_names_operators_reasons_and_collectives():
    mesh = ProcessMesh([0, 1], ["mp"])
    plan = propagate(
        trace(Llama(), (TOKENS, TOKENS)), mesh, read_strategies(EXAMPLE / "llama.toml"), objective="redistribution"
    )
    text = explain(plan)
    for part in (
        "operators on a mesh of mp=2; objective redistribution",
        "the least there is",
        "memory of a rank: parameters",
        "(each output with a gradient, as memory_limit counts; strategy and plan-training count what autograd saves)",
        "layers.0.attention.q linear",
        "[configured: layers.*.attention.[qkv]]",
        "[propagated]",
        "reduce_scatter(dim 1, mp)",
        "; backward: all_gather(dim 1, mp)",
    ):
        assert part in text, part
    whole = propagate(plan.graph, mesh, objective="redistribution")
    assert diff(plan, plan) == []
    expected = "layers.0.attention.q linear: (R*, S(0)) -> S(2); other: (R, R) -> R"
    assert expected in diff(plan, whole)


def test_an_operator_without_a_rule_runs_whole_until_it_gets_one(caplog):
    library = torch.library.Library("sharding_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(512, 512, bias=False)

        def forward(self, x):
            return torch.ops.sharding_test.twice(self.up(x)).sum()

    mesh, cut = ProcessMesh([0, 1], ["mp"]), Placement("shard", 1)
    graph = trace(Twice(), (torch.zeros(512, 512),))
    strategies = {"up": ([None, ("mp", 1)], None)}
    plan = propagate(graph, mesh, strategies, objective="redistribution")
    assert {str(layout[0]) for layout in plan.inputs["twice"]} <= {"R", "R*"}
    said = "sharding_test.twice.default has no sharding rule: it runs whole on every rank, once, 0.0"
    assert said in caplog.text and "ms a step by the cost model of 910b" in caplog.text
    caplog.clear()
    register_rule(
        torch.ops.sharding_test.twice.default,
        lambda call: [OpPlacements((REPLICATE,), (REPLICATE,)), OpPlacements((cut,), (cut,))],
    )
    plan = propagate(graph, mesh, strategies, objective="redistribution")
    assert plan.inputs["twice"] == ((cut,),)
    assert not caplog.text


def test_what_cannot_be_traced_leaves_no_traceback(caplog):
    with pytest.raises(TraceError, match=r"Linear cannot be traced .* \[4, 6\] X \[8, 8\]"):
        trace(nn.Linear(8, 8), (torch.zeros(4, 6),))
    assert "Traceback" not in caplog.text


def test_what_an_input_reads_is_refused():
    graph, mesh = trace(Block(), (torch.zeros(4, 8),)), ProcessMesh([0, 1], ["mp"])
    with pytest.raises(
        StrategyError, match="x is an input or a parameter, which reads nothing: give its layout as out_strategy"
    ):
        propagate(graph, mesh, {"inputs:x": ([("mp", 1)], None)}, objective="redistribution")
    with pytest.raises(ValueError, match=r"^hardware 'h200' is not known"):
        propagate(graph, mesh, hardware="h200", objective="redistribution")


def test_a_model_that_communicates_is_refused():
    class Parallel(nn.Module):
        def forward(self, x):
            return torch.ops.ascend_parallel.matmul_all_reduce(x, x, "0", [])

    graph = trace(Parallel(), (torch.zeros(4, 4),))
    with pytest.raises(ValueError, match="in the model is a rank's part of a parallel model"):
        propagate(graph, ProcessMesh([0, 1], ["mp"]), objective="redistribution")


def test_a_plan_is_shown_in_a_line():
    plan = propagate(
        trace(Block(), (torch.zeros(4, 8),)),
        ProcessMesh([0, 1], ["mp"]),
        {"up": ([None, ("mp", 1)], None)},
        objective="redistribution",
    )
    assert repr(plan).startswith("<ShardingPlan of 5 operators on ProcessMesh([0, 1], dim_names=['mp']): ")
    assert len(repr(plan)) < 200


@pytest.mark.slow
def test_the_example_trains_like_the_whole_model():
    torchrun = Path(forked_python()).with_name("torchrun")
    words = [str(torchrun), "--nproc-per-node", "2", str(EXAMPLE / "llama.py")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "14 of 14 matmuls next to a collective run overlapped" in ended.stdout


@on_ranks(2)
def test_a_compiled_step_calls_it(group):
    """torch.compile compiles the modules around the sharded part, which runs uncompiled."""
    torch.manual_seed(0)
    model = Llama(width=64, heads=4, groups=2, wide=96, length=32).double()
    tokens = torch.randint(64, (2, 33))
    batch = tokens[:, :-1], tokens[:, 1:]
    plan = propagate(
        trace(model, batch),
        ProcessMesh([0, 1], ["mp"]),
        read_strategies(EXAMPLE / "llama.toml"),
        objective="redistribution",
    )
    sharded = ShardedModule(model, plan)

    @torch.compile(backend="aot_eager")
    def step(tokens, targets):
        return sharded(tokens, targets) * 2

    loss = step(*batch)
    loss.backward()
    whole = model(*batch) * 2
    whole.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), gradients)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)


def unlike(group):
    """Different strategies on the ranks are an error: their collectives would not match."""
    graph, mesh = trace(Block(), (torch.zeros(4, 8),)), ProcessMesh([0, 1], ["mp"])
    strategies = {"up": ([None, ("mp", 1) if group.rank() else (1, 1)], None)}
    with pytest.raises(ascend_parallel.DisagreementError) as error:
        ShardedModule(Block(), propagate(graph, mesh, strategies, objective="redistribution"))
    return str(error.value)


def test_ranks_with_different_plans_are_told(ranks):
    first, second = ranks(2).run(unlike)
    assert first == second
    assert "different plans, settings or models: the sharding plan is" in first
