"""Gradients of parameters, summed in buckets during backward or deferred, against the unsharded model."""

import contextlib
import gc
from unittest import mock

import pytest
import small_models
import torch
import torch.distributed as dist
from allocations import peak_bytes
from dispatched import Dispatched
from one_card import losses_of
from plans import by_hand
from pool import on_ranks
from sharded_models import BATCHES, EXACT, S0, C, gradients, made, mesh_of, planned, tokens_of
from torch import nn

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.gradient_buckets import BucketOrder
from ascend_parallel.sharding.runtime.gradient_plan import SummedGradient, buckets
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

SMALL = 3000  # bytes of a bucket: a model has several


def data_parallel(whole, batch):
    mesh = ProcessMesh(list(range(dist.get_world_size())), ["dp"])
    return propagate(trace(whole, batch), mesh, {}, semi_auto="dp", objective="redistribution")


def tokens_and_targets(count):
    generator = torch.Generator().manual_seed(7)
    return tokens_of(count, generator), tokens_of(count, generator)


def times(factor, found):
    return {name: None if gradient is None else factor * gradient for name, gradient in found.items()}


@contextlib.contextmanager
def logged(log):
    """Log the elements of every all-reduce, and every wait for an asynchronous all-reduce."""
    original = dist.all_reduce

    class Work:
        def __init__(self, work):
            self._work = work

        def wait(self):
            log.append("wait")
            return self._work.wait()

    def all_reduce(tensor, *args, **kwargs):
        log.append(tensor.numel())
        work = original(tensor, *args, **kwargs)
        return None if work is None else Work(work)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


@pytest.mark.slow
@on_ranks(3)
def test_data_parallel_training(group):
    whole, batch = made(small_models.GPT), tokens_and_targets(12)
    plan = data_parallel(whole, batch)
    models = [ShardedModule(whole, plan, bucket_bytes=bucket_bytes) for bucket_bytes in (0, SMALL, 25 << 20)]
    losses, *others = (
        losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [batch] * 10) for model in (whole, *models)
    )
    for model, found in zip(models, others, strict=True):
        assert found == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(model.full_state_dict(), dict(whole.state_dict()), rtol=1e-8, atol=1e-10)
    without, small, default = [len(model.buckets) for model in models]
    assert without == 0 < default < small


@pytest.mark.slow
@pytest.mark.parametrize("held", [(), ("dp",), ("mp",)], ids=str)
@on_ranks(4)
def test_gradients_of_several_backwards(group, held):
    """Two backwards: both outside of no_sync, both inside, the first inside."""
    whole, batch = made(small_models.GPT), BATCHES["GPT"](torch.Generator().manual_seed(7))
    plan = planned("GPT", trace(whole, batch), mesh_of((2, 2)))
    whole(*batch).backward()
    twice = times(2, gradients(whole))
    sharded = ShardedModule(whole, plan, bucket_bytes=SMALL)
    for inside in ((False, False), (True, True), (True, False)):
        for deferred in inside:
            loss = sharded(*batch)
            with sharded.no_sync(*held) if deferred else contextlib.nullcontext():
                loss.backward()
        if all(inside):
            sharded.reduce_gradients()
        torch.testing.assert_close(sharded.full_gradients(), twice, **EXACT)
        sharded.reduce_gradients()  # nothing is left
        torch.testing.assert_close(sharded.full_gradients(), twice, **EXACT)
        sharded.zero_grad()


class Sides(nn.Module):
    """`both` meets sharded and replicated tensors; `alone` meets only replicated, `rows` only sharded tensors."""

    def __init__(self):
        super().__init__()
        self.both, self.alone, self.rows = (nn.Parameter(torch.rand(3) + index) for index in range(3))

    def forward(self, x):
        return (x * self.both * self.rows).sum(), (self.both * self.alone).square().sum()


def sides(mesh):
    x = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    model = made(Sides)
    graph = trace(model, (x,))
    calls = {"mul": ([S0, C], S0), "mul_1": ([S0, C], S0)}
    return model, by_hand(graph, mesh, {"x": S0}, calls), x


class Whole(nn.Module):
    """`terms` meets sharded rows; of the others every rank has the full gradient."""

    def __init__(self):
        super().__init__()
        self.terms, self.first, self.second, self.third = (nn.Parameter(torch.rand(3) + index) for index in range(4))

    def forward(self, x):
        return (x * self.terms).sum() + (self.first * self.second * self.third).square().sum()


class OnlyWhole(Whole):
    """No gradient is summed but those that earlier backwards have left."""

    def __init__(self):
        super().__init__()
        terms = self.terms.detach()
        del self.terms
        self.register_buffer("terms", terms)


