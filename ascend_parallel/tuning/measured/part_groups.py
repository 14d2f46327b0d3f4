"""COC_PARALLEL_NUM=auto and COC_TUNE for exchanges: in how many groups of parts one runs, measured at its first call.

The caller's own tensors and parts, experts or heads, run some times in each number of groups and in turn, as the
framework's own layer runs experts, forward and backward, on copies that leave no trace. The ranks exchange their times
and take the same number; bits do not depend on it. Where groups gain nothing the exchange runs in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import Exchange
from ascend_parallel.ops.clocks import finish, seconds_of
from ascend_parallel.ops.decision import Known, because
from ascend_parallel.ops.expert_exchange import RowCounts
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.experts import LocalExperts, experts_in_turn, run_experts
from ascend_parallel.overlap.layer_shape import FORWARD
from ascend_parallel.overlap.selective_checkpoint import without_trace
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Entry, in_turn_of
from ascend_parallel.tuning.measured.contest import Contest, fastest, slowest
from ascend_parallel.tuning.measured.pass_times import Times
from ascend_parallel.tuning.measured.tuner import FIRST_ROUNDS, ROUNDS, decide

log = logging.getLogger("ascend_parallel")

CANDIDATES = (2, 4)

Run = Callable[[], object]


def measured_groups(
    exchange: Exchange, group: dist.ProcessGroup, run: Callable[[Known], object], in_turn: Run, device: torch.device
) -> Entry:
    """Time the exchange in some numbers of groups and in turn; return what wins, and log it on the first rank."""
    runs = {
        sizes: partial(run, Known(number=len(sizes), because=because("tried")))
        for sizes in (split_rows(exchange.parts, count, 1) for count in CANDIDATES)
    }
    entry = fastest_groups(exchange, group, runs, in_turn, device)
    if dist.get_rank() == 0:
        what = f"{len(entry.sizes)} groups" if len(entry.sizes) > 1 else in_turn_of(exchange.operator)
        figures = f"{1e3 * entry.chosen:.2f} ms, in turn {1e3 * entry.serial:.2f} ms"
        log.info("%s: %s (a pass takes %s)", exchange.in_words, what, figures)
    return entry


def common_groups(entry: Entry | None, exchange: Exchange, group: dist.ProcessGroup) -> Entry | None:
    """Return an entry with the first rank's groups, or None if a rank has no entry: each plan may be another file."""
    mine = {"experts": [] if entry is None else list(entry.sizes)}
    by_rank = store_all_gather(group, f"the plans of {exchange.in_words}", mine, DisagreementError, topic="exchange")
    if entry is None or not all(of["experts"] for of in by_rank.values()):
        return None
    sizes = tuple(map(int, by_rank[dist.get_process_group_ranks(group)[0]]["experts"]))
    return Entry.of(FORWARD, exchange, sizes, entry.serial, entry.chosen)


def fastest_groups(
    exchange: Exchange, group: dist.ProcessGroup, runs: Mapping[Sizes, Run], in_turn: Run, device: torch.device
) -> Entry:
    """Time the groups of `runs` beside the exchange in turn; return the groups that win round by round, or one.

    An entry of one group stands for the framework's own layer. Every rank of `group` calls this alike.
    """
    whole = (exchange.parts,)
    times = _times(exchange, group, {whole: in_turn, **runs}, FIRST_ROUNDS, device)
    best = fastest(times, runs)
    if max(Contest(times[whole], times[best]).gains) > 0:  # three rounds that win by luck are no rarity
        more = _times(exchange, group, {whole: in_turn, best: runs[best]}, ROUNDS - FIRST_ROUNDS, device)
        times = {sizes: [*times[sizes], *more[sizes]] for sizes in more}
    tuned = decide(times, whole, best)
    return Entry.of(FORWARD, exchange, tuned.sizes, tuned.serial, tuned.chosen)


def _times(
    exchange: Exchange, group: dist.ProcessGroup, runs: Mapping[Sizes, Run], rounds: int, device: torch.device
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
        group, f"the measurement of {exchange.in_words}", told, DisagreementError, topic="exchange"
    )
    return {sizes: slowest([of[str(len(sizes))] for of in by_rank.values()]) for sizes in runs}


def pass_on_copies(
    rows: torch.Tensor,
    counts: RowCounts,
    copies: Callable[[], LocalExperts],
    group: dist.ProcessGroup,
    settings: Settings,
    known: Known | None,
    *,
    probs: torch.Tensor | None = None,
) -> None:
    """Run a forward and backward, of the experts that ``copies()`` returns, that leave no trace; None: in turn."""
    with without_trace(rows.device), torch.enable_grad():
        local, x, probs = copies(), rows.detach().requires_grad_(), None if probs is None else probs.detach()
        wanted = [x, *(weight for weight in local.weights if weight.requires_grad)]
        if known is None:
            made = experts_in_turn(x, counts, local, group=group, probs=probs)
            wanted += [parameter for parameter in local.parameters if parameter.requires_grad]
        else:  # parameters get their gradients inside
            made, _ = run_experts(x, counts, local, group=group, settings=settings, known=known, probs=probs)
        torch.autograd.grad(made, wanted, torch.ones_like(made), allow_unused=True)
