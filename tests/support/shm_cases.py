"""Calls of the shared-memory kernel, each compared bit for bit with its matmuls summed in rank order."""

import contextlib
import time
from pathlib import Path

import torch

from ascend_parallel.ops import Matmul, registry, shm
from ascend_parallel.ops.multiply import aligned
from ascend_parallel.ops.rows import deterministic_tile

OPERATORS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
LEFT_BEHIND = 5.0  # seconds
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def segments():
    """Names of segments that were left behind: that of a test beside this one is there only while its ranks open it."""
    until = time.monotonic() + LEFT_BEHIND
    while found := sorted(path.name for path in Path("/dev/shm").glob("ascend_parallel-*")):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return found


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


def cut(operator, dtype, m, k, n, ranks, tiled=False):
    """The pieces in which a call's rows pass, and its row tile."""
    problem = Matmul(operator, m, k, n, dtype, "cpu", ranks, shm=None, deterministic=tiled)
    return shm.pieces(problem), deterministic_tile(m) if tiled else 0


def multiplied(x, w, sizes, tile):
    """Rows of one rank, each piece by itself, in tiles of rows if there is a tile."""
    pieces = [piece for part in x.split(sizes) for piece in (part.split(tile) if tile else [part])]
    return torch.cat([torch.mm(aligned(piece), w) for piece in pieces])


def check_call(group, operator, dtype, shape, seed=1):
    """Run one call, every other one in row tiles, and compare; `shape` is m, k, n of each rank's operands."""
    assert shm.reach(group) is None
    ranks, rank, (m, k, n) = group.size(), group.rank(), shape
    every = [operands(seed, other, dtype, *shape) for other in range(ranks)]
    x, w = every[rank]
    gathers = operator == "all_gather_matmul"
    sizes, tile = cut(operator, dtype, m * ranks if gathers else m, k, n, ranks, tiled=seed % 2 == 0)
    if gathers:
        gathered = torch.cat([x for x, _ in every])
        blocks = [torch.mm(gathered, w)] if not tile and shm.gathers_before_matmul(m) else None
        blocks = blocks or [multiplied(x.contiguous(), w, sizes, tile) for x, _ in every]
        for keep in (True, False):
            y, kept = shm.all_gather_matmul(x, w, group, sizes, keep_gathered=keep, row_tile=tile)
            same(y, torch.cat(blocks), operator, dtype, shape)
            assert (kept is not None) == keep
            if keep:
                same(kept, gathered, "gathered", dtype, shape)
        return
    blocks = 1 if operator == "matmul_all_reduce" or (len(sizes) == 1 and not tile) else ranks
    cuts = (m,) if blocks == 1 and operator != "matmul_all_reduce" else sizes
    parts = [torch.cat([multiplied(block, w, cuts, tile) for block in x.split(max(1, m // blocks))]) for x, w in every]
    expected = rank_order_sum(parts)
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(ranks)[rank] if m else expected
    pending = getattr(shm, operator)(x, w, group, sizes, row_tile=tile)
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
    registry._choose.cache_clear()
    try:
        yield
    finally:
        shm.PIECE_BYTES = usual
        shm._SHARED.pop(group, None)
        registry._choose.cache_clear()
