"""COC_PARALLEL_NUM=auto and COC_TUNE for exchanges: in how many groups of parts one runs, measured at its first call.

The caller's own tensors and parts, experts or heads, run some times in each number of groups and in turn, as the
framework's own layer runs experts, forward and backward, on copies that leave no trace. The ranks exchange their times
and take the same number; bits do not depend on it. Where groups gain nothing the exchange runs in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import finish, seconds_of
from ascend_parallel.ops.expert_exchange import RowCounts
from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import name_of
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.chunks import Chunks
from ascend_parallel.overlap.experts import LocalExperts, experts_in_turn, run_experts
from ascend_parallel.overlap.layer_shape import FORWARD, LayerOperator
from ascend_parallel.overlap.selective_checkpoint import without_trace
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Entry, in_turn_of
from ascend_parallel.tuning.measured.pass_times import Times
from ascend_parallel.tuning.measured.tuner import FIRST_ROUNDS, ROUNDS, Tuner, decide

log = logging.getLogger("ascend_parallel")

CANDIDATES = (2, 4)

Run = Callable[[], object]


class PartGroups:
    """The numbers of groups of a run, by process group and problem: measured, or known from a plan."""

    def __init__(self, settings: Settings, tuner: Tuner | None = None) -> None:
        """Measure if `settings` ask for it; `tuner` has the plans that are read and written."""
        self._settings, self._tuner = settings, tuner
        self._measured: WeakKeyDictionary[dist.ProcessGroup, dict[Problem, Chunks]] = WeakKeyDictionary()

    def keeps_original(self, problem: Problem, group: dist.ProcessGroup) -> bool:
        """Tell whether the framework's own layer was measured to be as fast, in this run or for its plan (COC_PLAN)."""
        if self._settings.plan is not None:
            planned = self._settings.plan.find(problem)
            return planned is not None and len(planned[0]) == 1
        measured = self._measured.get(group, {}).get(problem)
        return measured is not None and measured.original

    def chunks_for(
        self,
        problem: Problem,
        group: dist.ProcessGroup,
        run: Callable[[Settings], object],
        in_turn: Run,
        device: torch.device,
        together: dist.ProcessGroup | None = None,
    ) -> Chunks:
        """Return in how many groups an exchange on `group` runs; every rank of it calls this alike.

        together
            Ranks of several groups that have to take the same number, since a pass has collectives of theirs too.

        ``run(settings)`` and ``in_turn()`` compute a pass, overlapped and as the framework does, and leave no trace.
        One group is `original`: the framework's own layer is as fast.
        """
        settings = self._settings
        if not settings.tunes:
            return Chunks(settings)
        measured = self._measured.setdefault(group, {})
        if problem not in measured:
            entry = None if self._tuner is None else self._tuner.exchange_entry(problem, group)
            if together is not None:
                entry = _common(entry, problem, together)
            if entry is None and problem.rows > 1:
                entry = self._measure(problem, together or group, run, in_turn, device)
                if self._tuner is not None:
                    self._tuner.keep(entry, group, problem.device)
            groups = 1 if entry is None else len(entry.sizes)
            chunks = Chunks.counted(settings, groups, "measured")
            measured[problem] = chunks._replace(original=groups == 1)
        return measured[problem]

    def _measure(
        self,
        problem: Problem,
        group: dist.ProcessGroup,
        run: Callable[[Settings], object],
        in_turn: Run,
        device: torch.device,
    ) -> Entry:
        runs = {
            sizes: partial(run, Chunks.counted(self._settings, len(sizes), "tried").settings)
            for sizes in (split_rows(problem.rows, count, 1) for count in CANDIDATES)
        }
        entry = fastest_groups(problem, group, runs, in_turn, device)
        if dist.get_rank() == 0:
            what = f"{len(entry.sizes)} groups" if len(entry.sizes) > 1 else in_turn_of(problem.operator)
            figures = f"{1e3 * entry.chosen:.2f} ms, in turn {1e3 * entry.serial:.2f} ms"
            log.info("%s: %s (a pass takes %s)", name_of(problem), what, figures)
        return entry


