"""Choose the kernel and the chunks of a problem, with the reason; explain why the other kernels were not chosen.

`choose` is a pure function of values that are the same on every rank of a group, so all ranks take the
same kernel and chunks without communication. Each kernel's `supports` returns the reason why it cannot run
a problem; `choose` takes the first of `KERNELS` that the settings request and that can run the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

from ascend_parallel.ops import chunked, npu, npu_limits, ordered, reference, shm, tree
from ascend_parallel.ops.arithmetic import DegreeError
from ascend_parallel.ops.device_units import fills
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, EXPERT_EXCHANGE, KEY_GATHER, PART_NAMES, Problem
from ascend_parallel.ops.rows import (
    DEVICE_TILE,
    ROW_TILE,
    Sizes,
    even_rows,
    is_one_gather,
    one_gather,
    snap,
    split_rows,
    uneven_rows,
)
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.process_groups.backend import usual_backend

# In the order of preference. Fused kernels run only on request, "chunked" with two chunks or more, "ordered" if the
# others do not sum in rank order, "tree" if the bits must be the same at every degree.
KERNELS: dict[str, ModuleType] = {
    "npu": npu,
    "shm": shm,
    "chunked": chunked,
    "reference": reference,
    "ordered": ordered,
    "tree": tree,
}
FUSED = ("npu", "shm")

# Number of chunks if a fused kernel was requested, none can run, and COC_PARALLEL_NUM is 1.
CHUNKS_INSTEAD_OF_FUSED = 4

# A narrow collective has as many features as an adapter's rank (LoRA's is 4 to 256), fewer than a model is wide, and at
# most one part in so many of the features on the matmul's other side.
NARROW = 256
NARROW_SHARE = 4


class UnmetRequestError(RuntimeError):
    """COC_STRICT=1, and a call cannot meet a request of the settings; raised on every rank."""


@dataclass(frozen=True)
class Choice:
    """Kernel and chunks of a problem, with the reason.

    sizes
        Rows of each chunk; columns for an int8 weight; the parts of each group for an exchange.
    bit_exact
        Whether the result has the bits of the plain layer (a whole matmul and a single collective); None if the first
        call has to probe the machines (ops/bits.py).
    unmet
        Why the user's request is not met; empty if it is.
    given
        Whether the user or a plan gave the sizes; given sizes never change.
    options
        Keyword arguments for the kernel.
    step
        Sizes that are not given are multiples of it, but for the last.
    """

    problem: Problem
    kernel: str
    sizes: Sizes
    bit_exact: bool | None
    reason: str
    unmet: str = ""
    given: bool = False
    options: tuple[tuple[str, object], ...] = ()
    step: int = ROW_TILE


def choose(problem: Problem, settings: OperatorSettings) -> Choice:
    """Return kernel and chunks for `problem`; the same on every rank.

    Raises `UnmetRequestError` if the settings are strict and the problem cannot meet their request, `DegreeError` if
    they ask for the same bits at every degree and the problem cannot have them.
    """
    return _cached_choice(problem, settings.for_operators)


@lru_cache(maxsize=4096)
def _cached_choice(problem: Problem, settings: OperatorSettings) -> Choice:
    problem = replace(
        problem,
        deterministic=settings.deterministic,
        comm_mode=settings.comm_mode,
        fused_ranks=settings.fused_ranks,
    )
    choice = _choose(problem, settings)
    if settings.strict and choice.unmet:
        raise UnmetRequestError(f"COC_STRICT=1: {name_of(problem)}: {choice.unmet}")
    return choice


def name_of(problem: Problem) -> str:
    """Return a problem in words: operator, matmul, dtype, ranks and device."""
    dtype = str(problem.dtype).removeprefix("torch.")
    weight = f" and int8 weight per {problem.antiquant}" if problem.antiquant else ""
    weight = " of int8 by int8" if problem.int8_input else weight
    weight += " with communication in int8" if problem.comm_quant else ""
    where = f"on {problem.ranks} {problem.device} ranks"
    if problem.operator == EXPERT_EXCHANGE:
        return f"{problem.operator} of {problem.m} experts a rank, rows of {problem.k} {dtype} {where}"
    if problem.is_exchange:
        sent = f"{problem.k} tokens of {problem.n} features"
        heads = "heads of keys" if problem.operator == KEY_GATHER else "heads of keys a rank"
        return f"{problem.operator} of {problem.m} {heads}, {sent} {dtype} {where}"
    shape = [problem.m, problem.k, problem.n]
    return f"{problem.operator} {shape} {dtype}{weight} {where}"


def usual_chunks(settings: OperatorSettings) -> int:
    """Return the number of chunks for shapes without a count of their own."""
    if not settings.cuts:
        return 1
    return CHUNKS_INSTEAD_OF_FUSED if settings.fused and settings.num_chunks == 1 else settings.num_chunks


def too_narrow(communicated: int, other: int) -> bool:
    """Tell whether a collective of rows of `communicated` features gains nothing from chunks beside its matmul.

    other: the features on the matmul's other side. Such are the collectives of a low-rank adapter: they move little and
    have little to run under, so further ones cost their latency. A pure function of the shape: all ranks decide alike.
    """
    return communicated <= NARROW and communicated * NARROW_SHARE < other


def _choose(problem: Problem, settings: OperatorSettings) -> Choice:
    exchange, arithmetic = problem.is_exchange, problem.arithmetic
    tile = 0 if exchange else arithmetic.row_tile(problem.m)
    if problem.ranks == 1 and (exchange or not arithmetic.forms_every_product):
        options = _options("reference", problem, settings, tile)
        return Choice(
            problem, "reference", (problem.cut,), not tile, "one rank: nothing to communicate", "", False, options
        )
    refusals = {}
    if settings.fused and settings.cuts:
        refusals = {name: _refusal(name, problem) for name in FUSED}
    for name, refusal in refusals.items():
        if refusal is None:
            sizes = shm.pieces(problem) if name == "shm" else (problem.cut,)
            exact, options = _bit_exact(problem, name, len(sizes)), _options(name, problem, settings, tile)
            return Choice(problem, name, sizes, exact, "USE_COC_FUSED_KERNEL=1", "", True, options)
    step = 1 if exchange else tile or (ROW_TILE if problem.antiquant else settings.chunk_rows)
    request = _given_sizes(problem, settings) or _count_request(problem, settings, refusals, step)
    sizes, why = request.sizes, request.why
    if problem.comm_quant:
        sizes, why = (problem.cut,), f"{why}; 1, because communication in int8 is not cut"
    elif tile and problem.antiquant:
        sizes, why = (problem.cut,), f"{why}; 1, because {arithmetic.asked} and chunks of columns could change bits"
    elif tile and request.given and (sizes := snap(request.sizes, tile)) != request.sizes:
        why = f"{why}; cut at multiples of {tile} rows, because {arithmetic.asked}"
    unmet = why if not request.met or (request.chunks > 1 and len(sizes) == 1) else ""
    plain = "chunked" if len(sizes) > 1 else "reference"
    if plain == "chunked" and not (request.given or tile) and _runs_in_one_gather(problem):
        sizes = one_gather(problem.cut)
        why = f"{why}; one gather, under the product of a rank's own rows: half of all"
    if is_one_gather(sizes):
        sizes = (problem.cut,)
    refusal = _refusal(plain, problem)
    if refusal is not None:
        why = f"{why}; {arithmetic.asked}, and {plain}: {refusal}"
    kernel = plain if refusal is None else arithmetic.kernel
    if kernel == "tree" and (refusal := _refusal(kernel, problem)) is not None:
        raise DegreeError(f"{name_of(problem)}: {refusal}")
    exact = _bit_exact(problem, kernel, len(sizes))
    options = _options(kernel, problem, settings, tile)
    return Choice(problem, kernel, sizes, exact, why, unmet, request.given, options, step)


def own_rows_suffice(ranks: int, device: str) -> bool:
    """Tell whether all-gathers run whole, under the matmul of the rank's own rows.

    Of 2 ranks these are half of the matmul, in one launch and one collective. Each further one cost a device's host
    more than it hid in most measurements (benchmarks/README.md, two halves of one GPU). With more ranks the own rows
    are fewer.
    """
    return ranks == 2 and usual_backend(device).launches


def _runs_in_one_gather(problem: Problem) -> bool:
    return problem.operator == ALL_GATHER and own_rows_suffice(problem.ranks, problem.device)


def _refusal(name: str, problem: Problem) -> str | None:
    """Return why a kernel cannot run `problem`, or None if it can.

    "reference" is the only kernel of this package with communication in int8. Its sums are exact in any order.
    """
    if problem.is_exchange:
        return None if name in ("chunked", "reference") else f"it runs no {PART_NAMES[problem.operator][0]}"
    if problem.comm_quant and name != "npu":
        return None if name == "reference" else "it has no communication in int8"
    refusal: str | None = KERNELS[name].supports(problem)
    return refusal


@dataclass(frozen=True)
class _Request:
    """The requested number of chunks, their sizes, the reason, and whether they meet the settings.

    given: whether the sizes themselves were requested.
    """

    chunks: int
    sizes: Sizes
    why: str
    met: bool = True
    given: bool = False


def _given_sizes(problem: Problem, settings: OperatorSettings) -> _Request | None:
    """Return the sizes for this problem from customized_coc or the plan, or None."""
    shape = (problem.m, problem.k, problem.n)
    own = settings.customized_coc.get(shape)
    if not settings.cuts or isinstance(own, int):
        return None
    if own is not None:
        if sum(own) != problem.cut:
            raise ValueError(
                f"customized_coc for {list(shape)} has chunks of {sum(own)} rows together, and {name_of(problem)} "
                f"cuts {problem.cut}"
            )
        return _Request(len(own), own, f"customized_coc: {list(own)} rows for {list(shape)}", given=True)
    planned = settings.plan.find(problem) if settings.plan and not problem.antiquant else None
    return None if planned is None else _Request(len(planned[0]), *planned, given=True)


def _count_request(
    problem: Problem, settings: OperatorSettings, refusals: dict[str, str | None], tile: int
) -> _Request:
    """Return the sizes for the number of chunks in the settings, or for fewer if there are too few rows."""
    chunks, why, met = _count(problem, settings, refusals)
    if chunks > 1 and _is_narrow(problem) and not _names(problem, settings):
        communicated = problem.k if problem.operator == ALL_GATHER else problem.n
        why += f"; 1, because a collective of {communicated} features is too narrow to gain (customized_coc cuts it)"
        return _Request(1, (problem.cut,), why, met)
    full = chunks if _names(problem, settings) else most_that_fill(problem, chunks, tile)
    sizes = cut_into(problem, full, tile)
    if full < chunks:
        why += f"; {full}, because the matmuls of smaller chunks do not fill the device (customized_coc cuts them)"
    elif len(sizes) < chunks:
        unit = "columns" if problem.antiquant else "rows"
        because = f", because {problem.arithmetic.asked}" if problem.deterministic else ""
        if problem.is_exchange:
            parts = "heads of keys" if problem.operator == KEY_GATHER else f"{PART_NAMES[problem.operator][1]}s a rank"
            why += f"; {problem.cut} {parts} allow {len(sizes)} groups"
        else:
            why += f"; {problem.cut} {unit} allow {len(sizes)} (multiples of {tile} {unit}{because})"
    return _Request(chunks, sizes, why, met)


def _is_narrow(problem: Problem) -> bool:
    if problem.is_exchange:
        return False
    features = (problem.k, problem.n) if problem.operator == ALL_GATHER else (problem.n, problem.k)
    return too_narrow(*features)


def _names(problem: Problem, settings: OperatorSettings) -> bool:
    """Tell whether customized_coc gives this problem a number of chunks."""
    return isinstance(settings.customized_coc.get((problem.m, problem.k, problem.n)), int)


def cut_into(problem: Problem, chunks: int, tile: int) -> Sizes:
    """Return the sizes of so many chunks of a problem, or of fewer if there are too few rows."""
    even = problem.operator != EXPERT_EXCHANGE and not problem.antiquant and usual_backend(problem.device).launches
    return even_rows(problem.cut, chunks, tile) if even else split_rows(problem.cut, chunks, tile)


def row_step(problem: Problem) -> int:
    """Return the rows of which cuts that nobody gave are multiples, where there are enough rows."""
    return DEVICE_TILE if usual_backend(problem.device).launches else ROW_TILE


def most_that_fill(problem: Problem, chunks: int, tile: int) -> int:
    """Return the largest number of chunks, at most `chunks`, whose matmuls leave no unit of the device without work."""
    return next((count for count in range(chunks, 1, -1) if fills(problem, cut_into(problem, count, tile))), 1)


def cuts_to_time(problem: Problem, counts: Sequence[int]) -> list[Sizes]:
    """Return cuts that are worth a measurement, for these numbers of chunks: the usual ones of the problem's device.

    On a device also those with a short first gather or a short last reduction, and a gather that is not cut.
    """
    usual = [cut_into(problem, count, ROW_TILE) for count in counts]
    if not usual_backend(problem.device).launches:
        return usual
    gathers = problem.operator == ALL_GATHER
    usual += [uneven_rows(problem.cut, count, short_first=gathers) for count in counts]
    return [*([one_gather(problem.cut)] if gathers else []), *(sizes for sizes in usual if fills(problem, sizes))]


def _count(problem: Problem, settings: OperatorSettings, refusals: dict[str, str | None]) -> tuple[int, str, bool]:
    if not settings.cuts:
        return 1, f"COC_MODE={settings.mode}: no chunks", True
    own = settings.customized_coc.get((problem.m, problem.k, problem.n))
    met = not refusals
    if isinstance(own, int):
        return own, f"customized_coc: {own} chunks for [{problem.m}, {problem.k}, {problem.n}]", met
    chunks = usual_chunks(settings)
    if refusals:
        refused = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        return chunks, f"USE_COC_FUSED_KERNEL=1, but {refused}: {chunks} chunks instead", met
    if settings.plan is not None:
        why = f"the plan (COC_PLAN, or measured so far) has no entry for this call: COC_PARALLEL_NUM={chunks}"
        return chunks, why, False
    if settings.auto or settings.tune:
        return chunks, "one chunk, until a layer's first call is measured (COC_TUNE, COC_PARALLEL_NUM=auto)", True
    return chunks, f"COC_PARALLEL_NUM={chunks}", True


def _options(name: str, problem: Problem, settings: OperatorSettings, tile: int) -> tuple[tuple[str, object], ...]:
    """Return a kernel's keyword arguments; `tile` is the row tile of the deterministic mode, or 0."""
    if name == "npu":
        mode = npu_limits.engine(problem)
        return () if mode is None else (("comm_mode", mode),)
    tiled: tuple[tuple[str, object], ...] = (("row_tile", tile),) if tile else ()
    if name == "tree":
        return (*tiled, ("features", tree.features_of(problem)))
    return (("time_limit", float(settings.time_limit)), *tiled) if name == "shm" else tiled


