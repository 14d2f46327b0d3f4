"""parallelize without static: the model's own Python on DTensors, against graph, unsharded model and plan."""

import copy
from collections import Counter

import pytest
import small_models
import torch
import torch.distributed.checkpoint as checkpoint
from dispatched import Dispatched
from marks import promise
from plans import by_hand, planned_collectives
from pool import on_ranks
from sharded_models import (
    BATCHES,
    CHUNKS,
    EXACT,
    MLP,
    PARTIAL,
    S0,
    S1,
    S2,
    C,
    R,
    made,
    mesh_of,
    planned,
    sequence_parallel,
    step,
    tensor_parallel,
)
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint as recompute

from ascend_parallel.settings import Settings
from ascend_parallel.sharding import propagate, unshard
from ascend_parallel.sharding.runtime.parallelize import collective_counts, parallelize
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

# c10d operators and the collectives of the plan. On two ranks a reduce-scatter is a message from each to the other.
C10D = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "alltoall_base_": "all_to_all",
    "send": "reduce_scatter",
}


def of_plan(operator):
    """Return the collective that an operator of torch.distributed is, in a list."""
    name, counts = operator._opname, "c10d" in operator.namespace and operator._opname != "recv_"
    return [C10D.get(name, name)] if counts else []


def whole_gradients(model):
    return whole_of({name: param.grad for name, param in model.named_parameters() if param.grad is not None})


def train(model, batch, steps=10):
    """Return losses, and the gradients of the first step."""
    optimizer, losses, first = torch.optim.AdamW(model.parameters(), lr=1e-2), [], None
    for _ in range(steps):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def whole_of(tensors):
    return {name: unshard(tensor) for name, tensor in tensors.items()}


def train_all(group, name, mesh_shape):
    """Train the unsharded model, the graph and the eager model; compare, and return their losses."""
    whole = made(getattr(small_models, name))
    batch = BATCHES[name](torch.Generator().manual_seed(7))
    plan = planned(name, trace(whole, batch), mesh_of(mesh_shape))
    static, eager = ShardedModule(whole, plan, overlap=False), copy.deepcopy(whole)
    assert parallelize(eager, plan) is eager
    truth, truth_gradients = train(whole, batch)
    of_graph, graph_gradients = train(static, batch)
    counted = Counter()
    with Dispatched(lambda operator, _: counted.update(of_plan(operator))):
        found, gradients = train(eager, batch)
    locals_ = {name: gradient.to_local() for name, gradient in gradients.items()}
    torch.testing.assert_close(locals_, graph_gradients, rtol=0, atol=0)
    torch.testing.assert_close(whole_of(gradients), truth_gradients, **EXACT)
    state = whole_of(eager.state_dict())
    assert list(state) == list(whole.state_dict())
    torch.testing.assert_close(state, static.full_state_dict(), rtol=0, atol=0)
    counts, kinds = Counter(), Counter()
    for event, count in collective_counts(eager).items():
        counts[event.kind, event.mesh_dim, event.value, event.reader, event.direction] += count / 10
        kinds[event.kind] += count
    assert counts == planned_collectives(plan)
    assert counted == kinds
    assert kinds["all_reduce"] > 0
    return truth, of_graph, found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [("Llama", (2,)), *((name, (2, 2)) for name in ("Llama", "GPT", "Bert", "ResNet"))],
    ids=str,
)
def test_training_equals_the_graph_and_the_unsharded_model(ranks, name, mesh_shape):
    for truth, of_graph, found in ranks(2 * len(mesh_shape)).run(train_all, name, mesh_shape):
        assert found == of_graph
        assert found == pytest.approx(truth, rel=1e-10)
        assert found[-1] < found[0]