@pytest.mark.parametrize(("kind", "sums"), [(Whole, [3, 9]), (OnlyWhole, [9])])
@on_ranks(2)
def test_full_gradients_that_earlier_backwards_have_left_are_summed_as_one_tensor(group, kind, sums):
    model, x = made(kind), torch.arange(12, dtype=torch.float64).reshape(4, 3)
    plan = by_hand(trace(model, (x,)), ProcessMesh([0, 1], ["dp"]), {"x": S0}, {"mul": ([S0, C], S0)})
    for _ in range(3):
        model(x).backward()
    sharded = ShardedModule(model, plan)
    for _ in range(2):
        with sharded.no_sync():
            sharded(x).backward()
    log = []
    with logged(log):
        sharded(x).backward()
    assert sorted(each for each in log if each != "wait") == sums
    torch.testing.assert_close(sharded.full_gradients(), gradients(model), **EXACT)


@pytest.mark.parametrize("count", [2, 4])
@on_ranks()
def test_terms_of_a_deferred_gradient_sum_to_the_gradient(group):
    """The terms under no_sync sum to the gradient, also where every rank computes the full gradient."""
    model, plan, x = sides(ProcessMesh(list(range(group.size())), ["dp"]))
    sum(model(x)).backward()
    sharded = ShardedModule(model, plan)
    for factor in (1, 2):
        with sharded.no_sync():
            sum(sharded(x)).backward()
        for name, whole in gradients(model).items():
            term = sharded.get_parameter(name).grad.clone()
            if group.rank() and name == "alone":
                assert not term.any()
            dist.all_reduce(term)
            torch.testing.assert_close(term, factor * whole, **EXACT)
    sharded.reduce_gradients()
    torch.testing.assert_close(sharded.full_gradients(), times(2, gradients(model)), **EXACT)
    refused = pytest.raises(RuntimeError, match=r"has a gradient that is summed.*zero_grad\(set_to_none=True\)")
    with refused, sharded.no_sync():
        sum(sharded(x)).backward()
    sharded.zero_grad()
    with sharded.no_sync():
        sum(sharded(x)).backward()
    sum(sharded(x)).backward()
    torch.testing.assert_close(sharded.full_gradients(), times(2, gradients(model)), **EXACT)
    with pytest.raises(ValueError, match="'tp' is no dimension of this mesh"), sharded.no_sync("tp"):
        pass
    with pytest.raises(ValueError, match="bucket_bytes=0"), ShardedModule(model, plan, bucket_bytes=0).no_sync():
        pass
    with pytest.raises(ValueError, match="bucket_bytes=-1"):
        ShardedModule(model, plan, bucket_bytes=-1)


