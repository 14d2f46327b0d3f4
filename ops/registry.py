"""Choose the kernel and the chunks of a call, with the reason; explain why the other kernels were not chosen.

`choose` is a pure function of values that are the same on every rank of a group, so all ranks take the
same kernel and chunks without communication. Each kernel's `supports` returns the reason why it cannot run
a matmul; `choose` takes the first of `KERNELS` that the settings request and that can run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from ascend_parallel.ops import chunked, npu, npu_limits, ordered, reference, shm, tree
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, EXPERT_EXCHANGE, Call, Exchange, ExchangedMatmul, Matmul
from ascend_parallel.ops.decision import NOTHING, Decision, Known, Reason, SizesOf, because
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.device_units import fills
from ascend_parallel.ops.multiply import alignment_of
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
from ascend_parallel.ops.shape_table import Cut
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


def choose(call: Call, settings: OperatorSettings, known: Known | None = None) -> Decision:
    """Return kernel and chunks, or groups of parts, of `call`; the same on every rank.

    known: what decides beside the settings; None: their plan alone.

    Raises `UnmetRequestError` if the settings are strict and the call cannot meet their request, `DegreeError` if
    they ask for the same bits at every degree and the call cannot have them.
    """
    decision = would_choose(call, settings, known)
    if settings.strict and decision.unmet:
        raise UnmetRequestError(f"COC_STRICT=1: {decision.call.in_words}: {decision.unmet}")
    return decision


def would_choose(call: Call, settings: OperatorSettings, known: Known | None = None) -> Decision:
    """Return what `choose` returns, whether or not a request is met."""
    return _choose(call, settings.for_operators, Known(plan=settings.plan) if known is None else known)


@lru_cache(maxsize=4096)
def _choose(call: Call, settings: OperatorSettings, known: Known) -> Decision:
    limits: dict[str, Any] = {
        "deterministic": settings.deterministic if known.deterministic is None else known.deterministic,
        "comm_mode": settings.comm_mode,
        "hccl_buffsize": settings.hccl_buffsize,
    }
    if isinstance(call, Exchange):
        projection = None if call.projection is None else replace(call.projection, **limits)
        return _choose_groups(replace(call, projection=projection), settings, known)
    return _choose_chunks(replace(call, fused_ranks=settings.fused_ranks, **limits), settings, known)


def _cuts(settings: OperatorSettings, known: Known) -> bool:
    return known.alone or settings.cuts


def _refused_fused(call: Call, settings: OperatorSettings, known: Known) -> dict[str, str | None]:
    """Return why each fused kernel cannot run a call, or None if it can; empty if none was asked for."""
    asked = settings.fused and settings.cuts and not known.alone
    return {name: _refusal(name, call) for name in FUSED} if asked else {}


def usual_chunks(settings: OperatorSettings, known: Known = NOTHING) -> int:
    """Return the number of chunks for shapes without a count of their own."""
    if not _cuts(settings, known):
        return 1
    number = known.number or settings.num_chunks
    return CHUNKS_INSTEAD_OF_FUSED if settings.fused and number == 1 and not known.alone else number


def too_narrow(communicated: int, other: int) -> bool:
    """Tell whether a collective of rows of `communicated` features gains nothing from chunks beside its matmul.

    other: the features on the matmul's other side. Such are the collectives of a low-rank adapter: they move little and
    have little to run under, so further ones cost their latency. A pure function of the shape: all ranks decide alike.
    """
    return communicated <= NARROW and communicated * NARROW_SHARE < other


def _choose_groups(exchange: Exchange, settings: OperatorSettings, known: Known) -> Decision:
    """Return in how many groups of parts an exchange runs: in any number each part gets the same rows, in one order."""
    if exchange.ranks == 1:
        return Decision(exchange, "reference", (exchange.parts,), True, (because("one_rank"),), step=1)
    refusals = _refused_fused(exchange, settings, known)
    fused = None in refusals.values()
    request = _given_sizes(exchange, settings, known, known.plan) or _group_request(exchange, settings, known, refusals)
    sizes = request.sizes
    if fused and len(sizes) == 1:
        reasons = (*request.reasons, *_why_fused(exchange))
        return Decision(exchange, "npu", sizes, False, reasons, given=True, step=1)
    if fused:
        request = request.cut_to(sizes, because("groups_hide_more", groups=len(sizes)))
    kernel = "chunked" if len(sizes) > 1 else "reference"
    unmet = request.unmet_by(sizes, known)
    return Decision(exchange, kernel, sizes, True, request.reasons, unmet, request.given, step=1)


def _why_fused(exchange: Exchange) -> Iterator[Reason]:
    """Yield why a fused operator runs the way back of all heads, and what runs their gradient's dispatch."""
    assert exchange.projection is not None
    yield because("fused_projection")
    refusal = npu_limits.supports_exchanged(exchange.projection.backward)
    if refusal is not None:
        yield because("fused_forward", refusal=refusal)


