"""Whether a cut matmul has the bits of the whole one: asked of the machine, once for each shape, never assumed.

A library takes another routine for other numbers of rows (MKL for 128 rows or fewer at K of 1024 and more), and
which, nobody promises. So the first time that a call would be cut, every rank multiplies random operands of its
shape, whole and as the kernel cuts them, and compares. The ranks tell each other what they found and all take the same
chunks: those that were asked for if they keep the bits everywhere, else the largest number of larger ones that do.

The probe runs outside of everything that may watch the call: autograd, dispatch modes, the run's random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ascend_parallel.consistency import exchange
from ascend_parallel.ops.multiply import aligned, cut_blocks, multiply_blocks, rank_blocks
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.problem import ALL_GATHER, Problem
from ascend_parallel.ops.registry import Choice, name_of
from ascend_parallel.ops.rows import Sizes, split_rows

# How the right operand [K, N] lies in memory: a weight [N, K] transposed, as a forward has it; a weight as it is, as a
# backward has it. A layer says which, from what it computes, so that all ranks say the same; empty: any may come.
TRANSPOSED, ROW_MAJOR, ANY = "transposed", "row_major", ""

# Different rows of the random operands; larger ones repeat them.
DRAWN_ROWS = 509

_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Choice, str], Choice]] = WeakKeyDictionary()


def keep_bits(choice: Choice, group: dist.ProcessGroup, device: torch.device, layout: str = ANY) -> Choice:
    """Return the choice with chunks that keep the bits of the whole matmul, as all ranks of `group` found together.

    A choice of which it is known already comes back as it is. Sizes that a user or a plan gave are never
    changed. Where nothing keeps the bits, the chunks are those asked for, `bit_exact` is False and the reason says so.
    """
    if choice.bit_exact is not None:
        return choice
    kept = _KEPT.setdefault(group, {})
    if (choice, layout) not in kept:
        kept[choice, layout] = _ask(choice, group, device, layout)
    return kept[choice, layout]


def _ask(choice: Choice, group: dist.ProcessGroup, device: torch.device, layout: str) -> Choice:
    if device.type != "cpu" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return replace(choice, bit_exact=False, reason=f"{choice.reason}; bits not asked for while a graph is captured")
    candidates = _candidates(choice)
    index = agreed(choice, candidates, group, device, layout)
    if index == len(candidates):
        return replace(choice, bit_exact=False, reason=f"{choice.reason}; {_without(candidates)} on this machine")
    sizes, why = candidates[index], choice.reason
    if index:
        why += f"; {len(sizes)} chunks, because smaller ones change the matmul's bits on this machine"
    return replace(choice, sizes=sizes, bit_exact=True, reason=why)


def _without(candidates: Sequence[Sizes]) -> str:
    if len(candidates) == 1:
        return "these chunks change the matmul's bits"
    return "every cut changes the matmul's bits"


def _candidates(choice: Choice) -> list[Sizes]:
    """Return the chunks that were asked for and, unless somebody gave their sizes, all cuts into fewer."""
    fewer = [] if choice.given else range(len(choice.sizes) - 1, 1, -1)
    return list(dict.fromkeys([choice.sizes, *(split_rows(choice.problem.cut, count) for count in fewer)]))


def agreed(
    choice: Choice, candidates: Sequence[Sizes], group: dist.ProcessGroup, device: torch.device, layout: str
) -> int:
    """Return the place of the first of `candidates` that keeps the bits on every rank's machine, or their number."""
    first = 0
    while True:
        places = range(first, len(candidates))
        mine = next((i for i in places if _keeps(choice, candidates[i], group, device, layout)), len(candidates))
        what = f"the question which chunks keep the bits of {name_of(choice.problem)}"
        told = [int(value["first"]) for value in exchange(group, what, {"first": mine}, CollectiveError).values()]
        first = max(told)
        if first == len(candidates) or min(told) == first:
            return first


def _keeps(choice: Choice, sizes: Sizes, group: dist.ProcessGroup, device: torch.device, layout: str) -> bool:
    cut = Cut(choice.problem, choice.kernel, sizes, group.rank())
    layouts = (layout,) if layout else (TRANSPOSED, ROW_MAJOR)
    return all(keeps(cut, one, device, torch.get_num_threads()) for one in layouts)


@dataclass(frozen=True)
class Cut:
    """A problem as a kernel cuts it on one rank of its group."""

    problem: Problem
    kernel: str
    sizes: Sizes
    rank: int


@lru_cache(maxsize=4096)
def keeps(cut: Cut, layout: str, device: torch.device, threads: int) -> bool:
    """Tell whether this machine gives the cut matmul the bits of the whole one; `threads` is part of the question."""
    try:
        with unwatched():
            x, w = _operands(cut.problem, layout, device)
            whole = torch.mm(x, w)
            return all(torch.equal(found, part) for found, part in _products(cut, x, w, whole))
    except torch.OutOfMemoryError:
        return False


def _operands(problem: Problem, layout: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        base = torch.randn(min(rows, DRAWN_ROWS), columns, generator=generator, device="cpu")
        repeated = base.to(device=device, dtype=problem.dtype).repeat(-(-rows // max(1, base.shape[0])), 1)
        return repeated[:rows].contiguous()

    m, k, n = problem.m, problem.k, problem.n
    return drawn(m, k), drawn(n, k).t() if layout == TRANSPOSED else drawn(k, n)


def _products(
    cut: Cut, x: torch.Tensor, w: torch.Tensor, whole: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Multiply a chunk of each length as the kernel does; give what came out and the same rows of the whole."""
    problem, sizes = cut.problem, cut.sizes
    ranks = problem.m // problem.rows
    x_r_m, whole_r_m = x.view(ranks, problem.rows, problem.k), whole.view(ranks, problem.rows, problem.n)
    own = cut.rank if cut.kernel == "chunked" and problem.operator == ALL_GATHER else None
    if own is not None:  # its rows wait for nothing, so they are multiplied at once
        yield torch.mm(aligned(x_r_m[own]), w), whole_r_m[own]
    inputs = cut_blocks(rank_blocks(x_r_m, but=own), sizes)
    expected = cut_blocks(rank_blocks(whole_r_m, but=own), sizes)
    for index, (x_blocks, blocks) in enumerate(zip(inputs, expected, strict=True)):
        if sizes[index] in sizes[:index]:
            continue
        found = [torch.empty_like(block, memory_format=torch.contiguous_format) for block in blocks]
        multiply_blocks(x_blocks, w, found)
        yield from zip(found, blocks, strict=True)


@contextmanager
def unwatched() -> Iterator[None]:
    """Run what is no part of the call: unseen by autograd, by dispatch and function modes, and by autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if (accelerator := torch.accelerator.current_accelerator()) is not None:
            stack.enter_context(torch.autocast(accelerator.type, enabled=False))
        yield
