"""Functions of DTensors from `shard_tensor`: values and gradients are those of whole tensors, however they are cut."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from logged import logged
from marks import promise
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.sharding import ProcessMesh, dtensor_from_local, shard_tensor, unshard
from ascend_parallel.sharding.marked import unsharded_call

WEIGHT = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def attention(x):
    query = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(query, query / 2, query + 1, is_causal=True).transpose(1, 2).flatten(2)


def written(x):
    y = x * 2
    y.mul_(x).add_(1.0)
    y[0] = x[1]
    y += x
    return F.relu_(y * 1) * y


def recurrent(x):
    torch.manual_seed(3)
    return nn.LSTM(12, 6, batch_first=True).double()(x)[0]


# Each takes x of [rows, 4, 12].
FUNCTIONS = {
    "elements": (torch.exp, lambda x: 3 - 2 * x / 7, F.gelu, lambda x: torch.where(x > 0, x, -2 * x), F.mish),
    "matmuls": (
        lambda x: x @ WEIGHT,
        lambda x: F.linear(x, WEIGHT, WEIGHT[0]),
        lambda x: torch.einsum("bsh,bth->bst", x, x),
        lambda x: torch.bmm(x, x.mT),
        attention,
    ),
    "sums": (torch.sum, lambda x: x.mean(0), lambda x: x.var(-1), lambda x: x.norm(), lambda x: x.cumsum(0)),
    "norms": (
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (12,), WEIGHT[0], WEIGHT[1]),
        lambda x: F.group_norm(x, 2),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.rms_norm(x, (12,)),
    ),
    "shapes": (
        lambda x: torch.cat([x, 2 * x], 1),
        lambda x: x.split(3, -1)[1] * x.chunk(4, -1)[2],
        lambda x: x.view(-1, 6) * 2,
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x[:, 1:3, ::2],
        lambda x: x[:, [0, 2]],
        lambda x: sum(row * place for place, row in enumerate(x)),
    ),
    "order": (lambda x: x.topk(3, -1)[0], lambda x: x.sort(0)[0], lambda x: x.roll(2, 0), lambda x: x.flip(0, 2)),
    "indices": (
        lambda x: x.gather(1, (x > 0).long()),
        lambda x: F.embedding((x[..., 0] > 0).long(), x[0]),
        lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x),
        lambda x: x.index_add(0, torch.tensor([0, 1]), x[:2]),
    ),
    "values": (
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 1e9 else -3 * x,
        lambda x: x * float(torch.allclose(x, x)),
        lambda x: x * sum(x[0, 0].tolist()) * x.detach().numpy().size,
    ),
    "shapes by values": (lambda x: x[x > 0], lambda x: x * x.nonzero().sum(), lambda x: x.masked_select(x < 0)),
    "written": (written,),
    "recurrent": (recurrent,),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * (1 + 2j)),
        lambda x: torch.fft.rfft(x).abs(),
    ),
}


def compared(group, functions, shape):
    mesh = ProcessMesh(torch.arange(group.size()).reshape(shape).tolist(), ["a", "b"][: len(shape)])
    torch.manual_seed(group.rank())
    for rows in (12, 5) if shape == (2,) else (5,):  # 5 rows are cut unevenly, the last dimension evenly
        x = torch.randn(rows, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        for function in FUNCTIONS[functions]:
            whole = x.clone().requires_grad_()
            truth = function(whole)
            weights = torch.randn(truth.shape, dtype=truth.dtype, generator=torch.Generator().manual_seed(7))
            (truth * weights).sum().backward()
            cuts = itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=len(shape))
            for cut in itertools.islice(cuts, None, None, 1 if len(shape) == 1 else 3):
                given = shard_tensor(x.clone(), mesh, cut).requires_grad_()
                found = function(given)
                assert isinstance(found, DTensor)
                torch.testing.assert_close(unshard(found), truth)
                (found * weights).sum().backward()
                torch.testing.assert_close(given.grad.full_tensor(), whole.grad)


# 3 ranks cut the middle dimension unevenly too; 2 ranks show less, and run one group of functions, in `make test`. On
# two mesh dimensions those whose pieces are computed where they lie.
CASES = [("elements", (2,)), *((name, (3,)) for name in FUNCTIONS)]
CASES += [(name, (2, 2)) for name in ("elements", "matmuls", "sums", "norms", "shapes", "indices", "written")]


@promise("marked-functions")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("functions", "shape"), CASES, ids=str)
def test_functions_are_those_of_whole_tensors(ranks, functions, shape):
    ranks(torch.Size(shape).numel()).run(compared, functions, shape)


@on_ranks(2)
def test_arrays_data_and_parameters_made_of_dtensors(group):
    mesh = ProcessMesh(list(range(group.size())))
    whole = torch.arange(32.0, dtype=torch.float64).view(4, 8)
    x = shard_tensor(whole.clone(), mesh, [Shard(0)])
    torch.testing.assert_close(unshard(x * np.arange(8.0)), whole * torch.arange(8.0, dtype=torch.float64))
    torch.testing.assert_close(unshard(x[np.array([0, 2])]), whole[[0, 2]])
    torch.testing.assert_close(np.asarray(x), whole.numpy())
    x.data = x.data * 2
    torch.testing.assert_close(unshard(x), whole * 2)
    with pytest.raises(ValueError, match=r"\.data of a DTensor of \[4, 8\] of torch.float64 is set to Tensor"):
        x.data = whole
    held = nn.Parameter(shard_tensor(whole.clone(), mesh, [Shard(1)]))  # a parameter made of a DTensor
    truth = nn.Parameter(whole.clone())
    for parameter in (held, truth):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            parameter.square().mean().backward()
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
    torch.testing.assert_close(unshard(held.detach()), truth.detach())


@on_ranks(3)
def test_partial_sums_and_extremes_are_complete_before_they_are_read(group):
    mesh = ProcessMesh(list(range(group.size())))
    term = torch.full((4, 6), group.rank() + 1.0, dtype=torch.float64)
    for op, expected in (("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)):
        local = term.clone().requires_grad_()
        x = dtensor_from_local(local, mesh, [Partial(op)])
        torch.testing.assert_close(unshard(x.exp()), torch.full((4, 6), expected, dtype=torch.float64).exp())
        (x * 3).sum().backward()
        share = {"sum": 3.0, "avg": 1.0, "max": 3.0 * (group.rank() == 2), "min": 3.0 * (group.rank() == 0)}[op]
        torch.testing.assert_close(local.grad, torch.full_like(local, share))


@on_ranks(2)
def test_what_views_and_in_place_functions_cannot_do_is_refused(group):
    mesh, other = ProcessMesh(list(range(group.size())), ["a"]), ProcessMesh([[0], [1]], ["a", "b"])
    x = shard_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0)])
    view = x[:, 1:]
    for write in (x.zero_, partial(view.add_, 1), partial(x.__setitem__, 0, 1.0)):
        with pytest.raises(
            ValueError, match="writes to a tensor of which there are views, and views of DTensors do not"
        ):
            write()
    del view, write
    torch.testing.assert_close(unshard(x.add_(1)), torch.arange(24.0).view(4, 6) + 1)
    with pytest.raises(ValueError, match=r"unsqueeze_ makes \[1, 4, 6\] of torch.float32 of a DTensor of \[4, 6\]"):
        x.unsqueeze_(0)
    with pytest.raises(
        ValueError, match=r"add gets DTensors on ProcessMesh\(.*\) and on ProcessMesh\(.*\): reshard them"
    ):
        x + shard_tensor(torch.ones(4, 6), other, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        shard_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_().add_(1)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (x.clone().requires_grad_() * 2).backward()
    with pytest.raises(ValueError, match=r"resize_as_ makes \[2, 2\]"):
        x.resize_as_(torch.ones(2, 2))


def said(group):
    mesh = ProcessMesh(list(range(group.size())))
    unsharded_call.runs_whole.cache_clear()  # what earlier tests in this process have said
    with logged() as texts:
        for _ in range(3):
            x = shard_tensor(torch.arange(6.0), mesh, [Shard(0)])
            assert unshard(x.unique()).tolist() == [0, 1, 2, 3, 4, 5]
    return texts


def test_a_function_that_runs_whole_is_said_once_on_rank_0(ranks):
    first, second = ranks(2).run(said)
    (text,) = first
    assert text.startswith("torch.Tensor.unique runs on whole tensors on every rank: ") and not second


@on_ranks(2)
def test_torchs_own_dtensors_are_left_as_they_are(group):
    """A user of torch's own DTensor beside this package's."""
    mesh = ProcessMesh(list(range(group.size())))
    ours = shard_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    assert type(F.mse_loss(ours, 2 * ours)) is type(ours)
    own = DTensor.from_local(torch.ones(4, 6), mesh.device_mesh(), [Shard(0)])
    assert type(own.sum()) is DTensor and own.sum().placements == (Partial(),)
    leaf = DTensor.from_local(torch.ones(4, 6), mesh.device_mesh(), [Shard(0)]).requires_grad_()
    F.mse_loss(leaf, own * 2).backward()
    assert leaf.grad.full_tensor()[0, 0].item() == pytest.approx(-2 / 24)  # of a mean of 24 squares
