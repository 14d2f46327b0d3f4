"""Agree on chunks of a matmul that have the bits of the whole matmul on every rank, once for each shape.

A library picks its routine by the number of rows (MKL takes another for 128 rows or fewer at K of 1024 and more),
and documents no rule. Before the first chunked call of a shape, every rank therefore asks its machine (`probing`). The
ranks exchange their answers and take the same chunks: the requested chunks if these keep the bits on every rank, else
the largest number of chunks that does.

The first call of a model asks for the other calls too that are known by then (`AHEAD`): one agreement, before the first
step has anything in flight. What is known may differ between ranks, where a program has replaced a layer on one rank;
so the call itself alone decides whether ranks exchange anything, and of the others those count that every rank names.

The probe is invisible to the run: no autograd, no dispatch mode, no draw from the run's random generators.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, Matmul
from ascend_parallel.ops.decision import Decision, because, of_group
from ascend_parallel.ops.multiply import aligned, cut_blocks, multiply_blocks, rank_blocks
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.probing import ANY, ROW_MAJOR, TRANSPOSED, Pieces, first_with_same_bits, log_time
from ascend_parallel.ops.registry import cut_into
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.consistency import store_all_gather


class CallsAhead(Protocol):
    """Knows calls before they come: a framework those of the running model, a planned model its own."""

    def calls_ahead(self, group: dist.ProcessGroup, matmul: Matmul) -> Iterable[tuple[Decision, str]]:
        """Return decisions on calls on `group` that will be made, with as many rows as `matmul` multiplies.

        Each with the memory layout of its right operand.
        """


AHEAD: WeakSet[CallsAhead] = WeakSet()
"""Who is asked what follows a call."""


class Question(NamedTuple):
    """What decides which chunks of a matmul keep its bits; the same on every rank.

    matmul
        Its shape, dtype, device and ranks alone: calls that differ in nothing else have the same bits.
    kernel, sizes, given, step
        As in `Decision`.
    layout
        The memory layout of the right operand.
    """

    matmul: Matmul
    kernel: str
    sizes: Sizes
    given: bool
    step: int
    layout: str

    @classmethod
    def of(cls, decision: Decision, layout: str) -> Question:
        """Return the question of a decision, for a right operand in a memory layout."""
        of = decision.call
        assert isinstance(of, Matmul), "parts keep their bits in any groups"
        matmul = Matmul(of.operator, *of.shape, of.dtype, of.device, of.ranks)
        return cls(matmul, decision.kernel, decision.sizes, decision.given, decision.step, layout)

    @property
    def communicates(self) -> list[object]:
        """What has to be the same on every rank for their collectives to match; plain values."""
        matmul = self.matmul
        features = matmul.k if matmul.operator == ALL_GATHER else matmul.n
        return [matmul.operator, matmul.m, features, str(matmul.dtype), list(self.sizes)]

    @property
    def layouts(self) -> Sequence[str]:
        """The layouts in which the bits have to be kept."""
        return (self.layout,) if self.layout else (TRANSPOSED, ROW_MAJOR)

    @property
    def candidates(self) -> list[Sizes]:
        """The requested chunks and, unless their sizes were given, the cuts into fewer chunks."""
        fewer = [] if self.given else range(len(self.sizes) - 1, 1, -1)
        return list(dict.fromkeys([self.sizes, *(cut_into(self.matmul, count, self.step) for count in fewer)]))

    def first_exact(self, group: dist.ProcessGroup, device: torch.device, start: int) -> int:
        """Return the index, from `start` on, of the first candidate that keeps the bits on this rank.

        The number of candidates if none does.
        """
        launches = backend_of(group, device).launches
        cuts = [CutMatmul(self.matmul, self.kernel, sizes, group.rank(), launches) for sizes in self.candidates]
        return first_with_same_bits(cuts, self.layouts, device, start)


def keep_bits(decision: Decision, group: dist.ProcessGroup, device: torch.device, layout: str = ANY) -> Decision:
    """Return the decision with chunks that keep the bits of the whole matmul on every rank of `group`.

    All ranks call this. A decision whose `exact` is known is returned unchanged. Sizes that a user or a plan gave
    never change. If no chunks keep the bits, the requested chunks stay, `exact` is False and the reason says so.
    """
    if decision.exact is not None:
        return decision
    # The agreed index of the first candidate that keeps the bits on every rank.
    probed, question = of_group(group).bits, Question.of(decision, layout)
    if question not in probed:
        probed.update(_probe(question, probed, group, device))
    return _with_answer(decision, question, probed[question])


@lru_cache(maxsize=4096)
def _with_answer(decision: Decision, question: Question, index: int) -> Decision:
    candidates = question.candidates
    if index == len(candidates):
        what = "these chunks change" if len(candidates) == 1 else "every cut changes"
        reasons = (*decision.reasons, because("bits_change", what=what))
        return replace(decision, exact=False, reasons=reasons)
    sizes, reasons = candidates[index], decision.reasons
    if index:
        reasons = (*reasons, because("bits_fewer", chunks=len(sizes)))
    return replace(decision, sizes=sizes, exact=True, reasons=reasons)


def _probe(
    question: Question, probed: Mapping[Question, int], group: dist.ProcessGroup, device: torch.device
) -> dict[Question, int]:
    """Return the answers to `question`, and to those that are known to follow it."""
    start, name = time.perf_counter(), question.matmul.in_words
    what = f"the probe of which chunks keep the bits of {name}"
    if not backend_of(group, device).blocks_host:
        _finish_collectives(what, group, device)
    others = [other for other in _following(question, group) if other not in probed]
    answers = _agreed(question, others, what, group, device)
    log_time(f"{name} and {len(answers) - 1} calls that follow" if len(answers) > 1 else name, start)
    return answers


def _following(question: Question, group: dist.ProcessGroup) -> list[Question]:
    """Return the questions that follow `question`, as far as this rank knows them."""
    calls = (call for known in list(AHEAD) for call in known.calls_ahead(group, question.matmul))
    found = dict.fromkeys(Question.of(decision, layout) for decision, layout in calls if decision.exact is None)
    found.pop(question, None)
    return list(found)


def _finish_collectives(what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Return once no rank of `group` has work on its device; raise `CollectiveError` while a graph is captured.

    A collective in flight keeps compute units until all its ranks have some. Ranks that share a card could then wait
    for each other: one in its probe, the other in a collective for which the probing rank has no unit left.

    The host has to know, since it tells the others; and the whole device has to be idle: a framework's own collectives,
    such as sums of gradients, run in streams that nobody else can name, so no event stands behind them. This is
    once for a model whose layers are known before its first call, else once for each shape.
    """
    store_all_gather(group, what, {}, CollectiveError, topic="capture")  # raises before the device is waited for
    if torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
    store_all_gather(group, what, {}, CollectiveError, topic="idle")