def _bit_exact(problem: Problem, kernel: str, chunks: int) -> bool | None:
    """Return whether the bits are those of the plain layer; None if the machines have to be probed.

    Sums of two ranks have only one order. With more ranks, the order of an all-reduce depends on the position in the
    buffer, and this package's reduce-scatter for gloo sums in rank order, which gloo's does not. Different matmuls,
    with bits of their own: tiles of the deterministic mode, fused operators of torch_npu, operands padded on NPUs,
    chunks of an int8 weight's columns. Communication in int8 rounds the sums.
    """
    if problem.is_exchange:  # each part gets the same rows in the same order, in any number of groups
        return True
    if problem.deterministic or problem.comm_quant or kernel == "npu":
        return False
    same_sums = problem.ranks <= 2 or problem.operator == ALL_GATHER
    if kernel == "reference":
        return same_sums or problem.operator == ALL_REDUCE or usual_backend(problem.device).own_scatter
    if not same_sums or problem.antiquant or problem.device == "npu":
        return False
    gathers = problem.operator == ALL_GATHER
    whole = kernel == "shm" and (shm.gathers_before_matmul(problem.rows) if gathers else chunks == 1)
    return True if whole else None


@dataclass(frozen=True)
class Explanation:
    """A choice, and for each kernel "taken" or the reason against it. ``str(explanation)`` is the text for people.

    region: how the matmul runs inside a region, if the settings ask for regions.
    """

    choice: Choice
    kernels: dict[str, str]
    strict: bool
    region: str = ""

    def __str__(self) -> str:
        """Return the choice and the reasons in a few lines."""
        choice = self.choice
        lines = [
            f"{name_of(choice.problem)}: {choice.kernel}, chunks: {len(choice.sizes)}",
            f"  because {choice.reason}",
        ]
        if choice.unmet and self.strict:
            lines.append("  COC_STRICT=1 makes this an error")
        lines += [f"  {name:<10}{why}" for name, why in self.kernels.items()]
        if self.region:
            lines.append(f"  {self.region}")
        return "\n".join(lines)


def explain(problem: Problem, settings: OperatorSettings) -> Explanation:
    """Return the choice for `problem` and the reason for or against each kernel; run nothing, ignore strictness."""
    choice = choose(problem, replace(settings, strict=False))
    kernels = {name: _reason(name, choice, settings) for name in KERNELS}
    return Explanation(choice, kernels, settings.strict)


def _reason(name: str, choice: Choice, settings: OperatorSettings) -> str:
    if name == choice.kernel:
        return "taken"
    refusal = _refusal(name, choice.problem)
    if refusal is not None:
        return f"cannot: {refusal}"
    if name in FUSED:
        requested = settings.fused and settings.cuts
        return "can, but another fused kernel was tried first" if requested else "can, with USE_COC_FUSED_KERNEL=1"
    if name == "ordered":
        return "can, with COC_DETERMINISTIC=1 where nothing else sums in rank order"
    if name == "tree":
        return "can, with COC_DETERMINISTIC=tp"
    return f"can, with {'two or more chunks' if name == 'chunked' else 'one chunk'}"
