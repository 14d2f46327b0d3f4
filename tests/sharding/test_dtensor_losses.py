"""Tests losses of DTensors from `shard_tensor`: values and gradients equal those of whole tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from marks import promise
from pool import on_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.sharding import ProcessMesh, dtensor_from_local, shard_tensor


def _weighted(x, target, **options):
    return F.binary_cross_entropy_with_logits(x, target.sigmoid(), target.abs(), pos_weight=target[0].abs(), **options)


BY_ELEMENT = {
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


def _cosine(x, target, **options):
    return F.cosine_embedding_loss(x, target, target[:, 0].sign(), **options)


def _nll(x, target, **options):
    return F.nll_loss(x.log_softmax(-1), target, **options)


# Losses of 12 classes: which are ignored or weighted makes the ranks' counts differ.
FUNCTIONS = {
    "plain": (F.cross_entropy, {}),
    "smoothed": (F.cross_entropy, {"label_smoothing": 0.1}),
    "weighted": (F.cross_entropy, {"weight": torch.linspace(0.5, 2, 12, dtype=torch.float64)}),
    "both": (F.cross_entropy, {"weight": torch.linspace(0.5, 2, 12, dtype=torch.float64), "label_smoothing": 0.1}),
    "another class ignored": (F.cross_entropy, {"ignore_index": 3}),
    "nll": (_nll, {"weight": torch.linspace(0.5, 2, 12, dtype=torch.float64)}),
    "of places": (lambda x, target, **options: F.cross_entropy(x.unflatten(1, (6, 2)), target, **options), {}),
    "of probabilities": (lambda x, target, **options: F.cross_entropy(x, target, **options), {}),
    "cosine": (_cosine, {}),
}
FUNCTIONS |= {name: (function, {}) for name, function in BY_ELEMENT.items()}


def targets_of(name, rows, generator):
    if name in BY_ELEMENT:
        return torch.randn(rows, 12, dtype=torch.float64, generator=generator)
    if name in ("of probabilities", "cosine"):
        return torch.randn(rows, 12, dtype=torch.float64, generator=generator).softmax(-1)
    shape, classes = ((rows, 2), 6) if name == "of places" else ((rows,), 12)
    target = torch.randint(classes, shape, generator=generator)
    target[: rows // 2] = 3 if name == "another class ignored" else -100  # most on the first ranks
    return target


# By element on 3 ranks, one of each kind (two tensors, four, logarithms) on two mesh dimensions; by class on 2 to 4.
CASES = [((3,), name) for name in BY_ELEMENT] + [((2, 2), name) for name in ("mse", "with_logits, weights", "kl_div")]
CASES += [((2 + place % 3,), name) for place, name in enumerate(name for name in FUNCTIONS if name not in BY_ELEMENT)]


@promise("marked-functions")
@pytest.mark.sample("(3,)-mse", "(2,)-plain")
@pytest.mark.parametrize(("shape", "name"), CASES, ids=str)
def test_losses_are_those_of_whole_tensors(ranks, shape, name):
    """Those by class count the targets of all ranks."""
    ranks(torch.Size(shape).numel()).run(compared, name, shape)


def compared(group, name, shape):
    mesh = ProcessMesh(torch.arange(group.size()).reshape(shape).tolist(), dim_names=["x", "y"][: len(shape)])
    function, options = FUNCTIONS[name]
    sharded = {
        key: shard_tensor(value, mesh, [Replicate()]) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
    cuts = (
        [[Shard(0)], [Shard(1)]] if len(shape) == 1 else [[Shard(0)] * 2, [Shard(1), Replicate()], [Shard(0), Shard(1)]]
    )
    for rows in (12, 7):  # 7 rows are cut unevenly
        generator = torch.Generator().manual_seed(rows)
        x, target = torch.randn(rows, 12, dtype=torch.float64, generator=generator), targets_of(name, rows, generator)
        for reduction, cut in itertools.product(("mean", "sum", "none"), cuts[:1] if name == "of places" else cuts):
            whole = x.clone().requires_grad_()
            loss = function(whole, target, reduction=reduction, **options)
            loss.square().sum().backward()
            given = shard_tensor(x.clone(), mesh, cut).detach().requires_grad_()
            same = target.shape == x.shape or cut == [Shard(0)]  # else each rank has all targets
            other = shard_tensor(target, mesh, cut if same else [Replicate()])
            found = function(given, other, reduction=reduction, **sharded)
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), loss.detach())
            found.redistribute(placements=[Replicate()] * len(shape)).square().sum().backward()
            torch.testing.assert_close(given.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_a_number_is_not_written_as_a_term_of_a_sum(group):
    mesh = ProcessMesh(list(range(group.size())))
    x = dtensor_from_local(torch.ones(4, dtype=torch.float64), mesh, [Partial()])
    torch.testing.assert_close(torch.empty_like(x).fill_(1).full_tensor(), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(x.full_tensor(), torch.full((4,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(x.fill_(1).full_tensor(), torch.ones(4, dtype=torch.float64))
    assert x.placements == (Partial(),)
    cut = shard_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    assert torch.empty_like(cut).placements == cut.placements
    assert cut.fill_(2).full_tensor().eq(2).all()
