"""Which kernel runs a problem, in which chunks, and why.

`choose` is a pure function of values that are the same on every rank of a group, so that all ranks
take the same kernel and the same chunks without asking each other. Each fused kernel says by a
predicate what it cannot run; what none of them can goes to the chunked kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from ascend_parallel.ops import chunked, npu, reference, shm
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, Problem
from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows
from ascend_parallel.settings import Settings

# Fused kernels in the order in which they are tried.
FUSED: dict[str, ModuleType] = {"npu": npu, "shm": shm}
KERNELS: dict[str, ModuleType] = {"reference": reference, "chunked": chunked, **FUSED}

# K N of a 16-bit matmul below which cutting its rows was seen to change bits (256), with a margin.
SMALLEST_16_BIT_PRODUCT = 4096

# Chunks taken where a fused kernel was asked for, none exists, and COC_PARALLEL_NUM says nothing.
CHUNKS_INSTEAD_OF_FUSED = 4


@dataclass(frozen=True)
class Choice:
    """How a problem is run, and why.

    sizes are the rows of each chunk; bit_exact tells whether the result is known to have the bits of
    a whole matmul and one collective.
    """

    problem: Problem
    kernel: str
    sizes: Sizes
    bit_exact: bool
    reason: str


@lru_cache(maxsize=4096)
def choose(problem: Problem, settings: Settings) -> Choice:
    """Choose kernel and chunks for `problem`; the same on every rank by construction."""
    if problem.ranks == 1:
        return Choice(problem, "reference", (problem.rows,), True, "one rank: nothing to communicate")
    refusals = {}
    if settings.fused and settings.effective_mode == 2:
        refusals = {name: kernel.supports(problem) for name, kernel in FUSED.items()}
    for name, refusal in refusals.items():
        if refusal is None:
            return Choice(problem, name, (problem.rows,), _bit_exact_fused(problem), "USE_COC_FUSED_KERNEL=1")
    asked, why = _asked_chunks(problem, settings, refusals)
    sizes = split_rows(problem.rows, asked)
    if len(sizes) < asked:
        why += f"; {problem.rows} rows allow {len(sizes)} (multiples of {ROW_TILE} rows)"
    kernel = "chunked" if len(sizes) > 1 else "reference"
    return Choice(problem, kernel, sizes, _bit_exact(problem, len(sizes)), why)


def _asked_chunks(problem: Problem, settings: Settings, refusals: dict[str, str | None]) -> tuple[int, str]:
    if settings.effective_mode == 1:
        return 1, "COC_MODE=1: no chunks"
    own = settings.customized_coc.get((problem.m, problem.k, problem.n))
    if own is not None:
        return own, f"customized_coc: {own} chunks for [{problem.m}, {problem.k}, {problem.n}]"
    chunks = usual_chunks(settings)
    if not refusals:
        return chunks, f"COC_PARALLEL_NUM={chunks}"
    refused = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    return chunks, f"USE_COC_FUSED_KERNEL=1, but {refused}: {chunks} chunks instead"


def usual_chunks(settings: Settings) -> int:
    """Return the chunks asked for where no shape has its own count."""
    if settings.effective_mode == 1:
        return 1
    return CHUNKS_INSTEAD_OF_FUSED if settings.fused and settings.num_chunks == 1 else settings.num_chunks


def _bit_exact(problem: Problem, chunks: int) -> bool:
    """Whether the bits are those of one matmul and one collective; shown on CPU with gloo only.

    Sums of two ranks have one order. With more, an all-reduce's order depends on the place in the
    buffer, and our reduce-scatter for gloo sums in rank order, which gloo's does not.
    """
    same_sums = problem.ranks <= 2 or problem.operator == ALL_GATHER
    # In 16 bits torch takes another routine for the smallest products, which a chunk may be and the whole not.
    same_routine = problem.dtype.itemsize > 2 or problem.k * problem.n >= SMALLEST_16_BIT_PRODUCT
    if chunks == 1:
        return same_sums or problem.operator == ALL_REDUCE or problem.device != "cpu"
    aligned = problem.operator == ALL_REDUCE or problem.rows % ROW_TILE == 0
    return problem.device == "cpu" and same_sums and aligned and same_routine


def _bit_exact_fused(problem: Problem) -> bool:
    """The same of a fused kernel: shm sums in rank order, which is one order for two ranks."""
    aligned = problem.operator == ALL_REDUCE or problem.rows % ROW_TILE == 0
    return problem.device == "cpu" and aligned and (problem.ranks == 2 or problem.operator == ALL_GATHER)
