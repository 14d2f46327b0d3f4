"""torchtitan 0.3's own fused linears (``torchtitan/distributed/linear.py``) on CPU ranks, with the kernels.

Needs torchtitan==0.3.0 with spmd_types==0.2.3, tyro and docstring_parser; not its other packages.
"""

import pytest
import torch
from tolerances import close

import ascend_parallel
from ascend_parallel.ops import COUNTS

linear = pytest.importorskip(
    "torchtitan.distributed.linear", reason="torchtitan 0.3 is not installed", exc_type=ImportError
)
ROWS, K, N = 64, 48, 36  # ROWS and K of one rank
DTYPE = torch.float32


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor):
    return tensor.clone().requires_grad_()


def columns(group, pair):
    """Compare `AllGatherLinear`, or with `pair` `AllGatherLinearMulti`, forward and backward, with float64."""
    ranks, rank, name = group.size(), group.rank(), group.group_name
    x = drawn(ROWS * ranks, K * ranks, seed=0)
    weights = [drawn(N * ranks, K * ranks, seed=1 + i) for i in range(2 if pair else 1)]
    bias = None if pair else drawn(N * ranks, seed=5)
    dys = [drawn(ROWS * ranks, N * ranks, seed=8 + i) for i, _ in enumerate(weights)]
    wide = [t.double().requires_grad_() for t in (x, *weights)]
    wide_bias = None if bias is None else bias.double().requires_grad_()
    truths = [torch.nn.functional.linear(wide[0], w, wide_bias) for w in wide[1:]]
    torch.autograd.backward(truths, [dy.double() for dy in dys])

    mine_x = leaf(x.chunk(ranks)[rank])
    mine_w = [leaf(w.chunk(ranks)[rank]) for w in weights]
    if pair:
        ys = linear.AllGatherLinearMulti.apply(mine_x, *mine_w, group, name)
    else:
        mine_bias = leaf(bias.chunk(ranks)[rank])
        ys = (linear.AllGatherLinear.apply(mine_x, mine_w[0], mine_bias, group, name),)
    torch.autograd.backward(ys, [dy.chunk(ranks, 1)[rank].contiguous() for dy in dys])
    for y, truth in zip(ys, truths, strict=True):
        close(y, truth.chunk(ranks, 1)[rank], DTYPE)
    close(mine_x.grad, wide[0].grad.chunk(ranks)[rank], DTYPE)
    for w, truth in zip(mine_w, wide[1:], strict=True):
        close(w.grad, truth.grad.chunk(ranks)[rank], DTYPE)
    if not pair:
        close(mine_bias.grad, wide_bias.grad.chunk(ranks)[rank], DTYPE)


def rows(group):
    """Compare `LinearReduceScatter` with float64: its forward.

    Its backward calls ``torch.mm(out_dtype=)``, which a CPU does not have (torch 2.13).
    """
    ranks, rank = group.size(), group.rank()
    x, w, bias = drawn(ROWS * ranks, K * ranks, seed=0), drawn(N, K * ranks, seed=1), drawn(N, seed=2)
    truth = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    mine = [t.chunk(ranks, 1)[rank].contiguous() for t in (x, w)]
    y = linear.LinearReduceScatter.apply(*mine, bias, group, group.group_name)
    close(y, truth.chunk(ranks)[rank], DTYPE)


def both(group):
    """Run the three functions; return the counts of this package's operators."""
    ascend_parallel.configure(num_chunks=4)
    ascend_parallel.register_symm_mem()
    COUNTS.clear()
    try:
        columns(group, False)
        columns(group, True)
        rows(group)
        return COUNTS.as_dict()
    finally:
        ascend_parallel.unregister_symm_mem()
        ascend_parallel.configure()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_torchtitans_linears(ranks, count):
    for counts in ranks(count).run(both):
        # forward and weight gradient of both column functions; their input gradients and the row function
        assert counts["all_gather_matmul"]["calls"] == 4
        assert counts["matmul_reduce_scatter"]["calls"] == 3
        assert all(total["chunks"] > total["calls"] for total in counts.values())


def without_kernels(group):
    """Return the error of torchtitan's function without the kernels."""
    with pytest.raises(NotImplementedError) as error:
        rows(group)
    return str(error.value)


def test_without_the_kernels_torch_has_none(ranks):
    for text in ranks(2).run(without_kernels):
        assert "symm_mem::fused_matmul_reduce_scatter" in text
