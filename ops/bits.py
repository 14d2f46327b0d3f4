"""Probe whether a chunked matmul has the same bits as the whole matmul, once for each shape.

A library picks its routine by the number of rows (MKL takes another for 128 rows or fewer at K of 1024 and more),
and documents no rule. Before the first chunked call of a shape, every rank therefore multiplies operands of that
shape, whole and in the kernel's chunks, and compares the results; the operands show in which order a routine adds.
The ranks exchange their results and take the same chunks: the requested chunks if these keep the bits on every rank,
else the largest number of chunks that does.

The probe is invisible to the run: no autograd, no dispatch mode, no draw from the run's random generators.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.multiply import aligned, cut_blocks, multiply_blocks, rank_blocks
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.probing import ANY, ROW_MAJOR, TRANSPOSED, cancelling_operands, without_grad_and_modes
from ascend_parallel.ops.problem import ALL_GATHER, Problem
from ascend_parallel.ops.registry import Choice, cut_into, name_of
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.consistency import exchange

log = logging.getLogger("ascend_parallel")

_PROBED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Choice, str], Choice]] = WeakKeyDictionary()


def keep_bits(choice: Choice, group: dist.ProcessGroup, device: torch.device, layout: str = ANY) -> Choice:
    """Return the choice with chunks that keep the bits of the whole matmul on every rank of `group`.

    All ranks call this. A choice whose `bit_exact` is known is returned unchanged. Sizes that a user or a plan gave
    never change. If no chunks keep the bits, the requested chunks stay, `bit_exact` is False and the reason says so.
    """
    if choice.bit_exact is not None:
        return choice
    probed = _PROBED.setdefault(group, {})
    if (choice, layout) not in probed:
        probed[choice, layout] = _probe(choice, group, device, layout)
    return probed[choice, layout]


def _probe(choice: Choice, group: dist.ProcessGroup, device: torch.device, layout: str) -> Choice:
    start = time.perf_counter()
    if not backend_of(group, device).blocks_host:
        _finish_collectives(choice, group, device)
    candidates = _candidates(choice)
    index = _first_exact_everywhere(choice, candidates, group, device, layout)
    if dist.get_rank() == 0:
        took = 1e3 * (time.perf_counter() - start)
        log.info("%s: asked in %.0f ms which chunks keep the bits", name_of(choice.problem), took)
    if index == len(candidates):
        what = "these chunks change" if len(candidates) == 1 else "every cut changes"
        return replace(choice, bit_exact=False, reason=f"{choice.reason}; {what} the matmul's bits on this machine")
    sizes, why = candidates[index], choice.reason
    if index:
        why += f"; {len(sizes)} chunks, because smaller ones change the matmul's bits on this machine"
    return replace(choice, sizes=sizes, bit_exact=True, reason=why)


def _finish_collectives(choice: Choice, group: dist.ProcessGroup, device: torch.device) -> None:
    """Return once no rank of `group` has work on its device; raise `CollectiveError` while a graph is captured.

    A collective in flight keeps compute units until all its ranks have some. Ranks that share a card could then wait
    for each other: one in its probe, the other in a collective for which the probing rank has no unit left.
    """
    what = f"the probe of which chunks keep the bits of {name_of(choice.problem)}"
    exchange(group, what, {}, CollectiveError, topic="capture")  # raises before the device is waited for
    if torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
    exchange(group, what, {}, CollectiveError, topic="idle")


def _candidates(choice: Choice) -> list[Sizes]:
    """Return the requested chunks and, unless their sizes were given, the cuts into fewer chunks."""
    fewer = [] if choice.given else range(len(choice.sizes) - 1, 1, -1)
    return list(dict.fromkeys([choice.sizes, *(cut_into(choice.problem, count, choice.step) for count in fewer)]))


def _first_exact_everywhere(
    choice: Choice, candidates: Sequence[Sizes], group: dist.ProcessGroup, device: torch.device, layout: str
) -> int:
    """Return the index of the first of `candidates` that keeps the bits on every rank, or ``len(candidates)``."""
    first = 0
    while True:
        untried = range(first, len(candidates))
        mine = next((i for i in untried if _is_exact(choice, candidates[i], group, device, layout)), len(candidates))
        what = f"the probe of which chunks keep the bits of {name_of(choice.problem)}"
        firsts = [int(value["first"]) for value in exchange(group, what, {"first": mine}, CollectiveError).values()]
        first = max(firsts)
        if first == len(candidates) or min(firsts) == first:
            return first


def _is_exact(choice: Choice, sizes: Sizes, group: dist.ProcessGroup, device: torch.device, layout: str) -> bool:
    batched = backend_of(group, device).launches
    cut = CutMatmul(choice.problem, choice.kernel, sizes, group.rank(), batched)
    layouts = (layout,) if layout else (TRANSPOSED, ROW_MAJOR)
    return all(same_bits(cut, layout, device, torch.get_num_threads()) for layout in layouts)


@dataclass(frozen=True)
class CutMatmul:
    """The chunks in which a kernel multiplies a problem on one rank of its group; `batched` as in `rank_blocks`."""

    problem: Problem
    kernel: str
    sizes: Sizes
    rank: int
    batched: bool


@lru_cache(maxsize=4096)
def same_bits(cut: CutMatmul, layout: str, device: torch.device, threads: int) -> bool:
    """Tell whether the chunked and the whole matmul have the same bits on this machine, with `threads` threads."""
    try:
        with without_grad_and_modes():
            x, w = cancelling_operands(cut.problem, layout, device)
            whole = torch.mm(x, w)
            if not cut.batched:
                return all(torch.equal(product, expected) for product, expected in _products(cut, x, w, whole))
            # On a device the host reads one answer, not one for each product.
            return bool(torch.stack([(one == other).all() for one, other in _products(cut, x, w, whole)]).all())
    except torch.OutOfMemoryError:
        return False


def _products(
    cut: CutMatmul, x: torch.Tensor, w: torch.Tensor, whole: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Multiply every chunk as the kernel does; yield each product with the same rows of `whole`."""
    problem, sizes = cut.problem, cut.sizes
    ranks = problem.m // problem.rows
    x_r_m, whole_r_m = x.view(ranks, problem.rows, problem.k), whole.view(ranks, problem.rows, problem.n)
    own = cut.rank if cut.kernel == "chunked" and problem.operator == ALL_GATHER else None
    if own is not None:  # the kernel multiplies this rank's own rows in one call, where they wait for no collective
        yield torch.mm(aligned(x_r_m[own]), w), whole_r_m[own]
        # In chunks, where they are unfinished themselves.
        yield from _chunks([x_r_m[own]], [whole_r_m[own]], w, sizes)
    x_blocks, expected = (rank_blocks(each, cut.batched, but=own) for each in (x_r_m, whole_r_m))
    yield from _chunks(x_blocks, expected, w, sizes)


def _chunks(
    x_blocks: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], w: torch.Tensor, sizes: Sizes
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for x_c, blocks in zip(cut_blocks(x_blocks, sizes), cut_blocks(expected, sizes), strict=True):
        products = [torch.empty_like(block, memory_format=torch.contiguous_format) for block in blocks]
        multiply_blocks(x_c, w, products)
        yield from zip(products, blocks, strict=True)
