"""A model on two meshes, its weights on one each and a reshard between: it trains as on one card."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_parallel.sharding import ProcessMesh, reshard, shard_tensor, unshard


def written(h):
    h = h * 2
    h.mul_(3).add_(1)
    h[0] = h[1] * 2
    return h


# Between the reshard and the second weight.
BETWEEN = {
    "nothing": lambda h: h,
    "elements": lambda h: F.gelu(h).softmax(-1) + torch.where(h > 0, h, h.detach() * 3),
    "norms": lambda h: F.layer_norm(h, h.shape[-1:]) * h.std(),
    "shapes": lambda h: torch.cat([part * (i + 1) for i, part in enumerate(h.split(2, 1))], 1).T.T,
    "written": written,
    "checkpoint": lambda h: checkpoint(lambda x: x.relu() @ h.T @ h, h, use_reentrant=False),
    "unused branch": lambda h: torch.stack([h, h.detach() ** 2]).unbind()[0] + h.max(0, keepdim=True).indices,
}
LOSSES = {
    "mse": lambda y, target: F.mse_loss(y, target),
    "cross entropy": lambda y, target: F.cross_entropy(y, target.argmax(1)),
}


def steps(w0, w1, x, target, between, loss, cross, final):
    optimizer = torch.optim.SGD([w0, w1], lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        h = cross(x @ w0)
        value = loss(final(between(h) @ w1), target)
        value.backward()
        optimizer.step()
        losses.append(value)
    return losses


def tensors():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=random) for shape in ((8, 6), (6, 4), (4, 8), (8, 8))]


def trained(group, between, loss, whole):
    meshes = ProcessMesh([[0], [1]], ["dp", "mp"]), ProcessMesh([[2, 3]], ["dp", "mp"])
    x, w0, w1, target = tensors()
    x = shard_tensor(x, meshes[0], [Shard(0), Replicate()])
    w0 = shard_tensor(torch.nn.Parameter(w0), meshes[0], [Replicate(), Shard(1)])
    w1 = shard_tensor(torch.nn.Parameter(w1), meshes[1], [Replicate(), Shard(0)])
    if not whole:
        target = shard_tensor(target, meshes[1], [Shard(0), Replicate()])
    losses = steps(
        *(w0, w1, x, target, BETWEEN[between], LOSSES[loss]),
        lambda h: reshard(h, meshes[1], [Shard(0), Shard(1)]),
        unshard if whole else lambda y: y,
    )
    values = [float(value.detach()) for value in losses]
    return values, unshard(w0).detach(), unshard(w1).detach()


CASES = [(each, "mse", True) for each in BETWEEN]
CASES += [("nothing", loss, False) for loss in LOSSES]  # a loss of DTensors


@pytest.mark.sample("written-mse-True")
@pytest.mark.parametrize(("between", "loss", "whole"), CASES, ids=str)
def test_the_two_mesh_example_trains(ranks, between, loss, whole):
    x, w0, w1, target = tensors()
    w0, w1 = torch.nn.Parameter(w0), torch.nn.Parameter(w1)
    truth = torch.stack(steps(w0, w1, x, target, BETWEEN[between], LOSSES[loss], lambda h: h, lambda y: y))
    for rank, (values, first, second) in enumerate(ranks(4).run(trained, between, loss, whole)):
        torch.testing.assert_close(first, w0.detach() if rank < 2 else torch.full_like(w0, torch.nan), equal_nan=True)
        torch.testing.assert_close(second, torch.full_like(w1, torch.nan) if rank < 2 else w1.detach(), equal_nan=True)
        expected = torch.full_like(truth, torch.nan) if rank < 2 else truth.detach()
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected, equal_nan=True)


def unknown_values(group):
    mesh = ProcessMesh([0, 1])
    x = shard_tensor(torch.tensor([1.0, 0.0, 2.0, 3.0]), mesh, [Shard(0)])
    said = []
    for function in (torch.nonzero, lambda x: unshard(x.argmax()), lambda x: x.argmax().item()):
        try:
            said.append(function(x) is None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_rank_outside_of_the_mesh_makes_no_values_up(ranks):
    *inside, outside = ranks(3).run(unknown_values)
    assert inside == [[False] * 3] * 2
    assert all("reshard to a mesh of all ranks" in said for said in outside)
