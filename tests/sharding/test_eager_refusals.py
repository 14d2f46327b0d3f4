"""Errors of eager models: a forward that differs from the traced forward, and models that cannot run eagerly."""

import pytest
import torch
from plans import by_hand
from pool import on_ranks
from sharded_models import GIVEN, MLP, S0, S1, C, made, mesh_of, tensor_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.tracing.trace import TraceError, trace


class Turning(nn.Module):
    """A forward that can differ from the traced forward."""

    def __init__(self):
        super().__init__()
        self.mlp, self.factor, self.change = MLP(), 2.0, ""
        self.seen = []

    def forward(self, x):
        h = self.mlp(x) * self.factor
        if self.change == "branch":
            h = h.neg()
        if self.change == "early":
            return h
        if self.change == "swapped":
            return x - h
        if self.change == "foreign":
            return h - torch.ones(2, 12, dtype=torch.float64)
        self.seen.append(h)
        return h - x


@on_ranks(2)
def test_a_forward_that_differs_from_the_traced_forward_is_refused(group):
    model, x = made(Turning), torch.ones(2, 12, dtype=torch.float64)
    plan = by_hand(trace(model, (x,)), mesh_of((2,)), {f"mlp.{name}": layout for name, layout in GIVEN.items()})
    parallelize(model, plan)
    model(x)
    for change, message in (
        (
            "branch",
            r"test_eager_refusals.py:\d+: the model: the forward calls torch.Tensor.neg\(mul_1\); when it was traced "
            r"there was torch.Tensor.sub\(mul_1, x",
        ),
        ("early", r"the forward ended where it called torch.Tensor.sub\(mul_1, x"),
        ("swapped", r"the forward calls torch.Tensor.sub\(x, mul_1"),
        ("foreign", r"the forward calls torch.Tensor.sub\(mul_1, a tensor of shape \[2, 12\]"),
    ):
        model.change = change
        with pytest.raises(ValueError, match=message):
            model(x)
    model.change, model.factor = "", 3.0
    with pytest.raises(ValueError, match=r"torch.Tensor.mul\(add, 3.0\).* torch.Tensor.mul\(add, 2.0\)"):
        model(x)
    model.factor = 2.0
    model(x)
    with pytest.raises(ValueError, match=r"torch.Tensor.mul\(mul_1, 2\): a tensor of a parallelized"):
        model.seen[-1] * 2
    with pytest.raises(ValueError, match="to_local of a tensor"):
        model.seen[-1].to_local()
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, plan)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Aliased(MLP):
    def forward(self, x):
        y = x * self.scale
        y.detach().add_(1)
        return y


class Outside(MLP):
    def forward(self, x):
        return x * self.scale * OUTSIDE


OUTSIDE = torch.ones(12, dtype=torch.float64)


@on_ranks(2)
def test_models_that_cannot_run_eagerly_are_refused(group):
    x, mesh = torch.ones(4, 2, 12, dtype=torch.float64), mesh_of((2,))
    model = made(MLP)
    plan = tensor_parallel(trace(model, (x,)), mesh)
    with pytest.raises(ValueError, match="ascending"):
        parallelize(model, tensor_parallel(plan.graph, ProcessMesh([1, 0], ["mp"])))
    with pytest.raises(ValueError, match=r"cannot be held as R\*:"):
        parallelize(made(MLP), by_hand(plan.graph, mesh, {"up.weight": C}))
    for kind, reason in (
        (Aliased, r"\.py:\d+: aten\.add_\.Tensor writes to a tensor with aliases"),
        (Outside, "register it as a buffer"),
    ):
        graph = trace(made(kind), (x,))
        with pytest.raises(ValueError, match=f"cannot be run eagerly: .*{reason}.*ShardedModule"):
            parallelize(made(kind), by_hand(graph, mesh))


class Twice(nn.Module):
    """The same function, checkpointed, twice on one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        def run(y):
            return self.first(self.second(y))

        h = x * 2
        return checkpoint(run, h, use_reentrant=False).sin() + checkpoint(run, h, use_reentrant=False).cos()


@on_ranks(2)
def test_the_same_call_in_two_checkpoints_is_refused(group):
    """Shard the two checkpoints along different dimensions: which of them is recomputed makes a difference."""
    model, x = made(Twice), torch.arange(64, dtype=torch.float64).view(4, 4, 4) / 64
    graph = trace(model, (x,))
    names = [name for name in graph.nodes if name.startswith("linear")]
    calls = {name: ([cut, C, C], cut) for name, cut in zip(names, (S0, S0, S1, S1), strict=True)}
    eager = parallelize(model, by_hand(graph, mesh_of((2,)), {}, calls))
    with pytest.raises(ValueError, match=r"calls this 2 times, and which call torch\.utils\.checkpoint runs again"):
        eager(x).sum().backward()


def test_a_backward_of_its_own_is_refused():
    class Straight(MLP):
        def forward(self, x):
            return Backward.apply(super().forward(x)).sum()

    with pytest.raises(TraceError, match=r"the autograd.Function Backward has a backward of its own"):
        trace(Straight(), (torch.ones(2, 12),))