def _common(entry: Entry | None, problem: Problem, group: dist.ProcessGroup) -> Entry | None:
    """Return an entry with the first rank's groups, or None if a rank has no entry: each plan may be another file."""
    mine = {"experts": [] if entry is None else list(entry.sizes)}
    by_rank = store_all_gather(group, f"the plans of {name_of(problem)}", mine, DisagreementError, topic="exchange")
    if entry is None or not all(of["experts"] for of in by_rank.values()):
        return None
    sizes = tuple(map(int, by_rank[dist.get_process_group_ranks(group)[0]]["experts"]))
    return Entry.of(LayerOperator(FORWARD, problem), sizes, entry.serial, entry.chosen)


def fastest_groups(
    problem: Problem, group: dist.ProcessGroup, runs: Mapping[Sizes, Run], in_turn: Run, device: torch.device
) -> Entry:
    """Time the groups of `runs` beside the exchange in turn; return the groups that win round by round, or one.

    An entry of one group stands for the framework's own layer. Every rank of `group` calls this alike.
    """
    whole = (problem.rows,)
    times = _times(problem, group, {whole: in_turn, **runs}, FIRST_ROUNDS, device)
    best = min(runs, key=lambda sizes: median(times[sizes]))
    gains = [1 - ours / theirs for ours, theirs in zip(times[best], times[whole], strict=True)]
    if max(gains) > 0:  # three rounds that win by luck are no rarity among passes this long
        more = _times(problem, group, {whole: in_turn, best: runs[best]}, ROUNDS - FIRST_ROUNDS, device)
        times = {sizes: [*times[sizes], *more[sizes]] for sizes in more}
    tuned = decide(times, whole, best)
    return Entry.of(LayerOperator(FORWARD, problem), tuned.sizes, tuned.serial, tuned.chosen)


def _times(
    problem: Problem, group: dist.ProcessGroup, runs: Mapping[Sizes, Run], rounds: int, device: torch.device
) -> Times:
    """Return the seconds of each round on the slowest rank; a first round warms up, and the order alternates."""
    mine: dict[Sizes, list[float]] = {sizes: [] for sizes in runs}
    for turn in range(1 + rounds):
        for sizes in list(runs)[:: 1 if turn % 2 else -1]:
            finish(device)
            spent = seconds_of(runs[sizes], device.type)
            if turn:
                mine[sizes].append(spent)
    told = {str(len(sizes)): rounds_of for sizes, rounds_of in mine.items()}
    by_rank = store_all_gather(
        group, f"the measurement of {name_of(problem)}", told, DisagreementError, topic="exchange"
    )
    return {
        sizes: [max(map(float, spent)) for spent in zip(*(of[str(len(sizes))] for of in by_rank.values()), strict=True)]
        for sizes in runs
    }


def pass_on_copies(
    rows: torch.Tensor,
    counts: RowCounts,
    copies: Callable[[], LocalExperts],
    group: dist.ProcessGroup,
    settings: Settings | None,
    *,
    probs: torch.Tensor | None = None,
) -> None:
    """Run a forward and backward, of the experts that ``copies()`` returns, that leave no trace; None: in turn."""
    with without_trace(rows.device), torch.enable_grad():
        local, x, probs = copies(), rows.detach().requires_grad_(), None if probs is None else probs.detach()
        wanted = [x, *(weight for weight in local.weights if weight.requires_grad)]
        if settings is None:
            made = experts_in_turn(x, counts, local, group=group, probs=probs)
            wanted += [parameter for parameter in local.parameters if parameter.requires_grad]
        else:  # parameters get their gradients inside
            made, _ = run_experts(x, counts, local, group=group, settings=settings, probs=probs)
        torch.autograd.grad(made, wanted, torch.ones_like(made), allow_unused=True)