def _group_request(
    exchange: Exchange, settings: OperatorSettings, known: Known, refusals: dict[str, str | None]
) -> _Request:
    request = _count(exchange, settings, known, refusals)
    sizes = groups_of(exchange, request.chunks)
    if len(sizes) < request.chunks:
        few = because("few_parts", parts=exchange.parts, what=exchange.parts_in_words, groups=len(sizes))
        return request.cut_to(sizes, few)
    return request.cut_to(sizes)


def groups_of(exchange: Exchange, count: int) -> Sizes:
    """Return the parts of so many groups, or of fewer if there are too few parts."""
    even = exchange.operator != EXPERT_EXCHANGE and usual_backend(exchange.device).launches
    return even_rows(exchange.parts, count, 1) if even else split_rows(exchange.parts, count, 1)


def _choose_chunks(matmul: Matmul, settings: OperatorSettings, known: Known) -> Decision:
    arithmetic = matmul.arithmetic
    tile = arithmetic.row_tile(matmul.m)
    if matmul.ranks == 1 and not arithmetic.forms_every_product:
        options = _options("reference", matmul, settings, tile)
        return Decision(matmul, "reference", (matmul.cut,), not tile, (because("one_rank"),), options=options)
    refusals = _refused_fused(matmul, settings, known)
    for name, refusal in refusals.items():
        if refusal is None:
            sizes = shm.pieces(matmul) if name == "shm" else (matmul.cut,)
            exact, options = _bit_exact(matmul, name, len(sizes)), _options(name, matmul, settings, tile)
            return Decision(matmul, name, sizes, exact, (because("fused"),), given=True, options=options)
    step = tile or (ROW_TILE if matmul.antiquant else settings.chunk_rows)
    plan = None if matmul.antiquant else known.plan
    request = _given_sizes(matmul, settings, known, plan) or _count_request(matmul, settings, known, refusals, step)
    if matmul.comm_quant:
        request = request.cut_to((matmul.cut,), because("int8_sum"))
    elif tile and matmul.antiquant:
        request = request.cut_to((matmul.cut,), because("int8_columns", asked=arithmetic.asked))
    elif tile and request.given and (snapped := snap(request.sizes, tile)) != request.sizes:
        request = request.cut_to(snapped, because("tiles", tile=tile, asked=arithmetic.asked))
    sizes, reasons, unmet = request.sizes, request.reasons, request.unmet_by(request.sizes, known)
    plain = "chunked" if len(sizes) > 1 else "reference"
    if plain == "chunked" and not (request.given or tile) and _runs_in_one_gather(matmul):
        sizes, reasons = one_gather(matmul.cut), (*reasons, because("own_rows"))
    if is_one_gather(sizes):
        sizes = (matmul.cut,)
    refusal = _refusal(plain, matmul)
    if refusal is not None:
        reasons = (*reasons, because("arithmetic", asked=arithmetic.asked, kernel=plain, refusal=refusal))
    kernel = plain if refusal is None else arithmetic.kernel
    if kernel == "tree" and (refusal := _refusal(kernel, matmul)) is not None:
        raise DegreeError(f"{matmul.in_words}: {refusal}")
    return Decision(
        matmul,
        kernel,
        sizes,
        _bit_exact(matmul, kernel, len(sizes)),
        reasons,
        unmet,
        request.given,
        _options(kernel, matmul, settings, tile),
        step,
        _alignment(matmul, kernel, sizes, settings),
    )


def _alignment(matmul: Matmul, kernel: str, sizes: Sizes, settings: OperatorSettings) -> str:
    """Return how a matmul's operands are aligned.

    An all-gather would also send the padding. Padding depends on the chunks, which deterministic tiles forbid.
    """
    aligns = settings.matmul_soc_friendly and matmul.device == "npu" and matmul.operator != ALL_GATHER
    if not aligns or kernel != "chunked" or matmul.deterministic:
        return ""
    chunk_rows, size = matmul.m // len(sizes), matmul.dtype.itemsize
    return alignment_of(matmul.k, matmul.n, chunk_rows, size, settings.k_min, settings.k_max)


