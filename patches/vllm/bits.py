"""From how many rows on a model's own matmuls give a row the same bits: asked once, when a worker has its model.

A library picks its routine by the number of rows, and documents no rule. A chunk therefore has at least so many rows
that every matmul of the model gives each of them what it gives it in a larger batch. Where there is no such number, as
for many matmuls on GPUs, chunks change bits as another batch of requests does, and the log says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.without_modes import without_grad_and_modes
from ascend_parallel.process_groups.consistency import store_all_gather

Multiply = Callable[[torch.Tensor], torch.Tensor]

# Rows beyond which a batch is taken to have the bits of this many.
MOST_ROWS = 8192


@dataclass(frozen=True)
class LayerMatmul:
    """What decides about the bits of a layer's matmul on one rank, of x [M, K] to [M, N].

    method: the class of its linear method, or of the scheme that multiplies there.
    """

    k: int
    n: int
    dtype: torch.dtype
    bias: bool
    method: str

    def __str__(self) -> str:
        """Return its shape and dtype in words, and what else tells it from another."""
        text = f"{self.k} x {self.n} in {str(self.dtype).removeprefix('torch.')}"
        text += " with a bias" if self.bias else ""
        return text if self.method.endswith("UnquantizedLinearMethod") else f"{text} ({self.method})"


@dataclass(frozen=True)
class RowBits:
    """The least rows of a chunk, and what the ranks found.

    least
        The least rows of a chunk: with so many all matmuls but `others` keep their bits.
    asked, others
        The number of matmuls, and those whose bits depend on the rows of a step, in words.
    seconds
        What the probe took on this rank.
    """

    least: int
    asked: int
    others: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Return the answer in a sentence."""
        kept = self.asked - len(self.others)
        text = f"asked in {self.seconds:.1f} s: {kept} of {self.asked} matmuls keep their bits in chunks of "
        text += f"{self.least} rows or more"
        if self.others:
            text += f"; the bits of {', '.join(self.others)} depend on the rows of a step, chunks or not"
        return text


def ask(
    matmuls: Mapping[LayerMatmul, Multiply],
    ladder: Sizes,
    most_tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> RowBits:
    """Return from which step of the ladder on the matmuls keep their bits on every rank of `group`, which all call it.

    most_tokens: the largest number of tokens of a step. Raises `CollectiveError` with the ranks that do not come.
    """
    start = time.perf_counter()
    most = min(most_tokens, MOST_ROWS)
    own = {str(matmul): least_rows(matmul, multiply, ladder, most, device) for matmul, multiply in matmuls.items()}
    took = time.perf_counter() - start
    by_rank = store_all_gather(group, "the probe of which chunks keep the bits of vLLM's matmuls", own, CollectiveError)
    steps = {matmul: [found[matmul] for found in by_rank.values()] for matmul in own}
    some = None in itertools.chain(*steps.values())  # then larger chunks would not keep the bits of a step either
    least = ladder[0] if some else max([ladder[0], *itertools.chain(*steps.values())])
    others = tuple(matmul for matmul in own if any(step is None or step > least for step in steps[matmul]))
    return RowBits(least, len(own), others, took)


def least_rows(matmul: LayerMatmul, multiply: Multiply, ladder: Sizes, most: int, device: torch.device) -> int | None:
    """Return the first step of the ladder from which on a row has the same bits among any rows; None: from none on."""
    with without_grad_and_modes(True):
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(most, matmul.k, generator=generator, device=device).to(matmul.dtype)
        every = multiply(x)
        differing = [rows for rows in probed_rows(ladder, most) if not torch.equal(multiply(x[-rows:]), every[-rows:])]
    steps = [step for step in ladder if 2 * step <= most] or ladder[:1]
    return next((step for step in steps if all(rows < step for rows in differing)), None)


def probed_rows(ladder: Sizes, most: int) -> Iterable[int]:
    """Return the numbers of rows that are multiplied: each step, and an odd number above it, as of a last chunk."""
    return [rows for step in ladder for rows in (step, 3 * step // 2 + 1) if rows < most]
