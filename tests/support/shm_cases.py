"""Calls of the shared-memory kernel, each compared bit for bit with whole matmuls summed in rank order."""

import contextlib
from pathlib import Path

import torch

from ascend_parallel.ops import shm

OPERATORS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def segments():
    """Names of segments that were left behind."""
    return sorted(path.name for path in Path("/dev/shm").glob("ascend_parallel-*"))


def operands(seed, rank, dtype, m, k, n):
    """The x [m, k] and w [k, n] of a rank, which every rank can make; x with strides, w transposed, by the seed."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(m, k + seed % 2, generator=draw).to(dtype)[:, :k]
    w = torch.randn(n, k, generator=draw).to(dtype).t() if seed % 3 else torch.randn(k, n, generator=draw).to(dtype)
    return x, w


def rank_order_sum(parts):
    """Parts of one dtype, added in the order given, in fp32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check_call(group, operator, dtype, shape, seed=1):
    """Run one call and compare; `shape` is m, k, n of each rank's operands."""
    assert shm.reach(group) is None
    ranks, rank = group.size(), group.rank()
    every = [operands(seed, other, dtype, *shape) for other in range(ranks)]
    x, w = every[rank]
    if operator == "all_gather_matmul":
        gathered = torch.cat([x for x, _ in every])
        for keep in (True, False):
            y, kept = shm.all_gather_matmul(x, w, group, (), keep_gathered=keep)
            same(y, torch.mm(gathered, w), operator, dtype, shape)
            assert (kept is not None) == keep
            if keep:
                same(kept, gathered, "gathered", dtype, shape)
        return
    expected = rank_order_sum([torch.mm(x, w) for x, w in every])
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(ranks)[rank] if shape[0] else expected
    pending = getattr(shm, operator)(x, w, group, ())
    same(pending.wait(), expected, operator, dtype, shape)


def same(y, expected, *what):
    """Assert that two tensors are the same, bit for bit."""
    assert y.shape == expected.shape, f"{what}: shape {tuple(y.shape)} instead of {tuple(expected.shape)}"
    if not torch.equal(y, expected):
        wrong = (y != expected).sum().item()
        raise AssertionError(f"{what}: {wrong} of {y.numel()} elements are not the same")


@contextlib.contextmanager
def pieces_of(group, size):
    """Have rows of this group pass in pieces of `size` bytes, in a segment of its own; on all ranks together."""
    usual, shm.PIECE_BYTES = shm.PIECE_BYTES, size
    shm._SHARED.pop(group, None)
    try:
        yield
    finally:
        shm.PIECE_BYTES = usual
        shm._SHARED.pop(group, None)