def own_rows_suffice(ranks: int, device: str) -> bool:
    """Tell whether all-gathers run whole, under the matmul of the rank's own rows.

    Of 2 ranks these are half of the matmul, in one launch and one collective. Each further one cost a device's host
    more than it hid in most measurements (benchmarks/README.md, two halves of one GPU). With more ranks the own rows
    are fewer.
    """
    return ranks == 2 and usual_backend(device).launches


def _runs_in_one_gather(matmul: Matmul) -> bool:
    return matmul.operator == ALL_GATHER and own_rows_suffice(matmul.ranks, matmul.device)


def _refusal(name: str, call: Call) -> str | None:
    """Return why a kernel cannot run `call`, or None if it can.

    "reference" is the only kernel of this package with communication in int8. Its sums are exact in any order.
    """
    if isinstance(call, Exchange):
        if name == "npu" and call.projection is not None:
            return npu_limits.supports_exchanged(call.projection)
        return None if name in ("chunked", "reference") else f"it runs no {call.worker}"
    if call.comm_quant and name != "npu":
        return None if name == "reference" else "it has no communication in int8"
    refusal: str | None = KERNELS[name].supports(call)
    return refusal


@dataclass(frozen=True)
class _Request:
    """The requested number of chunks, their sizes, the reasons, and whether they meet the settings.

    given: whether the sizes themselves were requested.
    """

    chunks: int
    sizes: Sizes
    reasons: tuple[Reason, ...]
    met: bool = True
    given: bool = False

    def cut_to(self, sizes: Sizes, *reasons: Reason) -> _Request:
        """Return the request with other sizes, and further reasons."""
        return replace(self, sizes=sizes, reasons=(*self.reasons, *reasons))

    def unmet_by(self, sizes: Sizes, known: Known) -> str:
        """Return why sizes are not what the user asked for; empty if they are, or if somebody else asked."""
        unmet = not self.met or (self.chunks > 1 and len(sizes) == 1)
        others = known.because is not None and (known.plan is not None or known.number > 0)
        return "; ".join(reason.text for reason in self.reasons) if unmet and not others else ""


def _given_sizes(call: Call, settings: OperatorSettings, known: Known, plan: SizesOf | None) -> _Request | None:
    """Return the sizes for this call from customized_coc or the plan, or None."""
    own = _own_cut(call, settings, known)
    if not _cuts(settings, known) or isinstance(own, int):
        return None
    if own is not None:
        if sum(own) != call.cut:
            raise ValueError(
                f"customized_coc for {list(call.shape)} has chunks of {sum(own)} rows together, and {call.in_words} "
                f"cuts {call.cut}"
            )
        why = because("sizes_of_shape", sizes=list(own), shape=list(call.shape))
        return _Request(len(own), own, (*_why(known), why), given=True)
    if plan is None or (planned := plan.find(call)) is None:
        return None
    sizes, why = planned
    return _Request(len(sizes), sizes, (*_why(known), why), given=True)


def _why(known: Known) -> tuple[Reason, ...]:
    return () if known.because is None else (known.because,)


def _count_request(
    matmul: Matmul, settings: OperatorSettings, known: Known, refusals: dict[str, str | None], tile: int
) -> _Request:
    """Return the sizes for the number of chunks that is asked for, or for fewer if there are too few rows."""
    request = _count(matmul, settings, known, refusals)
    chunks, named = request.chunks, isinstance(_own_cut(matmul, settings, known), int)
    if chunks > 1 and _is_narrow(matmul) and not named:
        communicated = matmul.k if matmul.operator == ALL_GATHER else matmul.n
        return replace(request, chunks=1).cut_to((matmul.cut,), because("narrow", features=communicated))
    full = chunks if named else most_that_fill(matmul, chunks, tile)
    sizes = cut_into(matmul, full, tile)
    if full < chunks:
        return request.cut_to(sizes, because("unfilled", chunks=full))
    if len(sizes) < chunks:
        unit = "columns" if matmul.antiquant else "rows"
        asked = f", because {matmul.arithmetic.asked}" if matmul.deterministic else ""
        few = because("few_rows", cut=matmul.cut, unit=unit, chunks=len(sizes), tile=tile, asked=asked)
        return request.cut_to(sizes, few)
    return request.cut_to(sizes)


def _is_narrow(matmul: Matmul) -> bool:
    features = (matmul.k, matmul.n) if matmul.operator == ALL_GATHER else (matmul.n, matmul.k)
    return too_narrow(*features)


