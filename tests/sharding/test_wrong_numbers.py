"""What an attacker found: each gave wrong numbers, or nothing, without a word."""

import copy

import pytest
import torch
from pool import on_ranks
from torch import nn

import ascend_parallel
from ascend_parallel.sharding import (
    Partial,
    ProcessMesh,
    Replicate,
    Shard,
    ShardedModule,
    propagate,
    reshard,
    trace,
)
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.marked.dtensors import shard_tensor, unshard

COLUMN, ROW = ([None, ("mp", 1)], None), ([(None, "mp"), (None, "mp")], None)


class PlusIntegers(nn.Module):
    """A partial sum and integers: those must not be added once per rank."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        ids = torch.arange(8)
        return (
            (self.a(x) + ids).sum(0)
            + torch.where(x > 0, self.a(x), ids).sum()
            + torch.cat((self.a(x), ids[None])).sum()
        )


class Rotated(nn.Module):
    """Gradients go through complex tensors, as in RoPE by view_as_complex."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        angles = torch.arange(4, dtype=torch.float64)
        self.register_buffer("f", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        x = self.a(x)
        turned = torch.view_as_complex(x.reshape(x.shape[0], 4, 2)) * self.f
        return self.b(torch.view_as_real(turned).flatten(-2))


class Written(nn.Module):
    """A slice is written."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x) * 1
        y[:, 0] = y[:, 1] * 2
        return y


class Normed(nn.Module):
    """Running statistics are written in the forward."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.a(x)).square()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return torch.inner(x, self.b)


def trained(model, x):
    """Take three steps and return the gradient of the input in the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        given = x.detach().clone().requires_grad_()
        model(given).sum().backward()
        optimizer.step()
    return given.grad


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        (PlusIntegers, {"a": ROW}),
        (Rotated, {"b": COLUMN}),
        (Written, {"a": COLUMN}),
        (Normed, {"a": ([("mp", 1), None], None)}),
        (Normed, {"a": COLUMN}),
        (Inner, {"inputs:x": (None, [("mp", 1)])}),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
@on_ranks(2)
def test_a_part_computes_what_the_whole_does(group, kind, strategies):
    """Run three steps of the sharded and the whole model: compare input gradient, parameters and buffers."""
    mesh = ProcessMesh(list(range(group.size())), ["mp"])
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for overlap in (False, True):
        torch.manual_seed(0)
        whole = kind().double()
        sharded = ShardedModule(
            whole,
            propagate(trace(whole, (x,)), mesh, strategies, objective="redistribution"),
            overlap=overlap,
        )
        found, expected = (trained(model, x) for model in (sharded, whole))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(sharded.full_state_dict(), dict(whole.state_dict()))


@pytest.mark.parametrize("count", [2, 4])
@on_ranks()
def test_resharding_changes_no_number(group):
    """Integers, booleans and numbers near the largest come back as they were."""
    mesh = ProcessMesh(list(range(group.size())))
    for dtype, value in (
        (torch.int64, 2**40 + 1),
        (torch.uint8, 200),
        (torch.bool, True),
        (torch.float16, 60000.0),
        (torch.float64, 1e308),
    ):
        for size in (1, 2, 5):
            x = torch.full((size,), value, dtype=dtype)
            cut = shard_tensor(x, mesh, [Shard(0)])
            assert torch.equal(unshard(reshard(cut, mesh, [Replicate()])), x)
            assert torch.equal(unshard(cut), x)
            if not dtype.is_floating_point:
                assert torch.equal(unshard(reshard(cut, mesh, [Partial("max")])), x)
                with pytest.raises(ValueError, match="averages are of floating-point tensors"):
                    reshard(cut, mesh, [Partial("avg")])
    with pytest.raises(ValueError, match="complex numbers have no order"):
        reshard(shard_tensor(torch.ones(4, dtype=torch.complex64), mesh, [Shard(0)]), mesh, [Partial("max")])


@on_ranks(2)
def test_what_is_of_another_type_is_told(group):
    """What is no DTensor, no list of placements, no Settings is told so."""
    mesh = ProcessMesh([0, 1], ["mp"])
    x = shard_tensor(torch.ones(4), mesh, [Shard(0)])
    for wrong, message in (
        (lambda: reshard(torch.ones(4), mesh, [Shard(0)]), "reshard takes a DTensor, not a Tensor"),
        (lambda: unshard(torch.ones(4)), "unshard takes a DTensor, not a Tensor"),
        (lambda: shard_tensor(torch.ones(4), mesh, Shard(0)), "give a list with one for each mesh dimension"),
        (lambda: reshard(x, mesh, Replicate()), "give a list with one for each mesh dimension"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()
    model = nn.Linear(4, 4)
    plan = propagate(trace(model, (torch.zeros(2, 4),)), mesh, objective="redistribution")
    with pytest.raises(TypeError, match=r"settings=\{\}: give ascend_parallel.Settings"):
        ShardedModule(model, plan, settings={})


class Mixed(nn.Module):
    """Without strategies, some options read a tensor as partial that is never partial; dropping them left none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x):
        y = torch.where(x > 0, x, self.a)
        z = self.b((y + x).flip(0))
        return (y + x).sum() * 0.5 + z.square().mean() + (x + x.detach()).sum() * 0.25


