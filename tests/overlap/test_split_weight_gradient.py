"""`split_weight_gradient`: the row layer's weight gradient summed under the gather, against the float64 truth."""

from unittest.mock import patch

import pytest
import torch
from pool import on_ranks

from ascend_parallel import Settings, SettingsError, row_linear
from ascend_parallel.ops.pending import Pending
from ascend_parallel.overlap.weight_gradient import GradientParts

ROWS, K, N = 512, 1024, 256  # of the whole layer


def drawn(dtype):
    generator = torch.Generator().manual_seed(5)
    sizes = (ROWS, 3, K), (N, K), (ROWS, 3, N)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def gradients(group, dtype, **settings):
    """Return this rank's gradients, and their truth."""
    ranks, rank = group.size(), group.rank()
    rows = ROWS // ranks * ranks
    x, w, dy = drawn(dtype)
    x, dy = x[:rows], dy[:rows]
    columns = slice(K // ranks * rank, K // ranks * (rank + 1))
    x_r, w_r = x[..., columns].clone().requires_grad_(), w[:, columns].clone().requires_grad_()
    y = row_linear(x_r, w_r, group=group, settings=Settings(num_chunks=4, **settings), sequence_parallel=True)
    y.backward(dy.chunk(ranks)[rank].clone())
    wide, wide_x, wide_w = (t.double() for t in (dy, x, w))
    true_x, true_w = (wide @ wide_w)[..., columns], wide.flatten(0, 1).t() @ wide_x[..., columns].flatten(0, 1)
    return (x_r.grad, true_x), (w_r.grad, true_w)


def largest_error(found, true):
    return ((found.double() - true).abs().max() / true.abs().max()).item()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("count", [2, 3, 4])
@on_ranks()
def test_it_matches_the_truth(group, dtype, limit):
    added = []
    add = GradientParts.add

    def counted(self, x_m, dy_m):
        added.append(len(x_m))
        add(self, x_m, dy_m)

    with patch.object(GradientParts, "add", counted):
        for found, true in gradients(group, dtype, split_weight_gradient=True):
            assert found.dtype == dtype
            assert largest_error(found, true) < limit
    rows = ROWS // group.size() * 3
    assert added[0] == rows
    assert sum(added) == rows * group.size()
    assert len(added) == 1 + 4 * (group.size() - 1)


@on_ranks(2)
def test_bfloat16_parts_are_summed_in_fp32(group):
    """The sum of bfloat16 chunks in fp32 is about as near to the truth as the whole product."""
    (_, split), (_, whole) = (gradients(group, torch.bfloat16, split_weight_gradient=on) for on in (True, False))
    split, whole = largest_error(*split), largest_error(*whole)
    assert split < 2 * whole


def order_of_work(group):
    """Return what is waited for and added, in order."""
    seen, wait_for, add = [], Pending.wait_for, GradientParts.add

    def waited(self, first, stop=0):
        seen.append(f"wait {first}")
        wait_for(self, first, stop)

    def added(self, x_m, dy_m):
        seen.append("add")
        add(self, x_m, dy_m)

    x = torch.randn(512, 64, requires_grad=True)
    w = torch.randn(32, 64, requires_grad=True)
    settings = Settings(num_chunks=4, split_weight_gradient=True)
    y = row_linear(x, w, group=group, settings=settings, sequence_parallel=True)
    with patch.object(Pending, "wait_for", waited), patch.object(GradientParts, "add", added):
        y.backward(torch.ones_like(y))
    return seen


def test_the_weight_gradient_of_a_chunk_runs_before_the_next_chunk_is_waited_for(ranks):
    expected = ["add", *(step for index in range(4) for step in (f"wait {index}", "add"))]
    for seen in ranks(2).run(order_of_work):
        assert seen[: len(expected)] == expected


def without_weight_gradient(group, settings):
    x, w = torch.randn(512, 64, requires_grad=True), torch.randn(32, 64)
    settings = Settings(split_weight_gradient=True, **settings)
    with patch.object(GradientParts, "add", side_effect=AssertionError):
        row_linear(x, w, group=group, settings=settings, sequence_parallel=True).sum().backward()
        if settings.num_chunks == 1:  # a whole gather: so is the weight gradient
            w.requires_grad_()
            row_linear(x, w, group=group, settings=settings, sequence_parallel=True).sum().backward()
            return w.grad is not None
    return w.grad is None


@pytest.mark.parametrize("settings", [{"num_chunks": 4}, {"num_chunks": 1, "mode": 2}], ids=["frozen", "one chunk"])
def test_where_nothing_is_split(ranks, settings):
    assert all(ranks(2).run(without_weight_gradient, settings))


def test_it_is_refused_with_deterministic_sums():
    with pytest.raises(SettingsError, match=r"COC_SPLIT_WEIGHT_GRADIENT=1 is not allowed with COC_DETERMINISTIC=1"):
        Settings(split_weight_gradient=True, deterministic=True)
