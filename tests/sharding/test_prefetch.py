"""Prefetched collectives of a forward: values against the unsharded model, and the order of starts and waits."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from dispatched import Dispatched
from plans import by_hand, planned_collectives
from pool import on_ranks
from sharded_models import EXACT, S0, S1, C, compare, gradients, made, mesh_of, seen
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.layout import shard
from ascend_parallel.sharding.redistribute import collectives
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace


class Stack(nn.Module):
    def __init__(self, layers=4, width=12):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack():
    """Parameters and rows sharded alike: each weight is gathered for its reader, and its gradient reduce-scattered."""
    model, x = made(Stack), torch.arange(144, dtype=torch.float64).reshape(12, 12) / 144
    graph = trace(model, (x,))
    given = {"x": S0} | {node.source: S0 for node in graph.nodes.values() if node.kind == "parameter"}
    calls = {name: ([S0, C, C], S0) for name, node in graph.nodes.items() if "linear" in name and node.call}
    calls |= {name: ([S0], S0) for name in graph.nodes if "tanh" in name}
    return model, by_hand(graph, mesh_of((dist.get_world_size(),)), given, calls, inputs_have_gradients=True), x


@contextlib.contextmanager
def watched(log):
    """Log the starts of collectives with their numbers of elements, the waits, and the matmuls."""

    def computed(operator, _types):
        if "mm" in str(operator) or "scaled_dot" in str(operator):
            log.append("compute")

    begin, wait = collectives.Request.start, collectives.CoalescedCollective.wait

    def logged_start(request):
        log.append((request.step.kind, request.x.numel()))
        return begin(request)

    def logged_wait(collective):
        if collective._waiting is not None:
            log.append("wait")
        wait(collective)

    collectives.Request.start, collectives.CoalescedCollective.wait = logged_start, logged_wait
    try:
        with Dispatched(computed):
            yield
    finally:
        collectives.Request.start, collectives.CoalescedCollective.wait = begin, wait


LAYER = (12 * 12 + 12) * 8  # bytes of a weight and its bias, gathered


def gathered(group, bucket_bytes):
    model, plan, x = stack()
    sharded = ShardedModule(model, plan, overlap=False, bucket_bytes=bucket_bytes)
    for _ in range(3):
        compare(model, sharded, x)
        model.zero_grad()
        sharded.zero_grad()
    sharded.collective_counts.clear()
    logs = [[], []]
    given = x.clone().requires_grad_()
    with watched(logs[0]):
        loss = sharded(given).square().sum()
    with watched(logs[1]):
        loss.backward()
    return logs, sharded.prefetches, seen(sharded), planned_collectives(plan)


def test_parameters_are_gathered_under_the_layer_before(ranks):
    for (forward, backward), prefetches, _, _ in ranks(2).run(gathered, LAYER):
        gather, scatter = ("all_gather", 78), ("reduce_scatter", 156)  # of a weight and its bias together
        assert [len(group.conversions) for group in prefetches] == [2] * 4
        whole = [("all_gather", 72), "wait"] if forward[-1] == "wait" else [("all_gather", 72)]  # the output
        layers = [gather, *[gather, "wait", "compute"] * 3, "wait", "compute"]
        assert forward == [*layers, *whole]
        layer = ["compute", "compute", scatter]
        assert backward[: 3 + 3 * 4] == [*layer, *[*layer, "wait"] * 3]


@pytest.mark.sample(6)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 2 * LAYER, 25 << 20, 0])
def test_gathered_parameters(ranks, count, bucket_bytes):
    for _, prefetches, counts, plan in ranks(count).run(gathered, bucket_bytes):
        if bucket_bytes <= 1:
            assert counts == plan
            assert all(len(group.conversions) == 1 for group in prefetches)
        else:
            assert sum(counts.values()) < sum(plan.values())
        assert bool(prefetches) == bool(bucket_bytes)
        assert sum(group.nbytes for group in prefetches) <= 4 * LAYER


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        k, v = self.k(x).unflatten(-1, (2, -1)).transpose(1, 2), self.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_keys_are_gathered_while_queries_are_computed(group):
    """The sequence is sharded by rows. Keys and values are gathered while the queries are computed."""
    model, x = made(Attention), torch.arange(192, dtype=torch.float64).reshape(2, 12, 8).sin()
    graph = trace(model, (x,))
    rows, heads = S1, (shard(2),)
    calls = {}
    for node in graph.nodes.values():
        if node.call is None:
            continue
        shape = node.outputs[0].shape
        cut = rows if shape[1] == 12 else heads
        reads = [rows if graph.meta(value).shape[1] == 12 else heads for value in node.inputs]
        if "linear" in node.name:
            reads = [rows, C]
        if "scaled" in node.name:
            reads = [heads, C, C]
        calls[node.name] = (reads, cut)
    plan = by_hand(graph, mesh_of((group.size(),)), {"x": rows}, calls, inputs_have_gradients=True)
    sharded = ShardedModule(model, plan, overlap=False)
    compare(model, sharded, x)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), model(x), **EXACT)
    logs = [[], []]
    with watched(logs[0]):
        loss = sharded(x.clone().requires_grad_()).square().sum()
    with watched(logs[1]):
        loss.backward()
    (forward, backward), prefetches = (
        logs,
        [(group.before, [prefetch.reader for prefetch in group.conversions]) for group in sharded.prefetches],
    )
    assert prefetches == [(name, ["scaled_dot_product_attention"]) for name in ("linear_1", "linear_2")]
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in forward]
    own = ["compute", "all_gather"]
    assert kinds[:-1] == [*own, *own, "compute", "wait", "wait", "compute"]  # k, v, q; the last gathers the output
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in backward]
    scattered = ["reduce_scatter"] * 2  # while the gradients of q are computed, and then of v
    assert kinds[:9] == ["compute", *scattered, *(["compute"] * 2 + ["wait"]) * 2]


@on_ranks(2)
def test_other_ways_to_differentiate(group):
    """A frozen parameter, some parameters by autograd.grad, the same graph twice, a backward that fails."""
    model, plan, x = stack()
    sharded = ShardedModule(model, plan, overlap=False, bucket_bytes=2 * LAYER)
    for module in (model, sharded):
        module.get_parameter("layers.1.weight").requires_grad_(False)
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    expected = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
    torch.testing.assert_close(sharded.full_gradients(), expected, **EXACT)
    assert sharded.get_parameter("layers.1.weight").grad is None
    names = ["layers.0.weight", "layers.2.bias"]
    sharded.zero_grad()
    some = torch.autograd.grad(sharded(x).square().sum(), [sharded.get_parameter(name) for name in names])
    truth = torch.autograd.grad(model(x).square().sum(), [model.get_parameter(name) for name in names])
    for gradient, whole in zip(some, truth, strict=True):
        torch.testing.assert_close(gradient, whole.chunk(group.size())[group.rank()], **EXACT)
    failing, second = sharded(x).square().sum(), sharded(x).square().sum()

    def fail(_gradient):
        raise ArithmeticError("planted")

    failing.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(ArithmeticError, match="planted"):
        failing.backward()
    second.backward()
    halves = {name: gradient / 2 for name, gradient in expected.items()}
    torch.testing.assert_close(sharded.full_gradients(), halves, **EXACT)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(sharded(x).sum(), [sharded.get_parameter(names[0])], create_graph=True)[0].sum().backward()