def half_automatic(group, rows):
    mesh = ProcessMesh(list(range(group.size())), ["dp"])
    x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(0)
    whole = Mixed().double()
    for objective in ("redistribution", "time"):
        plan = propagate(trace(whole, (x,)), mesh, semi_auto="dp", objective=objective)
        sharded = ShardedModule(copy.deepcopy(whole), plan)
        torch.testing.assert_close(*[trained(model, x) for model in (sharded, copy.deepcopy(whole))])
    return str(plan.layouts[Value("x")][0])


@pytest.mark.parametrize(("count", "rows", "cut"), [(2, 4, "S(0)"), (3, 4, "S(1)"), (2, 3, "S(1)")])
def test_what_is_not_configured_is_data_parallel_or_whole(ranks, count, rows, cut):
    assert set(ranks(count).run(half_automatic, rows)) <= {cut, "R"}


class Flexible(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(4, 4, dtype=torch.float64), nn.Dropout(0.0)

    def forward(self, x, b, a, k=2):
        return self.drop(self.a(x)) * k + a - 3 * b["one"] + 2 * b["two"]


@on_ranks(2)
def test_arguments_are_those_that_were_traced(group):
    """Arguments are matched by the signature; arguments that do not match are an error."""
    model, mesh = Flexible(), ProcessMesh([0, 1], ["mp"])
    torch.manual_seed(0)
    model = Flexible()
    x, a, one, two = torch.randn(4, 4, 4, dtype=torch.float64)
    sharded = ShardedModule(
        model,
        propagate(trace(model, (x,), {"a": a, "b": {"one": one, "two": two}}), mesh, objective="redistribution"),
    )
    expected = model(x, {"one": one, "two": two}, a)
    torch.testing.assert_close(sharded(x, {"one": one, "two": two}, a), expected)
    torch.testing.assert_close(sharded(a=a, x=x, b={"one": one, "two": two}, k=2), expected)
    for wrong, message in (
        (lambda: sharded(x, {"two": two, "one": one}, a), None),
        (lambda: sharded(x, {"one": one}, a), "the arguments are"),
        (lambda: sharded(x, {"one": one, "two": two}, a, k=5), "not given when the model was traced"),
        (lambda: sharded(x, {"one": one, "two": two}), "missing a required argument"),
        (lambda: sharded(x.clone().requires_grad_(), {"one": one, "two": two}, a), "requires a gradient"),
        (lambda: sharded.eval(), "was traced in training mode"),
    ):
        if message is None:  # another order of keys is either understood or refused
            try:
                torch.testing.assert_close(wrong(), expected)
            except ValueError as error:
                assert "the arguments are" in str(error)
            continue
        with pytest.raises(ValueError, match=message):
            wrong()
    other = Flexible().float()
    with pytest.raises(ValueError, match=r"is \[4, 4\] of torch.float32; traced was"):
        ShardedModule(other, sharded.plan)


@on_ranks(2)
def test_ranks_with_different_models_are_told(group):
    torch.manual_seed(group.rank())
    model = nn.Linear(4, 4)
    plan = propagate(trace(model, (torch.zeros(2, 4),)), ProcessMesh([0, 1], ["mp"]), objective="redistribution")
    with pytest.raises(ascend_parallel.DisagreementError, match="the model's parameters is"):
        ShardedModule(model, plan)


@on_ranks(2)
def test_an_id_beyond_a_cut_vocabulary_is_an_error(group):
    """An id beyond the vocabulary is an error, also where no rank has its row."""
    model = nn.Embedding(8, 4)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    ids = torch.zeros(3, dtype=torch.long)
    plan = propagate(
        trace(model, (ids,)),
        ProcessMesh([0, 1], ["mp"]),
        {":embedding": ([("mp", 1), None], None)},
        objective="redistribution",
    )
    sharded = ShardedModule(model, plan)
    torch.testing.assert_close(sharded(ids), model(ids))
    with pytest.raises(RuntimeError, match="beyond the embedding's rows"):
        sharded(ids + 8)