def _own_cut(call: Call, settings: OperatorSettings, known: Known) -> Cut | None:
    """Return the number of chunks, or their sizes, that customized_coc gives this call, or None."""
    own = None if known.alone else settings.customized_coc.get(call.shape)
    return own if own is None or isinstance(own, int) or not known.equal else len(own)


def cut_into(matmul: Matmul, chunks: int, tile: int) -> Sizes:
    """Return the sizes of so many chunks of a matmul, or of fewer if there are too few rows."""
    even = not matmul.antiquant and usual_backend(matmul.device).launches
    return even_rows(matmul.cut, chunks, tile) if even else split_rows(matmul.cut, chunks, tile)


def row_step(matmul: Matmul) -> int:
    """Return the rows of which cuts that nobody gave are multiples, where there are enough rows."""
    return DEVICE_TILE if usual_backend(matmul.device).launches else ROW_TILE


def most_that_fill(matmul: Matmul, chunks: int, tile: int) -> int:
    """Return the largest number of chunks, at most `chunks`, whose matmuls leave no unit of the device without work."""
    return next((count for count in range(chunks, 1, -1) if fills(matmul, cut_into(matmul, count, tile))), 1)


def cuts_to_time(matmul: Matmul, counts: Sequence[int]) -> list[Sizes]:
    """Return cuts that are worth a measurement, for these numbers of chunks: the usual ones of the matmul's device.

    On a device also those with a short first gather or a short last reduction, and a gather that is not cut.
    """
    usual = [cut_into(matmul, count, ROW_TILE) for count in counts]
    if not usual_backend(matmul.device).launches:
        return usual
    gathers = matmul.operator == ALL_GATHER
    usual += [uneven_rows(matmul.cut, count, short_first=gathers) for count in counts]
    return [*([one_gather(matmul.cut)] if gathers else []), *(sizes for sizes in usual if fills(matmul, sizes))]


def _count(call: Call, settings: OperatorSettings, known: Known, refusals: dict[str, str | None]) -> _Request:
    """Return the number of chunks that is asked for, without sizes."""

    def asked(chunks: int, code: str, *, met: bool = True, **facts: object) -> _Request:
        return _Request(chunks, (), (*_why(known), because(code, chunks=chunks, **facts)), met)

    if not _cuts(settings, known):
        return asked(1, "mode", mode=settings.mode)
    own = _own_cut(call, settings, known)
    fits = None in refusals.values()  # an operator that takes all groups as one: no number stands for it
    if isinstance(own, int):
        return asked(own, "count_of_shape", met=fits or not refusals, shape=list(call.shape))
    chunks = known.number or settings.num_chunks if fits else usual_chunks(settings, known)
    if refusals and not fits:
        refused = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        return asked(chunks, "not_fused", met=False, refused=refused)
    if known.plan is not None:
        return asked(chunks, "unplanned", met=False)
    if known.number:
        return asked(chunks, "count", pieces="groups" if isinstance(call, Exchange) else "chunks")
    return asked(chunks, "unmeasured" if (settings.auto or settings.tune) and known.because is None else "number")


def _options(name: str, matmul: Matmul, settings: OperatorSettings, tile: int) -> tuple[tuple[str, object], ...]:
    """Return a kernel's keyword arguments; `tile` is the row tile of the deterministic mode, or 0."""
    if name == "npu":
        mode = npu_limits.engine(matmul)
        return () if mode is None else (("comm_mode", mode),)
    tiled: tuple[tuple[str, object], ...] = (("row_tile", tile),) if tile else ()
    if name == "tree":
        return (*tiled, ("features", tree.features_of(matmul)))
    return (("time_limit", float(settings.time_limit)), *tiled) if name == "shm" else tiled


def _bit_exact(matmul: Matmul, kernel: str, chunks: int) -> bool | None:
    """Return whether the bits are those of the plain layer; None if the machines have to be probed.

    Sums of two ranks have only one order. With more ranks, the order of an all-reduce depends on the position in the
    buffer, and this package's reduce-scatter for gloo sums in rank order, which gloo's does not. Different matmuls,
    with bits of their own: tiles of the deterministic mode, fused operators of torch_npu, operands padded on NPUs,
    chunks of an int8 weight's columns. Communication in int8 rounds the sums.
    """
    if matmul.deterministic or matmul.comm_quant or kernel == "npu":
        return False
    same_sums = matmul.ranks <= 2 or matmul.operator == ALL_GATHER
    if kernel == "reference":
        return same_sums or matmul.operator == ALL_REDUCE or usual_backend(matmul.device).own_scatter
    if not same_sums or matmul.antiquant or matmul.device == "npu":
        return False
    gathers = matmul.operator == ALL_GATHER
    whole = kernel == "shm" and (shm.gathers_before_matmul(matmul.rows) if gathers else chunks == 1)
    return True if whole else None


