"""parallelize: a rank's part of a planned model against the unsharded model in float64, and its collectives."""

import pytest
import small_models
import torch
from allocations import peak_bytes
from one_card import losses_of
from plans import by_hand, planned_collectives
from pool import on_ranks
from sharded_models import (
    BATCHES,
    CHUNKS,
    EXACT,
    MLP,
    S0,
    C,
    calls_of,
    compare,
    made,
    mesh_of,
    planned,
    seen,
    sequence_parallel,
    tensor_parallel,
)
from torch import nn

import ascend_parallel
from ascend_parallel import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace


def train(group, name, mesh_shape):
    """Train the unsharded model and the rank's part: without and with overlap, buckets and prefetch."""
    whole = made(getattr(small_models, name))
    batch = BATCHES[name](torch.Generator().manual_seed(7))
    graph, mesh = trace(whole, batch), mesh_of(mesh_shape)
    plan = planned(name, graph, mesh)
    models = [
        ShardedModule(whole, plan, overlap=False, bucket_bytes=0),
        ShardedModule(whole, plan, settings=Settings(**CHUNKS)),
    ]
    ascend_parallel.ops.COUNTS.clear()
    losses = [
        losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [batch] * 10) for model in (whole, *models)
    ]
    state = whole.state_dict()
    for model in models:
        found = model.full_state_dict()
        assert list(found) == list(state)
        torch.testing.assert_close(found, state, rtol=1e-8, atol=1e-10)
    counts = [{key: count / 10 for key, count in seen(model).items()} for model in models]
    return losses, counts, planned_collectives(plan), calls_of(ascend_parallel.ops.COUNTS.as_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [("Llama", (2,)), *((name, (2, 2)) for name in ("Llama", "GPT", "Bert", "ResNet"))],
    ids=str,
)
def test_training(ranks, name, mesh_shape):
    halves = {"Llama": 4, "GPT": 4, "Bert": 2, "ResNet": 1}[name]  # of layers: a sum in forward, a sum in backward
    for losses, (plain, overlapped), plan, counts in ranks(2 * len(mesh_shape)).run(train, name, mesh_shape):
        assert losses[1] == pytest.approx(losses[0], rel=1e-10)
        assert losses[2] == pytest.approx(losses[0], rel=1e-10)
        assert losses[0][-1] < losses[0][0]
        assert plain == plan
        assert counts == {"matmul_all_reduce": 10 * 2 * halves}
        sums = [key for key in plan if key[:2] == ("all_reduce", "mp")]
        assert len(sums) >= 2 * halves
        assert sum(overlapped.values()) <= sum(plan.values()) - 2 * halves


class Tied(nn.Module):
    """A tied head, a frozen parameter, a persistent and a non-persistent buffer, a constant."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("kept", torch.arange(6.0))
        self.register_buffer("forgotten", torch.arange(6.0), persistent=False)

    def forward(self, tokens, scale):
        x = self.tokens(tokens) * self.frozen + self.kept - self.forgotten
        return {"logits": self.head(x * scale), "constant": (x * torch.tensor(2.0, dtype=x.dtype), 3)}


@on_ranks(2)
def test_tied_and_frozen_parameters_buffers_and_nested_outputs(group):
    model = made(Tied)
    tokens, scale = torch.arange(8).reshape(4, 2), torch.tensor(1.5, dtype=torch.float64)
    graph = trace(model, (tokens, scale))
    weight = graph.nodes[graph.nodes["linear"].inputs[1].node].source  # one of its two names
    plan = by_hand(graph, mesh_of((group.size(),)), {weight: S0, "kept": S0})
    sharded = ShardedModule(model, plan)
    assert {name: tuple(tensor.shape) for name, tensor in sharded.state_dict().items()} == {
        "frozen": (6,),
        "kept": (3,),
        "tokens.weight": (4, 6),
        "head.weight": (4, 6),
    }
    assert sharded.get_parameter("tokens.weight") is sharded.get_parameter("head.weight")
    assert [name for name, param in sharded.named_parameters() if not param.requires_grad] == ["frozen"]
    torch.testing.assert_close(sharded.full_state_dict(), dict(model.state_dict()), rtol=0, atol=0)
    for module in (model, sharded):
        y = module(tokens, scale=scale)
        assert y["constant"][1] == 3
        (y["logits"].square().sum() + y["constant"][0].sum()).backward()
    torch.testing.assert_close(sharded.full_gradients(), {"tokens.weight": model.tokens.weight.grad}, **EXACT)
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    sharded.load_full_state_dict(doubled)
    torch.testing.assert_close(sharded.full_state_dict(), doubled, rtol=0, atol=0)
    with pytest.raises(ValueError, match="missing a required argument: 'scale'"):
        sharded(tokens)
    with pytest.raises(ValueError, match=r"tokens is \[2, 2\] of torch.int64; the plan is for \[4, 2\]"):
        sharded(tokens[:2], scale)
    with pytest.raises(ValueError, match=r"cannot be held as R\*:"):
        ShardedModule(model, by_hand(graph, plan.mesh, {weight: C}))
    model.plan = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'plan' of the model would hide ShardedModule"):
        ShardedModule(model, plan)
    with pytest.raises(ValueError, match="which the model lacks"):
        ShardedModule(MLP(), plan)


@on_ranks(2)
def test_local_inputs(group):
    """Every rank passes its own rows; the output is replicated."""
    model, x = made(MLP), torch.randn(4, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = sequence_parallel(trace(model, (x,)), mesh_of((2,)))
    sharded = ShardedModule(model, plan, local_inputs=True)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x.chunk(2)[group.rank()]), model(x), **EXACT)
    assert all(event.direction == "forward" for event in sharded.collective_counts)
    with pytest.raises(ValueError, match=r"the plan is for \[2, 2, 12\]"):
        sharded(x)


@on_ranks(3)
def test_some_ranks_only(group):
    model, x = made(MLP), torch.randn(4, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = tensor_parallel(trace(model, (x,)), ProcessMesh([0, 2], ["mp"]))
    if group.rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in ProcessMesh"):
            ShardedModule(model, plan)
    else:
        compare(model, ShardedModule(model, plan), x)


class Chain(nn.Module):
    def forward(self, x):
        for _ in range(12):
            x = x.cos()
        return x


def chain(group):
    x = torch.ones(1000, dtype=torch.float64)
    sharded = ShardedModule(Chain(), by_hand(trace(Chain(), (x,)), mesh_of((2,))))
    with torch.no_grad():
        return peak_bytes(lambda: sharded(x))


def test_tensors_are_freed_after_their_last_reader(ranks):
    assert max(ranks(2).run(chain)) <= 2 * 8000
