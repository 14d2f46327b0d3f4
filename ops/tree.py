"""The three operators with the same bits at every tensor-parallel degree, for COC_DETERMINISTIC=tp and invariant.

Weights are multiplied in blocks (ops/blocks.py), whose number does not depend on the ranks, in tiles of rows. Sums run
in one binary tree: each rank adds the blocks that it holds, the ranks add their sums. For the upper levels every rank
gets a slice of all ranks' sums, adds it, and the ranks gather the slices; sequence parallelism ends before the gather.

Sent by a rank of R for a sum of S bytes: (R - 1) / R times S for the slices, in fp32 also for 16 bits, and as much in
the operands' dtype for the gather. Held beside the result: copies of the weight's blocks, and log2(8 / R) + 1 products
of a chunk.

The settings may be a caller's own, for one call: then each operator puts what stands between layers in force.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ascend_parallel.ops import chunked
from ascend_parallel.ops.blocks import (
    BLOCKS,
    BlockedFeatures,
    ColumnBlocks,
    SummedBlocks,
    product_of_columns,
    summed_dtype,
)
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, Matmul
from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.collectives import (
    IN_TREE,
    FollowedWork,
    StartScatter,
    all_gather_single,
    reduce_scatters,
    sum_in_tree,
)
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.elementwise import ELEMENTWISE
from ascend_parallel.ops.multiply import ALONE, multiply
from ascend_parallel.ops.pending import FinishingWork, Pending, limited
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.rows import Sizes


def supports(matmul: Matmul) -> str | None:
    """Return the reason why the kernel cannot run `matmul`, or None if it can."""
    if matmul.antiquant or matmul.int8_input:
        return "int8 weights have no products in blocks"
    if matmul.operator != ALL_REDUCE and matmul.m % BLOCKS:
        return f"{matmul.m} rows, which ranks share, are not a multiple of {BLOCKS}"
    return features_of(matmul).refusal


def features_of(matmul: Matmul) -> BlockedFeatures:
    """Return the blocks of the features that ranks share: of N for a gather, else of K."""
    features = matmul.n if matmul.operator == ALL_GATHER else matmul.k
    return BlockedFeatures(matmul.parts or (features,), matmul.ranks, matmul.arithmetic.fixed_tiles)


def matmul_all_reduce(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    row_tile: int,
    features: BlockedFeatures,
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w)``: x_m [M, K], w [K, N]; pending [M, N].

    Chunk i's slices are exchanged under chunk i + 1's matmul, and gathered under the one after it. All ranks wait for
    the result at the same place of the program: the last gather starts there.
    """
    ELEMENTWISE.follow(True)
    ranks, n = group.size(), w.shape[1]
    y_m = x_m.new_empty(x_m.shape[0], n)
    pending = Pending(y_m, ALL_REDUCE, group, len(sizes))
    communicates = ranks > 1 and y_m.numel() > 0
    with pending.launching():
        blocks = compute(BESIDE, "blocks", SummedBlocks, w, features)
        slices = tuple(-(-size * n // ranks) for size in sizes)
        own = x_m.new_empty(sum(slices))
        starts: Sequence[StartScatter | None] = [None] * len(sizes)
        if communicates:
            starts = pending.expect(reduce_scatters, own, slices, group, IN_TREE)
        rows, results = torch.split_with_sizes(x_m, sizes), torch.split_with_sizes(y_m, sizes)
        chunks = zip(rows, results, torch.split_with_sizes(own, slices), starts, strict=True)
        for index, (x_c, y_c, own_c, start) in enumerate(chunks):
            padded = x_m.new_zeros(ranks * own_c.shape[0], dtype=summed_dtype(x_m.dtype))
            partial = padded[: y_c.numel()].view(y_c.shape)
            compute(MATMUL, "matmul", multiply, x_c, blocks, partial, row_tile)
            if start is None:
                y_c.copy_(partial)
                continue
            pending.launch(_sum_and_gather, start, padded, own_c, y_c, group)
            if index:
                pending.advance(index - 1)
    COUNTS.add(ALL_REDUCE, 0 if isinstance(w, ALONE) else len(sizes), 2 * len(sizes) if communicates else 0)
    return pending


def _sum_and_gather(
    start: StartScatter, padded: torch.Tensor, own_c: torch.Tensor, y_c: torch.Tensor, group: dist.ProcessGroup
) -> Work:
    """Start the sum of each rank's `padded` into the slices own_c, which are gathered into the contiguous y_c."""

    def gather() -> Work:
        if padded.numel() == y_c.numel():
            return limited(all_gather_single(y_c.view(-1), own_c, group), group, y_c.device)
        whole = own_c.new_empty(padded.shape)
        work = all_gather_single(whole, own_c, group)
        return FinishingWork([work], lambda: y_c.copy_(whole[: y_c.numel()].view(y_c.shape)), group, y_c)

    return FollowedWork(start(padded), gather)


def matmul_reduce_scatter(
    x_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    row_tile: int,
    features: BlockedFeatures,
) -> Pending:
    """Start ``y_shard_m = reduce_scatter(x_m @ w)``, as `chunked` does: x_m [M, K], w [K, N]; pending [M / R, N]."""
    if group.size() == 1 or not x_m.shape[0]:
        return matmul_all_reduce(x_m, w, group, sizes, row_tile=row_tile, features=features)
    ELEMENTWISE.follow(True)
    blocks = compute(BESIDE, "blocks", SummedBlocks, w, features)
    return chunked.matmul_reduce_scatter(x_m, blocks, group, sizes, after, order=IN_TREE, row_tile=row_tile)


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    row_tile: int,
    features: BlockedFeatures,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``x_m @ w`` [M, N] and ``x_m = all_gather(x_shard_m)`` [M, K], as `chunked` does: x_shard_m [M / R, K]."""
    ELEMENTWISE.follow(True)
    if group.size() == 1 or not x_shard_m.shape[0]:
        return product_of_columns(x_shard_m.contiguous(), w, row_tile=row_tile, features=features), x_shard_m
    blocks = compute(BESIDE, "blocks", ColumnBlocks, w, features)
    return chunked.all_gather_matmul(x_shard_m, blocks, group, sizes, row_tile=row_tile)


def sum_of_blocks(blocks: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum over the blocks of all ranks, in the tree, on every rank: `blocks`, of this rank in order.

    Each rank sends its own sum to all others, so blocks should be small. With group=None this rank has all blocks.
    Raises `CollectiveError` if a rank fails.
    """
    own, total = torch.empty_like(blocks[0]), torch.empty_like(blocks[0])
    sum_in_tree([block.clone() for block in blocks], own)
    if group is None:
        return own
    parts = own.new_empty(group.size(), *own.shape)
    with Pending(parts, "sum of blocks", group) as pending:
        pending.launch(all_gather_single, parts.view(-1), own.view(-1), group)
        sum_in_tree(pending.wait().unbind(), total)
    return total