@dataclass(frozen=True)
class ExchangedChoice:
    """What runs a matmul beside an all-to-all (ops/exchanged_matmul.py), and why.

    kernel
        "npu": the fused operator; "reference": the product and the all-to-all in turn; "chunked": in groups of heads.
    code
        Of the reason of the exchange that settled the kernel.
    why
        "taken", or why the fused operator is not.
    """

    matmul: ExchangedMatmul
    kernel: str
    code: str
    why: str

    @property
    def fused(self) -> str:
        """torch_npu's name of the fused operator."""
        return npu_limits.EXCHANGED_OPERATORS[self.matmul.operator]

    def __str__(self) -> str:
        """Return the choice in a line."""
        return f"{self.matmul.operator} {list(self.matmul.shape)}: {self.kernel}; {self.fused}: {self.why}"


@dataclass(frozen=True)
class Explanation:
    """A decision, and for each kernel "taken" or the reason against it. ``str(explanation)`` is the text for people.

    region: how the matmul runs inside a region, if the settings ask for regions.
    beside: the matmuls beside an all-to-all of an exchange whose projection is known.
    """

    decision: Decision
    kernels: dict[str, str]
    strict: bool
    region: str = ""
    beside: tuple[ExchangedChoice, ...] = ()

    def __str__(self) -> str:
        """Return the decision and the reasons in a few lines."""
        decision = self.decision
        lines = [
            f"{decision.call.in_words}: {decision.kernel}, chunks: {len(decision.sizes)}",
            f"  because {decision.reason}",
        ]
        if decision.unmet and self.strict:
            lines.append("  COC_STRICT=1 makes this an error")
        lines += [f"  {name:<10}{why}" for name, why in self.kernels.items()]
        lines += [f"  {choice}" for choice in self.beside]
        if self.region:
            lines.append(f"  {self.region}")
        return "\n".join(lines)


def explain(call: Call, settings: OperatorSettings, known: Known | None = None) -> Explanation:
    """Return the decision on `call` and the reason for or against each kernel; run nothing, ignore strictness."""
    decision = would_choose(call, settings, known)
    asks_fused = settings.fused and settings.cuts and not (known and known.alone)
    kernels = {name: _reason(name, decision, asks_fused) for name in KERNELS}
    return Explanation(decision, kernels, settings.strict, beside=tuple(_beside(decision, asks_fused)))


def _beside(decision: Decision, asks_fused: bool) -> Iterator[ExchangedChoice]:
    """Yield what runs the way back of an exchange's heads with their projection, and the gradient's dispatch."""
    exchange = decision.call
    if not isinstance(exchange, Exchange) or exchange.projection is None:
        return
    code = next((code for code in ("groups_hide_more", "not_fused") if code in decision.codes), decision.code)
    for matmul in (exchange.projection, exchange.projection.backward):
        refusal = npu_limits.supports_exchanged(matmul)
        if decision.kernel != "npu":
            why = _reason("npu", decision, asks_fused) if refusal is None else f"cannot: {refusal}"
            yield ExchangedChoice(matmul, decision.kernel, code, why)
        elif refusal is None:
            yield ExchangedChoice(matmul, "npu", "fused_projection", "taken")
        else:
            yield ExchangedChoice(matmul, "reference", "fused_forward", f"cannot: {refusal}")


def _reason(name: str, decision: Decision, asks_fused: bool) -> str:
    if name == decision.kernel:
        return "taken"
    refusal = _refusal(name, decision.call)
    if refusal is not None:
        return f"cannot: {refusal}"
    if name in FUSED:
        if isinstance(decision.call, Exchange) and asks_fused:
            return "can, in one group"
        return "can, but another fused kernel was tried first" if asks_fused else "can, with USE_COC_FUSED_KERNEL=1"
    if name == "ordered":
        return "can, with COC_DETERMINISTIC=1 where nothing else sums in rank order"
    if name == "tree":
        return "can, with COC_DETERMINISTIC=tp"
    return f"can, with {'two or more chunks' if name == 'chunked' else 'one chunk'}"