def functions(loss):
    """Return the names of the autograd functions behind a loss."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in found:
            found.add(function)
            waiting += [before for before, _ in function.next_functions]
    return {function.name() for function in found}


def same_gradients(first, second):
    mine, others = gradients(first), gradients(second)
    assert {name for name, gradient in mine.items() if gradient is None} == {
        name for name, gradient in others.items() if gradient is None
    }
    return all(torch.equal(gradient, others[name]) for name, gradient in mine.items() if gradient is not None)


@on_ranks(4)
def test_a_step_that_defers_all_sums(group):
    """no_sync_of_step has the bits of no_sync, and notices what the parameters are when it begins."""
    whole, batch = made(small_models.GPT), BATCHES["GPT"](torch.Generator().manual_seed(7))
    plan = planned("GPT", trace(whole, batch), mesh_of((2, 2)))
    first, second = (ShardedModule(whole, plan, bucket_bytes=SMALL) for _ in range(2))
    name = first.buckets[0].members[0].name
    path, _, last = name.rpartition(".")

    def step():
        with first.no_sync():
            assert "_ReadBackward" in functions(first(*batch))
            for _ in range(3):
                first(*batch).backward()
        with second.gradients.no_sync_of_step():
            losses = [second(*batch) for _ in range(3)]
            assert "_ReadBackward" not in functions(losses[0])
            for loss in losses:
                loss.backward()
        assert same_gradients(first, second)

    step()
    step()  # gradients of two steps add up
    for module in (first, second):
        module.reduce_gradients("dp")
        module.reduce_gradients()
    assert same_gradients(first, second)
    with torch.no_grad(), second.gradients.no_sync_of_step():  # trains nothing, so summed gradients may be there
        assert torch.equal(second(*batch), first(*batch))
    assert same_gradients(first, second)
    refused = pytest.raises(RuntimeError, match=r"has a gradient that is summed.*zero_grad\(set_to_none=True\)")
    with refused, second.gradients.no_sync_of_step():
        pass
    for module in (first, second):
        module.zero_grad()
        setattr(module.get_submodule(path), last, nn.Parameter(2 * module.get_parameter(name).detach()))
    step()
    assert second.get_parameter(name).grad is not None
    for module in (first, second):
        module.zero_grad()
        module.get_parameter(name).requires_grad_(False)
    step()
    assert second.get_parameter(name).grad is None
    second.zero_grad()
    second.get_parameter(name).requires_grad_(True).register_hook(lambda gradient: gradient * 0)
    refused = pytest.raises(RuntimeError, match=r"has a hook on its gradient.*bucket_bytes=0")
    with refused, second.gradients.no_sync_of_step():
        pass
    assert "_ReadBackward" in functions(second(*batch))


@on_ranks(2)
def test_outputs_that_are_not_all_differentiated(group):
    """Backward from an output, then from the other; twice from the same output; from two forwards at once."""
    model, plan, x = sides(ProcessMesh([0, 1], ["dp"]))
    sharded = ShardedModule(model, plan)
    assert [[member.name for member in bucket.members] for bucket in sharded.buckets] == [["rows", "both"]]
    for which in ([0], [1], [0, 1], [1, 0], [0, 0], [1, 1, 0]):
        for module in (model, sharded):
            module.zero_grad()
            outputs = module(x)
            for index in which:
                outputs[index].backward(retain_graph=True)
        assert {name: param.grad is None for name, param in sharded.named_parameters()} == {
            name: gradient is None for name, gradient in gradients(model).items()
        }
        found = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
        torch.testing.assert_close(sharded.full_gradients(), found, **EXACT)
    for module in (model, sharded):
        module.zero_grad()
        (sum(module(x)) + 3 * module(x)[0]).backward()
    torch.testing.assert_close(sharded.full_gradients(), gradients(model), **EXACT)


@on_ranks(2)
def test_other_calls_to_differentiate(group):
    """autograd.grad, some inputs of backward, create_graph, hooks, a parameter frozen later."""
    model, plan, x = sides(ProcessMesh([0, 1], ["dp"]))
    sharded = ShardedModule(model, plan)
    both = (model, sharded)
    parameters = [list(module.parameters()) for module in both]
    found = [torch.autograd.grad(sum(module(x)), some) for module, some in zip(both, parameters, strict=True)]
    torch.testing.assert_close(found[1], found[0], **EXACT)
    assert all(param.grad is None for param in sharded.parameters())
    sum(sharded(x)).backward(inputs=[sharded.rows])
    torch.testing.assert_close(sharded.rows.grad, found[0][2], **EXACT)
    assert sharded.both.grad is None
    with pytest.raises(RuntimeError, match="differentiates once"):
        sum(sharded(x)).backward(create_graph=True)
    sharded.zero_grad()
    sharded.rows.requires_grad_(False)
    sum(sharded(x)).backward()
    torch.testing.assert_close(sharded.both.grad, found[0][0], **EXACT)
    assert sharded.rows.grad is None
    handle = sharded.both.register_hook(lambda gradient: gradient.clamp(max=1))
    with pytest.raises(RuntimeError, match=r"both has a hook on its gradient.*bucket_bytes=0"):
        sum(sharded(x)).backward()
    handle.remove()
    unbucketed, seen = ShardedModule(model, plan, bucket_bytes=0), []
    unbucketed.both.register_hook(seen.append)
    sum(unbucketed(x)).backward()
    torch.testing.assert_close(seen, [found[0][0]], **EXACT)


class Stack(nn.Module):
    def __init__(self, layers=6, width=8):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


def stack():
    model, x = made(Stack), torch.arange(32, dtype=torch.float64).reshape(4, 8) / 32
    graph = trace(model, (x,))
    calls = {name: ([S0, C, C], S0) for name, node in graph.nodes.items() if "linear" in name and node.call}
    return model, by_hand(graph, mesh_of((dist.get_world_size(),)), {"x": S0}, calls), x


def fail_in_the_third_layer(y):
    def fail(_gradient):
        raise ArithmeticError("planted")

    node = y.grad_fn
    while node.name() != "AddmmBackward0":
        node = node.next_functions[0][0]
    for _ in range(3):
        node = next(near for near, _ in node.next_functions if near is not None and "Addmm" in near.name())
    node.register_prehook(fail)
    with pytest.raises(ArithmeticError, match="planted"):
        y.sum().backward()


@on_ranks(2)
def test_what_was_deferred_outlives_a_backward_that_fails(group):
    """As a program does that catches the error of a batch, and goes on with the next."""
    model, plan, x = stack()
    sharded = ShardedModule(model, plan, bucket_bytes=SMALL)
    with sharded.no_sync():
        sharded(x).sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in sharded.named_parameters()}
    fail_in_the_third_layer(sharded(x.clone()))
    for name, parameter in sharded.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name
    sharded(x).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(sharded.full_gradients(), times(2, gradients(model)), **EXACT)


@on_ranks(2)
def test_what_was_deferred_is_back_while_the_error_is_handled_and_not_later(group):
    """An error from within the buckets holds them as long as a program keeps it, here beyond a zero_grad."""
    model, plan, x = stack()
    sharded = ShardedModule(model, plan, bucket_bytes=SMALL)
    with sharded.no_sync():
        sharded(x).sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in sharded.named_parameters()}
    loss = sharded(x.clone()).sum()
    failing = mock.patch.object(dist, "all_reduce", side_effect=ArithmeticError("planted"))  # at the first bucket
    with failing, pytest.raises(ArithmeticError, match="planted") as kept:
        loss.backward()
    for name, parameter in sharded.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name
    sharded.zero_grad()
    del kept
    gc.collect()
    assert all(parameter.grad is None for parameter in sharded.parameters())


@on_ranks(2)
def test_a_backward_that_fails(group):
    """A backward that fails on every rank leaves nothing to the next."""
    model, plan, x = stack()
    sharded = ShardedModule(model, plan, bucket_bytes=SMALL)
    fail_in_the_third_layer(sharded(x.clone()))
    for module in (model, sharded):
        module.zero_grad()
        module(x).sum().backward()
    torch.testing.assert_close(sharded.full_gradients(), gradients(model), **EXACT)


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(25 << 20, [1, 5]), (2 << 20, [1, 2, 2, 1]), (1000, [1] * 6)],  # the first, which backward fills first, is small
)
def test_the_first_bucket_is_at_most_a_megabyte(bucket_bytes, expected):
    each = [SummedGradient(Value(str(index)), "", (0,), (), torch.float32, 1 << 20) for index in range(6)]
    found = buckets(each, bucket_bytes)
    assert [len(bucket.members) for bucket in found] == expected
    assert [member.value.node for bucket in found for member in bucket.members] == list("543210")


def order(group):
    """6 layers of 72 elements: in buckets of 2 layers, in a single bucket, and without buckets."""
    model, plan, x = stack()
    logs, results = [], []
    for bucket_bytes in (2 * 72 * 8, 25 << 20, 0):
        sharded, log = ShardedModule(model, plan, bucket_bytes=bucket_bytes), []
        loss = sharded(x).square().sum()
        with logged(log), Dispatched(lambda operator, _, log=log: log.extend(["mm"] if "mm" in str(operator) else [])):
            loss.backward()
        logs.append(log)
        results.append(gradients(sharded))
        assert (
            sum(sharded.collective_counts.values()) == len([entry for entry in log if isinstance(entry, int)]) + 1
        )  # the output's
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0)  # of two ranks: sums in any order are the same
    torch.testing.assert_close(results[1], results[2], rtol=0, atol=0)
    return logs


def test_buckets_are_summed_under_backward(ranks):
    for several, single, each in ranks(2).run(order):
        assert [entry for entry in several if entry != "mm"] == [144] * 3 + ["wait"] * 3
        assert several.index(144) == several.index("mm") + 4  # two layers' input and weight gradients: then it starts
        assert several.index("wait") > max(index for index, entry in enumerate(several) if entry == "mm")
        assert [entry for entry in single if entry != "mm"] == [432, "wait"]
        assert [entry for entry in each if entry != "mm"] == [8, "wait", 64, "wait"] * 6


@on_ranks(2)
def test_memory(group):
    """Backward holds the gradients, a bucket and its terms, and not a second copy of all gradients."""
    model, plan, x = stack()
    gradient = 6 * 72 * 8
    sharded = ShardedModule(model, plan, bucket_bytes=72 * 8)
    loss = sharded(x).square().sum()
    assert peak_bytes(loss.backward) <= gradient + 4 * 72 * 8


def test_buckets_start_in_their_own_order():
    order = BucketOrder(["ab", "c", "d"])
    assert [order.add(key) for key in "cab"] == [[], [], [0, 1]]
    assert order.has_started("a") and not order.has_started("d")
    assert order.end() == [2] and order.end() == []
    again = BucketOrder(["ab", "c", "d"])
    assert [again.add(key) for key in "acba"] == [[], [], [0, 1], []]
    assert again.end() == [2, 0, 1, 2]
