"""Weights in the blocks that every tensor-parallel degree multiplies alike, for COC_DETERMINISTIC=tp.

The features that ranks share are cut into `BLOCKS` blocks, whatever the number of ranks; R ranks hold BLOCKS / R each.
A product is one call for each block, of operands of the same shape, strides and alignment at every degree. A sum over
features is the sum of the blocks' products in one binary tree:

    ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))

A rank adds its own subtree here; ops/collectives.py adds those of the ranks. Products of 16-bit operands are summed in
fp32 and rounded once, at the root. The method is that of "Deterministic Inference across Tensor Parallel Sizes That
Eliminates Training-Inference Mismatch" (arXiv 2511.17826), which has it for a row layer's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ascend_parallel.ops.multiply import multiply
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.row_tiles import LARGER, multiply_tiles
from ascend_parallel.ops.rows import LARGEST_TILE, ROW_TILE, deterministic_tile

# The blocks of every dimension that ranks share: the largest degree. Another number would give other bits.
BLOCKS = 8


def degree_tile(m: int) -> int:
    """Return the number of rows in a tile for a matmul of `m` rows on all ranks; the same at every degree.

    If ranks can share the rows, no tile has rows of two of `BLOCKS` ranks.
    """
    rows, rest = divmod(m, BLOCKS)
    if rest or not rows:
        return deterministic_tile(m)
    power = rows & -rows
    return min(power, LARGEST_TILE) if power >= ROW_TILE else rows


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of operands of `dtype` are summed: fp32 for 16 bits."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class BlockedFeatures:
    """The features of a dimension on one rank.

    parts
        The number of features of each packed part on this rank: one part, or those of a fused weight, such as
        [gate; up]. Block b holds the b-th of `count` equal shares of every part.
    ranks
        The ranks that share the dimension.
    fixed_tiles
        Whether each element of a product has the bits of its tile (row_tiles.py), whatever the rows of the call.
    """

    parts: tuple[int, ...]
    ranks: int
    fixed_tiles: bool = False

    @property
    def count(self) -> int:
        """The blocks on this rank."""
        return BLOCKS // self.ranks

    @property
    def refusal(self) -> str | None:
        """Why the features cannot be cut into the blocks, or None."""
        if BLOCKS % self.ranks:
            return f"{self.ranks} ranks are not 1, 2, 4 or {BLOCKS}"
        for features in self.parts:
            if not features or features % self.count:
                return f"{features} features of a rank cannot be cut into {self.count} equal blocks"
        return None

    def slices(self, index: int) -> list[slice]:
        """Return the places of the features of block `index`, one slice for each part."""
        found, start = [], 0
        for features in self.parts:
            share = features // self.count
            found.append(slice(start + index * share, start + (index + 1) * share))
            start += features
        return found

    def multiply(self, x_m: torch.Tensor, w: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Write the product of a block, ``x_m @ w``, to y_m: x_m [m, K], w [K, N], y_m [m, N]."""
        if self.fixed_tiles:
            multiply_tiles(x_m, w, y_m)
        else:
            multiply(x_m, w, y_m, row_tile)

    def put(self, out: torch.Tensor, dim: int, index: int, block: torch.Tensor) -> None:
        """Copy a block's features, along dimension `dim`, to their places in `out`."""
        start = 0
        for place in self.slices(index):
            share = place.stop - place.start
            out.narrow(dim, place.start, share).copy_(block.narrow(dim, start, share))
            start += share

    def columns(self, x_m: torch.Tensor, index: int) -> torch.Tensor:
        """Return the columns of block `index` of x_m [M, features], contiguous."""
        blocks = [x_m[:, place] for place in self.slices(index)]
        return torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0].contiguous()

    def blocks_of(self, tensor: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
        """Yield the blocks of a tensor along dimension `dim`, each as rows [all other elements, share], contiguous."""
        rows = tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
        return (self.columns(rows, index) for index in range(self.count))

    def blocks_of_rows(self, w: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the rows of each block of w [features, N], as `rows`."""
        return (self.rows(w, index) for index in range(self.count))

    def rows(self, w: torch.Tensor, index: int) -> torch.Tensor:
        """Return the rows of block `index` of w [features, N]: contiguous, or transposed as w is."""
        if w.stride(0) == 1 and not self.fixed_tiles:
            return self.columns(w.t(), index).t()
        blocks = [w[place] for place in self.slices(index)]
        if self.fixed_tiles and len(blocks) == 1:
            return blocks[0]  # where its place matters, tiles are copied
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0].contiguous()


class SummedBlocks:
    """A weight [K, N] in blocks of K: `multiply` sums the products of this rank's blocks in their subtree."""

    def __init__(self, w: torch.Tensor, features: BlockedFeatures) -> None:
        """Copy the blocks of w, unless they lie in memory as every degree has them."""
        self.shape, self._features, self._dtype = w.shape, features, summed_dtype(w.dtype)
        # torch.mm of 16-bit operands has no fp32 result on a CPU.
        self._blocks = [each.to(self._dtype) for each in features.blocks_of_rows(w)]

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Write this rank's part of ``x_m @ w`` to y_m: x_m [m, K]; contiguous y_m [m, N], fp32 for 16 bits."""
        rows = LARGER[0] if self._features.fixed_tiles else max(1, len(x_m))  # the blocks' sums stay in a cache
        for x_c, y_c in zip(torch.split(x_m, rows), torch.split(y_m, rows), strict=True):
            self._sum(x_c, y_c, row_tile, 0, len(self._blocks))

    def _sum(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int, first: int, last: int) -> None:
        if last - first == 1:
            x_block = self._features.columns(x_m, first).to(self._dtype)
            self._features.multiply(x_block, self._blocks[first], y_m, row_tile)
            return
        middle, other = (first + last) // 2, torch.empty_like(y_m)
        self._sum(x_m, y_m, row_tile, first, middle)
        self._sum(x_m, other, row_tile, middle, last)
        y_m.add_(other)


class ColumnBlocks:
    """A weight [K, N] in blocks of N: `multiply` writes the product of each to its columns."""

    def __init__(self, w: torch.Tensor, features: BlockedFeatures) -> None:
        """Copy the blocks of w, unless they lie in memory as every degree has them."""
        self.shape, self._features, self._w = w.shape, features, w
        self._blocks = [] if features.fixed_tiles else [each.t() for each in features.blocks_of_rows(w.t())]

    def multiply(self, x_m: torch.Tensor, y_m: torch.Tensor, row_tile: int) -> None:
        """Write ``x_m @ w`` to y_m: x_m [m, K], y_m [m, N]."""
        if self._features.fixed_tiles:
            multiply_tiles(x_m.contiguous(), self._w, y_m)
            return
        for index, w in enumerate(self._blocks):
            y_block = x_m.new_empty(x_m.shape[0], w.shape[1])
            multiply(x_m, w, y_block, row_tile)
            self._features.put(y_m, 1, index, y_block)


def product_of_columns(x_m: torch.Tensor, w: torch.Tensor, *, row_tile: int, features: BlockedFeatures) -> torch.Tensor:
    """Return ``x_m @ w`` [M, N], one call for each block of N: contiguous x_m [M, K], w [K, N]."""
    y_m = x_m.new_empty(x_m.shape[0], w.shape[1])
    compute(MATMUL, "matmul", ColumnBlocks(w, features).multiply, x_m, y_m, row_tile)
    return y_m


def gradient_of_rows(parts: tuple[int, ...], ranks: int, x_m: torch.Tensor, dy_m: torch.Tensor) -> torch.Tensor:
    """Return ``dw = dy_m.t() @ x_m`` [N, K], one call for each block of N: contiguous x_m [M, K], dy_m [M, N].

    The ranks share N; `parts` as of `BlockedFeatures`, empty for one part.
    """
    features = BlockedFeatures(parts or (dy_m.shape[1],), ranks)
    dw = dy_m.new_empty(dy_m.shape[1], x_m.shape[1])
    for index in range(features.count):
        dy_block = features.columns(dy_m, index)
        dw_block = dw.new_empty(dy_block.shape[1], dw.shape[1])
        multiply(dy_block.t(), x_m, dw_block)
        features.put(dw, 0, index, dw_block)
    return dw


def gradient_of_columns(parts: tuple[int, ...], ranks: int, x_m: torch.Tensor, dy_m: torch.Tensor) -> torch.Tensor:
    """Return ``dw = dy_m.t() @ x_m`` [N, K], one call for each block of K: as `gradient_of_rows`; the ranks share K."""
    dw = dy_m.new_empty(dy_m.shape[1], x_m.shape[1])
    ColumnBlocks(x_m, BlockedFeatures(parts or (x_m.shape[1],), ranks)).multiply(dy_m.t(), dw, 0)
    return dw


def sum_of_rows(parts: tuple[int, ...], ranks: int, dy_m: torch.Tensor) -> torch.Tensor:
    """Return ``dy_m.sum(0)`` [N], one call for each block of N: dy_m [M, N]; parts and ranks as `gradient_of_rows`."""
    features, db = BlockedFeatures(parts or (dy_m.shape[1],), ranks), dy_m.new_empty(dy_m.shape[1])
    for index in range(features.count):
        features.put(db, 0, index, features.columns(dy_m, index).sum(dim=0))
    return db