class Branches(nn.Module):
    """Two matmuls of one input, one of a computed weight, and a row layer; optionally a checkpoint."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)
        self.mixed, self.checkpointed = nn.Parameter(torch.randn(48, 24) / 5), False

    def branches(self, x):
        return torch.tanh(self.up(x)) * self.gate(x)

    def forward(self, x):
        h = x.tanh()
        y = recompute(self.branches, h, use_reentrant=False) if self.checkpointed else self.branches(h)
        return h + self.down(y + nn.functional.linear(h, self.mixed * 2))


def overlapped(group, rows, checkpointed):
    """Run a step eagerly with overlapped matmuls, unsharded, and as a graph; return the fused operators."""
    whole, x = made(Branches), torch.randn(96, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wide, narrow = ([C, S0, S0], S2), ([S2, S1, C], PARTIAL)
    calls = {"linear": wide, "linear_1": wide, "linear_2": ([C, S0], S2), "linear_3": narrow, "mul_1": ([S0], S0)}
    calls |= {name: ([S2, S2], S2) for name in ("tanh_1", "mul", "add")}
    calls |= {"tanh": ([rows], rows), "add_1": ([rows, rows], rows)}
    given = {"up.weight": S0, "up.bias": S0, "gate.weight": S0, "gate.bias": S0, "mixed": S0, "down.weight": S1}
    graph = trace(whole, (x.clone().requires_grad_(),))
    plan = by_hand(graph, mesh_of((group.size(),)), {**given, "x": rows}, calls, inputs_have_gradients=True)
    static, eager = ShardedModule(whole, plan, settings=Settings(**CHUNKS)), copy.deepcopy(whole)
    parallelize(eager, plan, overlap=True, settings=Settings(**CHUNKS))
    whole.checkpointed = eager.checkpointed = checkpointed
    (truth, of_inputs), (of_graph, _), (found, gradients) = (step(model, x) for model in (whole, static, eager))
    torch.testing.assert_close((found, gradients), (truth, of_inputs), **EXACT)
    assert torch.equal(found, of_graph)
    expected = {name: param.grad for name, param in whole.named_parameters()}
    torch.testing.assert_close(whole_gradients(eager), expected, **EXACT)
    outside = {event.value.node for event in collective_counts(eager)}  # of the overlapped operators
    assert "linear_3" not in outside
    assert "tanh" not in outside
    with torch.no_grad():
        torch.testing.assert_close(eager(x), truth, **EXACT)
    return [fusion.operator for fusion in static.fused]


@promise("eager-overlap")
@pytest.mark.sample(4)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rows", [R, S0], ids=["replicated", "rows"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_overlapped_matmuls_are_those_of_the_graph(ranks, count, rows, checkpointed):
    columns = "all_gather_matmul" if rows == S0 else "matmul_all_reduce"
    row = "matmul_reduce_scatter" if rows == S0 else "matmul_all_reduce"
    for operators in ranks(count).run(overlapped, rows, checkpointed):
        assert operators == [row, columns, columns, columns]


class Normed(nn.Module):
    """In-place operators, running statistics, a tensor created in the forward."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 6)

    def forward(self, images):
        x = self.norm(self.conv(images))
        x += images.mean(1, keepdim=True)
        x = self.relu(x)
        return self.head(x.mean((2, 3)) * torch.tensor(2.0, dtype=x.dtype)).square().mean()


