"""A plan split into stages: the tensors sent and their layouts, the parameters of each stage, and refusals."""

import pytest
import small_models
import torch
from crossing_model import STAGES, Crossing, crossing_batch, lines
from plans import by_hand
from sharded_models import S0, C, made, planned, tokens_of
from torch import nn

from ascend_parallel.sharding.graph import INPUT, Value
from ascend_parallel.sharding.layout import REPLICATE, SUM, shard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.pipeline.split_plan import shared_parameters, split_into_stages
from ascend_parallel.training.pipeline.stage_assignment import StageError, assign

R = (REPLICATE,)


def crossing(**plan):
    graph = trace(made(Crossing), crossing_batch(4, torch.Generator().manual_seed(1)))
    meshes = lines(6, 3)
    made_plan = by_hand(graph, meshes[0], **plan) if plan else propagate(graph, meshes[0], objective="redistribution")
    return split_into_stages(made_plan, assign(graph, Crossing(), STAGES), meshes)


def test_tensors_across_borders():
    first, second, third = crossing()
    assert first.received == third.sent == ()
    assert first.sent == second.received == ("chunk", "chunk.1", "gt")
    assert second.sent == third.received == ("chunk", "gt", "flatten")  # two of them are passed through
    assert (first.inputs, second.inputs, third.inputs) == (("x",), (), ("present", "targets"))
    assert [value.node for value in second.plan.graph.outputs] == ["chunk", "gt", "flatten"]
    assert third.plan.graph.outputs == Value("mse_loss")
    names = [name for part in (first, second, third) for name, node in part.plan.graph.nodes.items() if node.call]
    assert len(names) == len(set(names))
    for part in (first, second, third):
        graph = part.plan.graph
        assert [name for name, node in graph.nodes.items() if node.kind == INPUT] == [*part.received, *part.inputs]
        order = list(graph.nodes)
        for node in graph.nodes.values():
            assert all(order.index(value.node) < order.index(node.name) for value in node.inputs)
        assert set(part.plan.layouts) == {
            Value(name, index) for name, node in graph.nodes.items() for index in range(len(node.outputs))
        }
    # A tensor without gradient brings no gradient back.
    assert [Value(name) in second.plan.differentiable for name in second.received] == [True, True, False]


def test_parameters_of_several_stages():
    assert shared_parameters(crossing()) == {"frozen": (0, 1), "scale": (0, 1, 2)}
    graph = trace(made(small_models.GPT), [tokens_of(2, torch.Generator().manual_seed(1)) for _ in "xy"])
    meshes = lines(4, 2)
    stages = {"tokens": 0, "places": 0, "layers.0": 0, "layers.1": 1, "norm": 1}
    parts = split_into_stages(planned("GPT", graph, meshes[0]), assign(graph, small_models.GPT(), stages), meshes)
    assert shared_parameters(parts) == {"tokens.weight": (0, 1)}
    assert [part.plan.mesh for part in parts] == meshes
    assert parts[0].plan.digest != parts[1].plan.digest


@pytest.mark.parametrize(
    ("made_as", "read_as", "travels"),
    [
        (S0, S0, S0),
        (R, S0, S0),  # less to send
        (S0, C, S0),  # gathered behind the border
        ((SUM,), R, R),  # summed before it
        ((SUM,), (shard(1),), (shard(1),)),
    ],
)
def test_the_layout_in_which_a_tensor_travels(made_as, read_as, travels):
    """Of the two tensors sent from the second stage to the third, the third reads one only once."""
    first, second, third = crossing(calls={"flatten": ([R], made_as), "add_1": ([read_as, R], R)})
    assert second.plan.layouts[Value("flatten")] == made_as
    assert second.plan.returned[Value("flatten")] == travels
    assert third.plan.layouts[Value("flatten")] == travels
    assert third.plan.inputs["add_1"][0] == read_as
    assert all(part.plan.conversions is not None for part in (first, second, third))


def test_a_shared_layout_goes_with_its_readers():
    """All stages read chunk; each stage that has chunk in its original layout converts it once."""
    parts = crossing(shared_layouts={"chunk": C}, calls={"chunk": ([R], S0)})
    assert [part.plan.shared_layouts.get(Value("chunk")) for part in parts] == [C, C, C]
    assert [part.plan.layouts[Value("chunk")] for part in parts] == [S0, S0, S0]


class Statistics(nn.Module):
    """A batch norm whose running mean an earlier layer reads."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x - self.norm.running_mean))).square().mean()


def refused(model, batch, stages, match, meshes=None, **plan):
    graph = trace(model, batch)
    meshes = meshes or lines(4, 2)
    with pytest.raises(StageError, match=match):
        split_into_stages(by_hand(graph, meshes[0], **plan), assign(graph, model, stages), meshes)


def test_what_cannot_be_is_refused():
    batch = crossing_batch(4, torch.Generator().manual_seed(1))
    model = made(Crossing)
    refused(model, batch, STAGES, "2 meshes for 3 stages")
    for other in (ProcessMesh([3, 4, 5], ["mp"]), ProcessMesh([2, 3], ["tp"])):
        meshes = [*lines(4, 2)[:1], other, ProcessMesh([6, 7], ["mp"])]
        refused(model, batch, STAGES, r"the mesh of stage 1 is (mp=3|tp=2), the plan's is mp=2", meshes)
    wanting = (batch[0].requires_grad_(), *batch[1:])
    meshes = lines(6, 3)
    refused(model, wanting, STAGES, "x was traced with a gradient", meshes, inputs_have_gradients=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    refused(linear, (x,), {"0": 0, "1": 1}, "something else than one loss")


def test_a_buffer_that_one_stage_writes_and_another_reads_is_refused():
    model = made(Statistics)
    x = torch.randn(4, 4, dtype=torch.float64)
    stages = {"first": 0, "norm": 1, "last": 1}
    refused(model, (x,), stages, r"stage 1 writes the buffer norm.running_mean, and stage 0 \(sub\) reads it")


class Aside(nn.Module):
    """A model whose loss does not need the last stage."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        self.last(y)
        return y.square().mean()


def test_a_stage_behind_the_loss_is_refused():
    x = torch.randn(4, 4, dtype=torch.float64)
    graph = trace(made(Aside), (x,))
    stages = dict.fromkeys((name for name, node in graph.nodes.items() if node.call), 0) | {"linear_1": 1}
    with pytest.raises(StageError, match="the loss is made in stage 0, and stages up to 1 come after it"):
        split_into_stages(by_hand(graph, lines(4, 2)[0]), stages, lines(4, 2))
