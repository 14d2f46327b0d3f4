"""Tests losses of DTensors from `shard_tensor`: values and gradients equal those of whole tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.sharding import ProcessMesh, shard_tensor


def _weighted(x, target, **options):
    return F.binary_cross_entropy_with_logits(x, target.sigmoid(), target.abs(), pos_weight=target[0].abs(), **options)


LOSSES = {
    "mse": F.mse_loss,
    "huber": lambda x, target, **options: F.huber_loss(x, target, delta=0.5, **options),
    "smooth_l1": lambda x, target, **options: F.smooth_l1_loss(x, target, beta=0.5, **options),
    "soft_margin": lambda x, target, **options: F.soft_margin_loss(x, target.sign(), **options),
    "binary_cross_entropy": lambda x, target, **options: F.binary_cross_entropy(
        x.sigmoid(), target.sigmoid(), weight=target.abs(), **options
    ),
    "with_logits": lambda x, target, **options: F.binary_cross_entropy_with_logits(x, target.sigmoid(), **options),
    "with_logits, weights": _weighted,
    "l1": F.l1_loss,
    "kl_div": lambda x, target, **options: F.kl_div(x, target.sigmoid(), **options),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_losses_are_those_of_whole_tensors(ranks, shape, name):
    ranks(4 if len(shape) == 2 else shape[0]).run(compared, name, shape)


def compared(group, name, shape):
    count = group.size()
    mesh = ProcessMesh(torch.arange(count).reshape(shape).tolist(), dim_names=["x", "y"][: len(shape)])
    cuts = [[Shard(0)] * len(shape), [Shard(1), *[Replicate()] * (len(shape) - 1)], [Shard(0), Shard(1)][: len(shape)]]
    for rows in (12, 7):  # 7 rows are cut unevenly
        generator = torch.Generator().manual_seed(rows)
        x, target = torch.randn(2, rows, 12, dtype=torch.float64, generator=generator)
        for reduction in ("mean", "sum", "none"):
            for cut in cuts:
                whole = x.clone().requires_grad_()
                loss = LOSSES[name](whole, target, reduction=reduction)
                loss.square().sum().backward()
                given = shard_tensor(x.clone(), mesh, cut).detach().requires_grad_()
                found = LOSSES[name](given, shard_tensor(target, mesh, cut), reduction=reduction)
                assert isinstance(found, DTensor)
                torch.testing.assert_close(found.full_tensor(), loss.detach())
                found.redistribute(placements=[Replicate()] * len(shape)).square().sum().backward()
                torch.testing.assert_close(given.grad.full_tensor(), whole.grad)