@on_ranks(2)
def test_in_place_operators_and_running_statistics(group):
    whole, batch = made(Normed), (BATCHES["ResNet"](torch.Generator().manual_seed(7))[0],)
    plan = propagate(
        trace(whole, batch), mesh_of((2,)), {"inputs:images": (None, [[Shard(0)]])}, objective="redistribution"
    )
    static, eager = ShardedModule(whole, plan, overlap=False), copy.deepcopy(whole)
    parallelize(eager, plan)
    losses = [train(model, batch, 3)[0] for model in (whole, static, eager)]
    state = whole_of(eager.state_dict())
    torch.testing.assert_close(state, static.full_state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(state, dict(whole.state_dict()), rtol=1e-8, atol=1e-10)
    assert state["norm.num_batches_tracked"] == 3
    truth, of_graph, found = losses
    assert found == of_graph
    assert found == pytest.approx(truth, rel=1e-10)


@on_ranks(2)
def test_dropout_draws_the_masks_of_the_graph(group):
    whole, batch = made(small_models.GPT, dropout=0.2), BATCHES["GPT"](torch.Generator().manual_seed(7))
    plan = planned("GPT", trace(whole, batch), mesh_of((2,)))
    losses = []
    for model in (ShardedModule(whole, plan, overlap=False), parallelize(whole, plan)):
        losses.append(train(model, batch, 3)[0])
    with pytest.raises(ValueError, match=r"layers\.0: the forward calls torch.nn.functional.dropout\(linear_1, 0"):
        whole.eval()(*batch)
    of_graph, found = losses
    assert found == of_graph
    assert len(set(found)) == 3


class Checkpointed(MLP):
    def forward(self, x):
        return recompute(super().forward, x, use_reentrant=False)


@on_ranks(2)
def test_torchs_checkpoint_reruns_the_calls(group):
    whole, x = (
        made(Checkpointed),
        torch.randn(4, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    plan = tensor_parallel(trace(whole, (x,)), mesh_of((2,)))
    model, shapes = parallelize(copy.deepcopy(whole), plan), []
    model.up.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    for module in (whole, model):
        module(x).square().sum().backward()
    truth = {name: param.grad for name, param in whole.named_parameters()}
    torch.testing.assert_close(whole_gradients(model), truth, **EXACT)
    assert len(shapes) == 2  # in forward, and in backward


@on_ranks(2)
def test_hooks_see_whole_shapes(group):
    model, x = made(MLP), torch.ones(4, 2, 12, dtype=torch.float64)
    truth = model(x).detach()
    parallelize(model, tensor_parallel(trace(model, (x,)), mesh_of((2,))))
    seen = {}

    def look(module, args, output):
        with torch.no_grad():
            seen["local"], seen["full"] = output.to_local(), output.full_tensor()
        seen["shown"] = f"{output}"
        seen["up"] = (type(args[0]), args[0].shape, output.shape, output.placements, output.requires_grad)

    handles = [model.up.register_forward_hook(look)]
    torch.testing.assert_close(model(x).detach(), truth, **EXACT)
    kind, input_shape, shape, placements, requires_grad = seen["up"]
    assert issubclass(kind, DTensor)
    assert (input_shape, shape, placements, requires_grad) == ((4, 2, 12), (4, 2, 24), (Shard(2),), True)
    assert seen["local"].shape == (4, 2, 12)
    assert seen["full"].shape == (4, 2, 24)
    assert "[4, 2, 24] as [Shard(dim=2)]" in seen["shown"]
    handles.append(model.up.register_forward_hook(lambda module, args, output: output * 2))
    with pytest.raises(ValueError, match=r"the model: the forward calls torch.Tensor.mul\(linear, 2\)"):
        model(x)
    handles.pop().remove()
    model.up.register_full_backward_hook(lambda module, input_gradients, output_gradients: None)
    # torch gives the forward a copy of its input, made without gradients: no tensor that was traced
    with pytest.raises(ValueError, match=r"up: the forward calls torch.nn.functional.linear\(a tensor of shape"):
        model(x)


@pytest.mark.slow
@on_ranks(4)
def test_checkpoints_and_clipping_are_torchs(group, tmp_path):
    """Save, load into a model with other values, and clip gradients, all with torch's own functions."""
    whole, batch = made(small_models.Llama), BATCHES["Llama"](torch.Generator().manual_seed(7))
    plan = planned("Llama", trace(whole, batch), mesh_of((2, 2)))
    model, other = copy.deepcopy(whole), copy.deepcopy(whole)
    parallelize(model, plan)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    parallelize(other, plan)
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert other(*batch) == model(*batch)
    for module in (whole, other):
        module(*batch).backward()
    truth, found = (nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (whole, other))
    torch.testing.assert_close(found.full_tensor(), truth, **EXACT)
    torch.testing.assert_close(
        whole_gradients(other), {name: param.grad for name, param in whole.named_parameters()}, **EXACT
    )
    placements = {param.grad.placements for param in other.parameters()}
    assert placements >= {(Shard(1), Shard(0)), (Shard(0), Shard(1))}


@on_ranks(2)
def test_compile(group):
    model, x = made(MLP), torch.ones(4, 2, 12, dtype=torch.float64)
    plan = tensor_parallel(trace(model, (x,)), mesh_of((2,)))
    other = copy.deepcopy(parallelize(model, plan))
    around = torch.compile(nn.Sequential(nn.Identity(), other), backend="aot_eager")
    for module in (model, torch.compile(other, backend="aot_eager"), around):
        module(x).square().sum().backward()
    doubled = {name: 2 * gradient for name, gradient in whole_gradients(model).items()}
    torch.testing.assert_close(whole_gradients(other), doubled, **EXACT)
    torch._dynamo.reset()
    once, twice = sum(collective_counts(model).values()), sum(collective_counts(other).values())
    assert 0 < 2 * once == twice


class Nested(nn.Module):
    """Tied and unused parameters, buffers, keywords, nested outputs, calls of several operators."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.register_buffer("kept", torch.arange(6.0))

    def forward(self, tokens, *, scale):
        x = self.tokens(tokens) + self.kept
        x, weights = self.attention(x, x, x)
        dead = x * 3
        first, second = (x * scale).chunk(2, dim=-1)
        return {
            "logits": self.head(torch.cat((second, first), -1)),
            "rest": (weights.contiguous(), 3),
            "dead": dead.shape,
        }


@on_ranks(2)
def test_tied_parameters_buffers_and_nested_outputs(group):
    whole, tokens = made(Nested), torch.arange(8).reshape(4, 2)
    scale = torch.tensor(1.5, dtype=torch.float64)
    graph = trace(whole, (tokens,), {"scale": scale})
    weight = graph.nodes[graph.nodes["embedding"].inputs[0].node].source
    plan = by_hand(graph, mesh_of((2,)), {weight: S0, "kept": S0, "attention.in_proj_weight": S1})
    model = parallelize(copy.deepcopy(whole), plan)
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.placements == (Shard(0),)
    assert model.kept.placements == (Shard(0),)
    assert model.unused.placements == (Replicate(),)
    found = []
    for module in (whole, model):
        y = module(tokens, scale=scale)
        assert y["rest"][1] == 3
        assert y["dead"] == (4, 2, 6)
        (y["logits"].square().sum() + y["rest"][0].sum()).backward()
        found.append((y["logits"].detach(), y["rest"][0].detach()))
    torch.testing.assert_close(found[1], found[0], **EXACT)
    truth = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    torch.testing.assert_close(whole_gradients(model), truth, **EXACT)
    with pytest.raises(ValueError, match="missing a required argument: 'scale'"):
        model(tokens)
    with pytest.raises(ValueError, match=r"tokens is \[2, 2\]"):
        model(tokens[:2], scale=scale)


@on_ranks(2)
def test_local_inputs(group):
    model, x = made(MLP), torch.randn(4, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = model(x).detach()
    parallelize(model, sequence_parallel(trace(model, (x,)), mesh_of((2,))), local_inputs=True)
    torch.testing.assert_close(model(x.chunk(2)[group.rank()]).detach(), truth, **EXACT)
    with pytest.raises(ValueError, match=r"the plan is for \[2, 2, 12\]"):
        model(x)
