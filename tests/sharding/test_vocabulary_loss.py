"""Tests cross-entropy of logits sharded along the vocabulary: no gather, and the whole model's losses and gradients."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn

from ascend_parallel.sharding import (
    ProcessMesh,
    ShardedModule,
    StrategyError,
    explain,
    parallelize,
    propagate,
    to_html,
    trace,
    unshard,
)
from ascend_parallel.sharding.layout import REPLICATE, shard

WORDS, WIDTH, ROWS = 24, 12, 12
HEAD = {"head": ([None, ("mp", 1), ("mp",)], None)}
LOSS = ":cross_entropy_loss"
CUT = HEAD | {LOSS: ([(None, "mp")], None)}


class Model(nn.Module):
    def __init__(self, words=WORDS, **options):
        super().__init__()
        self.words, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words)
        self.options = options

    def forward(self, ids, targets):
        return F.cross_entropy(self.head(torch.tanh(self.words(ids))), targets, **self.options)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(WORDS, (2, ROWS), generator=generator)
    targets[3] = -100
    return ids, targets


def test_of_many_words_the_logits_are_not_gathered():
    mesh, rows = ProcessMesh([0, 1], ["mp"]), 4096
    with torch.device("meta"):
        graph = trace(Model(32000), (torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)))
    plan = propagate(graph, mesh, HEAD, objective="redistribution")
    assert plan.inputs["cross_entropy_loss"] == ((shard(1),), (REPLICATE,))
    assert plan.layouts[plan.graph.outputs] == (REPLICATE,)
    assert not [one for one in plan.conversions if one.value.node == "linear"]
    steps = plan.op_collectives["cross_entropy_loss"]
    assert [(step.kind, step.source.op, step.nbytes) for step in steps] == [
        ("all_reduce", "max", rows * 4),
        ("all_reduce", "sum", 2 * rows * 4),
    ]
    assert "inside: all_reduce(max, mp) 16.4 KB" in explain(plan)
    assert "all_reduce(max, mp) 16.4 KB" in to_html(plan)
    assert plan.cost >= sum(step.seconds for step in steps) > 0
    assert plan.seconds == pytest.approx(plan.cost)
    gathered = propagate(graph, mesh, HEAD | {LOSS: ([(None, None)], None)}, objective="redistribution")
    assert gathered.cost > 10 * plan.cost
    assert not gathered.op_collectives


def test_class_weights_and_probabilities_are_gathered():
    ids, targets = batch()
    for model, given in (
        (Model(weight=torch.ones(WORDS)), targets),
        (Model(), torch.ones(ROWS, WORDS) / WORDS),
    ):
        with pytest.raises(StrategyError, match="cannot have"):
            propagate(trace(model, (ids, given)), ProcessMesh([0, 1], ["mp"]), CUT, objective="redistribution")


def op_collective_event(model):
    return sum(count for one, count in model.collective_counts.items() if one.reader == "inside")


def trained(model, given):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(*given)
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("count", "shape", "names", "wanted", "options"),
    [
        (2, (2,), ["mp"], CUT, {}),
        (3, (3,), ["mp"], CUT, {"label_smoothing": 0.1, "reduction": "sum"}),
        (4, (4,), ["mp"], CUT, {"reduction": "none"}),
        (4, (2, 2), ["dp", "mp"], CUT | {LOSS: ([("dp", "mp")], None)}, {"label_smoothing": 0.2}),
        (4, (2, 2), ["dp", "mp"], {LOSS: ([(None, ("dp", "mp"))], None)}, {}),
    ],
    ids=str,
)
@on_ranks()
def test_it_trains_like_the_whole_model(group, shape, names, wanted, options):
    """Run ten steps of the graph, the eager model and the whole model, in float64."""
    mesh = ProcessMesh(torch.arange(group.size()).view(shape).tolist(), names)
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Model(**options).double())
    graph, eager, whole = models
    plan = propagate(trace(graph, batch()), mesh, wanted, objective="redistribution")
    assert len(plan.op_collectives["cross_entropy_loss"]) % 2 == 0
    graph = ShardedModule(graph, plan)
    eager = parallelize(eager, plan)
    losses = [trained(model, batch()) for model in (whole, graph, eager)]
    assert op_collective_event(graph) == 10 * len(plan.op_collectives["cross_entropy_loss"])
    for found in losses[1:]:
        torch.testing.assert_close(found, losses[0], rtol=1e-10, atol=1e-12)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(graph.full_gradients(), gradients)
    torch.testing.assert_close({name: unshard(one.grad) for name, one in eager.named_parameters()}, gradients)
    assert losses[0][-1].sum() < losses[0][0].sum()


@on_ranks(2)
def test_a_target_beyond_the_vocabulary_is_an_error(group):
    """A target beyond the vocabulary is an error on every rank, and bf16 is computed in fp32."""
    torch.manual_seed(0)
    model, given = Model(), batch()
    sharded = ShardedModule(
        model, propagate(trace(model, given), ProcessMesh([0, 1], ["mp"]), CUT, objective="redistribution")
    )
    with pytest.raises(RuntimeError, match="a target is beyond the classes"):
        sharded(given[0], given[1] + WORDS)
    model = model.bfloat16()
    sharded = ShardedModule(
        model, propagate(trace(model, given), ProcessMesh([0, 1], ["mp"]), CUT, objective="redistribution")
    )
    loss = sharded(*given)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, model(*given))
