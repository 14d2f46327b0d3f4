"""Parameters that act on rows which ranks share, for COC_DETERMINISTIC=tp: of norms, and biases of row layers.

Under sequence parallelism every rank has some rows, and the gradient of such a parameter is a sum over all of them. A
norm of queries or keys acts on the heads of a rank; its rows are those of all heads. The rows of all ranks are cut
into `BLOCKS` blocks, whatever the number of ranks; heads into as many as divide them and 8. Each block has a gradient
of its own, and the blocks' gradients are summed in the tree of ops/blocks.py, in fp32 for 16 bits, and rounded once. A
rank that has all rows, because there is one or without sequence parallelism, adds the whole tree by itself: the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.blocks import BLOCKS, summed_dtype
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.tree import sum_of_blocks

RunBlock = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """The blocks of rows on one rank.

    group
        The ranks that share the rows; None: this rank has them all.
    dim
        The dimension that ranks share: 0 of [S / R, ..., N], whose rows are all leading dimensions, 1 of
        [B, S / R, N], or -2 of [..., heads / R, N].
    summed_later
        Whether the framework adds the gradients of all ranks: then the first rank returns the sum, the others zeros.
    """

    group: dist.ProcessGroup | None
    dim: int = 0
    summed_later: bool = False

    @property
    def ranks(self) -> int:
        """The ranks that share the rows."""
        return 1 if self.group is None else self.group.size()

    def count(self, x: torch.Tensor) -> int:
        """Return the blocks of x [..., N] on this rank; of heads as many as divide 8 and the heads of all ranks."""
        blocks = gcd(self.rows_of(x) * self.ranks, BLOCKS) if self.dim == -2 else BLOCKS
        return blocks // self.ranks

    def rows_of(self, x: torch.Tensor) -> int:
        """Return the number of this rank's rows, or heads, of x [..., N]."""
        return x.shape[:-1].numel() if self.dim == 0 else x.shape[self.dim]

    def divides(self, x: torch.Tensor) -> bool:
        """Tell whether the rows of x [..., N] are cut; if not, a rank that has all rows computes them in one call.

        Raises `DegreeError` for rows that ranks share, but blocks cannot.
        """
        rows, count = self.rows_of(x), self.count(x)
        if self.group is not None and rows % count:
            raise DegreeError(
                f"{rows * self.ranks} rows of a norm or a bias, which ranks share, are not a multiple of {BLOCKS}"
            )
        return rows > 0 and rows % count == 0

    def cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous blocks of x [..., N]: [m, N] along dimension 0, otherwise with the dimensions of x."""
        rows = x.reshape(-1, x.shape[-1]) if self.dim == 0 else x
        return [block.contiguous() for block in rows.chunk(self.count(x), self.dim)]

    def run(self, x: torch.Tensor, parameters: Mapping[str, torch.Tensor], run_block: RunBlock) -> torch.Tensor:
        """Return ``run_block(x, parameters)`` [..., N], one call for each block of x [..., N]."""
        if not self.divides(x):
            return run_block(x, parameters)
        trained = {name: each for name, each in parameters.items() if each.requires_grad and torch.is_grad_enabled()}
        copies = iter(_Copies.apply(self, self.count(x), *trained.values()) if trained else ())  # type: ignore[no-untyped-call]
        blocks = [run_block(block, {**parameters, **{name: next(copies) for name in trained}}) for block in self.cut(x)]
        return torch.cat(blocks, self.dim).view(x.shape)

    def expand(self, bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the bias [N] of the rows y [..., N], in y's shape."""
        if not self.divides(y):
            return bias
        expanded: torch.Tensor = _Expanded.apply(self, bias, y.shape)  # type: ignore[no-untyped-call]
        return expanded

    def gradient(self, blocks: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of the blocks' gradients, of all ranks; raises `CollectiveError` if a rank fails."""
        total = sum_of_blocks(blocks, self.group)
        if self.summed_later and self.group is not None and self.group.rank():
            total.zero_()
        # A framework that adds zeros turns -0.0 to 0.0; one rank has to do so too.
        return total.add_(0.0).to(dtype)


class _Copies(torch.autograd.Function):
    """Copies of parameters, for each block in turn; the gradients of all are summed in one collective."""

    @staticmethod
    def forward(ctx: Any, blocks: RowBlocks, copies: int, *parameters: torch.Tensor) -> Any:
        ctx.blocks, ctx.of = blocks, [(each.shape, each.dtype) for each in parameters]
        return tuple(each.view_as(each) for _ in range(copies) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        count = len(ctx.of)
        dtype = summed_dtype(gradients[0].dtype)
        packed = [
            torch.cat([each.reshape(-1).to(dtype) for each in gradients[first : first + count]])
            for first in range(0, len(gradients), count)
        ]
        parts = ctx.blocks.gradient(packed, dtype).split([shape.numel() for shape, _ in ctx.of])
        return None, None, *(part.view(shape).to(own) for part, (shape, own) in zip(parts, ctx.of, strict=True))


class _Expanded(torch.autograd.Function):
    """A bias in the shape of the rows that it is added to."""

    @staticmethod
    def forward(ctx: Any, blocks: RowBlocks, bias: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.blocks, ctx.dtype = blocks, bias.dtype
        return bias.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dtype = summed_dtype(dy.dtype)
        sums = [block.flatten(0, -2).sum(0, dtype=dtype) for block in ctx.blocks.cut(dy)]
        return None, ctx.blocks.gradient(sums, ctx.dtype), None
