"""Looking at the tensors of an eager forward under torch.no_grad: values of whole tensors, and nothing changes."""

import pytest
import torch
from plans import by_hand
from pool import on_ranks
from sharded_models import GIVEN, MLP, PARTIAL, S0, S1, S2, C, made, mesh_of
from torch import nn

from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.tracing.trace import trace

CALLS = {"linear": ([C, S0, S0], S2), "gelu": ([S2], S2), "linear_1": ([S2, S1, C], PARTIAL)}


def planned(model, x):
    """Return a tensor-parallel plan, in which the second linear layer makes partial sums."""
    given = {f"mlp.{name}": layout for name, layout in GIVEN.items()}
    return by_hand(trace(model, (x,)), mesh_of((torch.distributed.get_world_size(),)), given, CALLS)


class Watched(nn.Module):
    """A forward that looks at its tensors once `look` is set."""

    def __init__(self):
        super().__init__()
        self.mlp, self.look, self.seen = MLP(), None, []

    def forward(self, x):
        h = self.mlp(x).tanh()
        if self.look is not None:
            with torch.no_grad():
                self.seen.append(self.look(h, self.mlp.up.weight))
        return h * 2 + x


LOOKS = {
    "norm": lambda h, _: h.norm(),
    "isnan": lambda h, _: h.isnan().any(),
    "detach": lambda h, _: h.detach(),
    "computed": lambda h, weight: (h.abs().mean(-1) + weight.square().sum()).tolist(),
    "several": lambda h, _: torch.stack([h.max(), h.min(), h[0, 0, 0]]),
    "print": lambda h, _: "PlannedDTensor(tanh" in repr(h),
}


@pytest.mark.parametrize("count", [2, 4])
@on_ranks()
def test_what_is_seen_is_the_whole_tensor_and_the_training_is_unchanged(_group):
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(4, 2, 12)
    truth, model = made(Watched), made(Watched)
    parallelize(model, planned(model, x))
    inner = []
    model.mlp.down.register_forward_hook(lambda _, inputs, output: inner.append(looked(output)))
    truth.mlp.down.register_forward_hook(lambda _, inputs, output: inner.append(looked(output)))
    for name, look in LOOKS.items():
        truth.look = model.look = look
        expected, found = truth(x), model(x)
        torch.testing.assert_close(found, expected)
        if name != "print":
            torch.testing.assert_close(model.seen[-1], truth.seen[-1], check_stride=False)
            assert type(model.seen[-1]) is type(truth.seen[-1])
        else:
            assert model.seen[-1]
        for each in (expected, found):
            each.square().sum().backward()
    torch.testing.assert_close(inner[::2], inner[1::2])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), truth.get_parameter(name).grad)


def looked(output):
    with torch.no_grad():
        return output.norm().item()


@on_ranks(2)
def test_what_is_looked_at_does_not_become_a_part_of_the_forward(_group):
    x = torch.ones(4, 2, 12, dtype=torch.float64)
    model = made(Watched)
    parallelize(model, planned(model, x))
    model.look = lambda h, _: h.add_(1)
    with pytest.raises(ValueError, match="add_ writes to a tensor of a parallelized model's forward"):
        model(x)
    model.look = lambda h, _: h
    with torch.no_grad():
        model(x)
        assert torch.equal(model.seen[-1] * 2, model.seen[-1].full_tensor() * 2)
    model(x)
    with pytest.raises(ValueError, match=r"compute under torch\.no_grad"):
        model.seen[-1] * 3
    model.mlp.forward = lambda x: x * 3.0
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, pytest.raises(ValueError, match=r"when it was traced|the forward ended"):
            model(x)