def _agreed(
    question: Question, others: Iterable[Question], what: str, group: dist.ProcessGroup, device: torch.device
) -> dict[Question, int]:
    """Return the first candidate that keeps the bits on every rank, of `question` and of what all ranks ask besides.

    All ranks ask `question` at the same time: of it what is communicated is compared, and others by their names. Each
    round asks again where ranks found different candidates; usually there is one. Raises `CollectiveError` on every
    rank if their calls differ.
    """
    answers: dict[Question, int] = {}
    following = {str(tuple(other)): other for other in others}
    asked: dict[str, Question] = {"": question, **following}
    starts = dict.fromkeys(asked, 0)
    while asked:
        firsts = {name: one.first_exact(group, device, starts[name]) for name, one in asked.items()}
        value = {"firsts": firsts, "communicates": question.communicates, "call": question.matmul.in_words}
        values = store_all_gather(group, what, value, CollectiveError)
        if any(each["communicates"] != question.communicates for each in values.values()):
            calls = "; ".join(f"rank {rank}: {each['call']}" for rank, each in values.items())
            raise CollectiveError(
                f"ranks of {describe(group)} have come to different calls ({calls}): call a layer with the same rows "
                "on every rank of its group"
            )
        by_rank = [each["firsts"] for each in values.values()]
        common = [name for name in asked if all(name in found for found in by_rank)]
        for name in common:
            found = [int(rank[name]) for rank in by_rank]
            starts[name] = max(found)
            if min(found) == max(found) or max(found) == len(asked[name].candidates):
                answers[asked[name]] = max(found)
        asked = {name: asked[name] for name in common if asked[name] not in answers}
    return answers


@dataclass(frozen=True)
class CutMatmul:
    """The chunks in which a kernel multiplies a matmul on one rank of its group; `launches` as in `rank_blocks`."""

    matmul: Matmul
    kernel: str
    sizes: Sizes
    rank: int
    launches: bool

    def pieces(self, x: torch.Tensor, w: torch.Tensor) -> Pieces:
        """Multiply x [m, k] and w [k, n] whole, and every chunk as the kernel does."""
        whole, matmul, sizes = torch.mm(x, w), self.matmul, self.sizes
        ranks = matmul.m // matmul.rows
        x_r_m, whole_r_m = x.view(ranks, matmul.rows, matmul.k), whole.view(ranks, matmul.rows, matmul.n)
        own = self.rank if self.kernel == "chunked" and matmul.operator == ALL_GATHER else None
        if own is not None:  # the kernel multiplies this rank's own rows in one call, where they wait for no collective
            yield torch.mm(aligned(x_r_m[own]), w), whole_r_m[own]
            # In chunks, where they are unfinished themselves.
            yield from _chunks([x_r_m[own]], [whole_r_m[own]], w, sizes)
        x_blocks, expected = (rank_blocks(each, self.launches, but=own) for each in (x_r_m, whole_r_m))
        yield from _chunks(x_blocks, expected, w, sizes)


def _chunks(
    x_blocks: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], w: torch.Tensor, sizes: Sizes
) -> Pieces:
    for x_c, blocks in zip(cut_blocks(x_blocks, sizes), cut_blocks(expected, sizes), strict=True):
        products = [torch.empty_like(block, memory_format=torch.contiguous_format) for block in blocks]
        multiply_blocks(x_c, w, products)
        yield from zip(products, blocks, strict=True)
