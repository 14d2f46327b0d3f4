"""The stage of each operator: marks, patterns, operators in between, balanced cuts, and refusals."""

import pytest
import small_models
import torch
from torch import nn

from ascend_parallel.sharding.graph import CALL
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.pipeline.stage_assignment import StageError, assign, balanced, set_stage


def traced(model, *batch):
    return trace(model, batch)


def gpt(layers=4):
    model = small_models.GPT(layers=layers, width=16, vocabulary=32, length=8)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return model, traced(model, tokens, tokens)


def by_module(graph, stages):
    """The stages of each module's operators."""
    found = {}
    for name, stage in stages.items():
        found.setdefault(graph.nodes[name].module, set()).add(stage)
    return found


def operators(graph, stages, module):
    return [
        (graph.nodes[name].call.name.split(".")[1], stage)
        for name, stage in stages.items()
        if graph.nodes[name].module == module
    ]


def test_attributes_as_published_and_patterns_give_the_same():
    model, graph = gpt()
    patterns = {"tokens": 0, "places": 0, "layers.[01]": 0, "layers.*": 1, "norm": 1}
    by_pattern = assign(graph, model, patterns)
    for layer, stage in zip(model.layers, (0, 0, 1, 1), strict=True):
        layer.pipeline_stage = stage
    model.tokens.pipeline_stage = model.places.pipeline_stage = 0
    assert set_stage(model.norm, 1) is model.norm
    assert assign(graph, model) == by_pattern
    found = by_module(graph, by_pattern)
    assert all(stages == {int(path.split(".")[1]) // 2} for path, stages in found.items() if path.startswith("layers."))
    assert found["tokens"] == found["places"] == {0}
    # The sum of embeddings is made of stage 0's; the tied head and the loss read what stage 1 gives.
    own = operators(graph, by_pattern, "")
    assert own[0] == ("add", 0)
    assert [stage for operator, stage in own if operator in ("linear", "cross_entropy_loss")] == [1, 1]
    assert assign(graph, model, {"layers.2": 0}) != by_pattern  # a pattern goes before the attribute


def test_the_innermost_module_counts():
    model, graph = gpt(1)
    model.layers[0].pipeline_stage = 1
    model.layers[0].norm1.pipeline_stage = model.layers[0].qkv.pipeline_stage = 0
    found = assign(graph, model)
    assert by_module(graph, found)["layers.0.qkv"] == {0}
    assert by_module(graph, found)["layers.0.up"] == by_module(graph, found)["layers.0"] == {1}
    assert dict(operators(graph, found, ""))["cross_entropy_loss"] == 1


class Mixed(nn.Module):
    """Modules of a stage are not next to each other in the definition, and not in the order of the forward."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        mask = torch.tril(torch.ones(4, 4))
        y = self.first(x)
        z = self.middle(y)
        return (self.last(z + y) * self.scale @ mask).square().mean()


def test_stages_need_not_be_adjacent_in_definition_order():
    model = Mixed()
    graph = traced(model, torch.randn(2, 4))
    found = assign(graph, model, {"first": 0, "middle": 1, "last": 0 + 2})
    assert by_module(graph, found)["last"] == {2}
    own = operators(graph, found, "")
    assert ("add", 1) in own  # the latest stage that it reads from
    assert [stage for operator, stage in own if operator in ("ones", "tril")] == [2, 2]  # the stage that reads it
    assert ("mean", 2) in own


def test_operators_by_pattern():
    model = Mixed()
    graph = traced(model, torch.randn(2, 4))
    found = assign(graph, model, {"first": 0, "middle": 0, "last": 1, ":add": 1})
    assert ("add", 1) in operators(graph, found, "")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({}, "no module has a pipeline stage"),
        ({"first": 1, "middle": 0, "last": 2}, r"middle \(linear\) of stage 0 reads what first \(linear\) of stage 1"),
        ({"first": 0, "middle": 0, "last": 2}, "stage 2 is used, but no operator runs in stage 1"),
        ({"first": 0, "last": -1}, "'last': pipeline stage -1 is not allowed"),
        ({"first": 0, "last": True}, "'last': pipeline stage True is not allowed"),
        ({"first": 0, "last": "1"}, "'last': pipeline stage '1' is not allowed"),
        ({"first": 0, "lost": 1}, "'lost' names no module; there are last, first, middle"),
        ({"first": 0, ":softmax": 1}, "':softmax' names nothing"),
    ],
)
def test_what_cannot_be_is_refused(patterns, message):
    model = Mixed()
    graph = traced(model, torch.randn(2, 4))
    with pytest.raises(ValueError, match=message):
        assign(graph, model, patterns)


def test_the_number_of_stages_is_checked():
    model = Mixed()
    graph = traced(model, torch.randn(2, 4))
    with pytest.raises(StageError, match="are in 2 stages, and there must be 3"):
        assign(graph, model, {"first": 0, "last": 1}, 3)
    with pytest.raises(StageError, match=r"Linear: pipeline stage 1\.5 is not allowed"):
        set_stage(model.first, 1.5)
    model.first.pipeline_stage = 1.5
    with pytest.raises(StageError, match=r"first: pipeline stage 1\.5 is not allowed"):
        assign(graph, model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_balanced_cuts_between_layers(stages):
    model = small_models.Llama(layers=12, width=64, heads=4, groups=2, wide=256, vocabulary=64, length=64)
    tokens = torch.zeros(8, 64, dtype=torch.long)
    graph = traced(model, tokens, tokens)
    found = balanced(graph, stages)
    assert list(found) == [node.name for node in graph.nodes.values() if node.kind == CALL]
    assert list(found.values()) == sorted(found.values())
    assert set(found.values()) == set(range(stages))
    layers = [path.split(".")[1] for path in by_module(graph, found) if path.startswith("layers.")]
    per_stage = [set() for _ in range(stages)]
    for name, stage in found.items():
        if graph.nodes[name].module.startswith("layers."):
            per_stage[stage].add(graph.nodes[name].module.split(".")[1])
    assert sum(map(len, per_stage)) == len(set(layers)) == 12  # no layer is cut in two
    assert max(map(len, per_stage)) - min(map(len, per_stage)) <= 1
    # Only the residual stream is sent between stages.
    for stage in range(1, stages):
        values = {
            value
            for name, where in found.items()
            for value in graph.nodes[name].inputs
            if where >= stage and found.get(value.node, stage) < stage
        }
        assert [graph.meta(value).shape for value in values] == [(8, 64, 64)]


@pytest.mark.parametrize("stages", [0, -1, True, 1.5, 1000])
def test_balanced_refuses_other_numbers(stages):
    _, graph = gpt(1)
    with pytest.raises(StageError, match="give a whole number from 1 to"):
        balanced(graph, stages)
