"""The decider: what is known of calls beside what the user said, decided once for each group.

In this order count: the user's own sizes (ops/registry.py asks them first), a plan, the clock, the bits (ops/bits.py).
At the first call of a layer of a shape, or of an exchange, all ranks of its group measure it together, beside what the
framework does; `contest` has the one rule of what wins. Every decision uses only numbers that all ranks have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.logs import working
from ascend_parallel.ops import stream_limit
from ascend_parallel.ops.call import Exchange
from ascend_parallel.ops.decision import Known, because
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import in_backward
from ascend_parallel.ops.without_modes import without_grad_and_modes
from ascend_parallel.overlap.known import known_of
from ascend_parallel.overlap.layer_shape import FORWARD, LayerOperator, LayerShape
from ascend_parallel.overlap.selective_checkpoint import checkpoint_frame
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.consistency import DisagreementError, is_capturing, store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Entry, Plan
from ascend_parallel.tuning.measured.part_groups import Run, common_groups, measured_groups
from ascend_parallel.tuning.measured.pass_times import TimedLinear
from ascend_parallel.tuning.measured.plan_file import PlanFile
from ascend_parallel.tuning.measured.step_contest import ALONE, WHOLE, StepContest
from ascend_parallel.tuning.measured.tuner import (
    ROUNDS,
    MeasuredBreakdowns,
    TunedPass,
    confirmed,
    limit_of_stream,
    measured,
)

log = logging.getLogger("ascend_parallel")

LONGER = "; it communicates longer than it multiplies: COC_REGION=auto may hide the rest under other layers"
# Calls of a group to keep that were left to the original: shapes can vary without end.
MOST_LEFT_WHOLE = 4096
# The chunks of each pass that this process has tuned or found in a plan, for its last line.
CHUNKS: dict[LayerOperator, int] = {}


@dataclass
class OfGroup:
    """What is decided on a process group.

    plan
        Of the file, and what was measured since; None: the file is not read yet.
    known
        By shape of a layer's call and whether it has gradients, or by exchange.
    way
        How the layers of whole steps run: `ALONE`, `WHOLE`, or in so many chunks.
    begun
        Whether whole steps are timed, or were.
    contest
        What decides the way; None: it is decided, or nothing but single passes is timed.
    checkpointed
        By checkpointed call and layer: the way of its forward while steps were timed.
    cuts
        Whether a pass that was timed alone is cut.
    left_whole
        Calls that were left to the framework's own layer, behind their way.
    breakdowns
        The parts of passes that were timed.
    limited
        Whether limits of the stream's cores were tried: once, on the first pass that is cut.
    """

    plan: Plan | None = None
    known: dict[Hashable, Known] = field(default_factory=dict)
    way: int = ALONE
    begun: bool = False
    contest: StepContest | None = None
    checkpointed: WeakKeyDictionary[Any, WeakKeyDictionary[torch.nn.Module, int]] = field(
        default_factory=WeakKeyDictionary
    )
    cuts: bool = False
    left_whole: set[Hashable] = field(default_factory=set)
    breakdowns: MeasuredBreakdowns = field(default_factory=MeasuredBreakdowns)
    limited: bool = False


class Decider:
    """Decides for the layers and exchanges of one process what counts beside the user's own sizes.

    COC_TUNE
        Measures each unknown pass and keeps the result in the file that COC_TUNE names.
    COC_PARALLEL_NUM=auto
        Takes the entries that `ascend-parallel tune` left in the cache. Predicts each unknown pass from a few
        measurements of its parts, and times the predicted sizes once beside one chunk.
    COC_PLAN, or a number of chunks
        Measures nothing: the user's plan is known, if there is one.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        measures: bool = True,
        keeps: bool = True,
        original_if_whole: bool = False,
        steps: bool = False,
        hint: str = LONGER,
    ) -> None:
        """Measure, if the settings ask for it, into the file that ``settings.tune`` names.

        measures
            Whether a call may be measured when it comes.
        keeps
            Whether exchanges are looked up in the plan file, and written to it.
        original_if_whole
            Whether the framework's own layer runs a call whose matmuls all stay in one chunk.
        steps
            Whether whole steps are timed as well, of groups that `begin_steps` names.
        hint
            What the log says of a pass that communicates longer than it multiplies.
        """
        self._settings, self._keeps, self._original_if_whole, self._hint = settings, keeps, original_if_whole, hint
        self.measures = measures and settings.tunes
        """Whether calls are measured when they come."""
        self._steps = steps and self.measures
        self.undecided = False
        """Whether `enter` is to be called, or `evaluations` counted: whole steps are timed on some group."""
        self.evaluations = 0
        """Calls of layers in evaluations, which are in no step: in their mode, and without gradients."""
        self._planned = known_of(settings)
        self._file = PlanFile(settings)
        self.groups: WeakKeyDictionary[dist.ProcessGroup, OfGroup] = WeakKeyDictionary()
        """All that is decided, by group."""
        self._logged: set[LayerOperator] = set()

    def known_of_layer(
        self,
        shape: LayerShape,
        group: dist.ProcessGroup,
        *,
        backward: bool,
        agree: Callable[[], None] = lambda: None,
        replicas: Sequence[dist.ProcessGroup] = (),
    ) -> Known:
        """Return what is known of a call: a plan that has an entry for each pass of this layer.

        The first call of a shape runs `agree` and then communicates on `group`, unless no pass of it has a
        collective; then on each of `replicas`, whose ranks measure the same shape in groups of their own and have to
        run the same chunks: sums over more than two ranks have the bits of their chunks.
        """
        if not self.measures:
            return self._planned
        of_group = self._of(group)
        if of_group.way != ALONE:
            original = of_group.way == WHOLE and self._may_be_original(shape, group)
            return Known(number=of_group.way, because=because("in_steps"), original=original)
        key = shape, backward
        if key not in of_group.known:
            assert shape.ranks == group.size()
            passes = [operator for operator in shape.operators if backward or operator.direction == FORWARD]
            if not passes or not shape.own_rows:
                return self._of_plan(None, shape, group, cut=False)
            agree()
            _check_same_call(group, f"{shape}, {'with' if backward else 'without'} gradients")
            plan = self.plan(group, shape.device)
            missing = [operator for operator in passes if plan.entry_of(*operator) is None]
            if missing:
                plan = plan.with_entries(tuple(self._entry(shape, operator, group) for operator in missing))
            for other in replicas:
                plan = self._as_replicas(plan, passes, shape, other)
            of_group.plan = plan
            if missing and self._settings.tune is not None and group.rank() == 0:
                self._file.save(plan)
            self._log_known(plan, passes)
            entries = [plan.entry_of(*operator) for operator in passes]
            cut = any(entry is not None and len(entry.sizes) > 1 for entry in entries)
            of_group.known[key] = self._of_plan(plan, shape, group, cut=cut)
            of_group.cuts |= cut
            if of_group.contest is not None:
                of_group.contest.changed(cut)
        return of_group.known[key]

    def _of_plan(self, plan: Plan | None, shape: LayerShape, group: dist.ProcessGroup, *, cut: bool) -> Known:
        original = not cut and self._may_be_original(shape, group)
        return Known(plan=plan, because=because("as_fast" if original else "measured"), original=original)

    def _may_be_original(self, shape: LayerShape, group: dist.ProcessGroup) -> bool:
        """Tell whether the framework's own layer may run, and has our bits: sums over 3 ranks or more may be ours."""
        scatters = shape.sequence_parallel and shape.ranks > 2
        own_bits = not scatters or backend_of(group, torch.device(shape.device)).own_scatter
        return self._original_if_whole and own_bits

    def begin_steps(self, shape: LayerShape, group: dist.ProcessGroup) -> bool:
        """Begin to time whole steps at the first call on a group whose forward has a collective, and that is decided.

        Tell whether they begin with this call, which is then to be entered. Every rank of the group makes it. A group
        without such calls has no steps that its ranks could count.
        """
        if not self._steps or shape.operator(FORWARD) is None or (of_group := self._of(group)).begun:
            return False
        of_group.begun, of_group.contest, self.undecided = True, StepContest(of_group.cuts), True
        return True

    def enter(self, layer: torch.nn.Module, x: torch.Tensor, group: dist.ProcessGroup, *, communicates: bool) -> None:
        """Begin a call of a layer, in the way of this step; communicates: whether its forward has a collective.

        Calls of evaluations do not come here.
        """
        of_group = self._of(group)
        contest = of_group.contest
        if contest is None:
            return
        if is_capturing():  # a graph keeps its way, and a replay is no turn
            of_group.way = ALONE
            return
        contest.enter(layer, x, group, communicates, self.evaluations)
        of_group.way = _way_of_call(of_group, contest, layer)
        if contest.decision is not None and not of_group.checkpointed:
            of_group.contest, of_group.way = None, contest.way
            self.undecided = any(each.contest is not None for each in self.groups.values())
            if of_group.way != ALONE:
                CHUNKS.update(dict.fromkeys(CHUNKS, of_group.way))

    def known_of_exchange(
        self,
        exchange: Exchange,
        group: dist.ProcessGroup,
        run: Callable[[Known], object],
        in_turn: Run,
        device: torch.device,
        known: Known | None = None,
        together: dist.ProcessGroup | None = None,
    ) -> Known:
        """Return in how many groups of parts an exchange on `group` runs; every rank of it calls this alike.

        known
            What is returned where nothing is measured; None: the user's plan.
        together
            Ranks of several groups that have to take the same number, since a pass has collectives of theirs too.

        ``run(known)`` and ``in_turn()`` compute a pass, overlapped and as the framework does, and leave no trace.
        One group is `original`: the framework's own layer is as fast.
        """
        if not self.measures:
            return self._planned if known is None else known
        of_group = self._of(group)
        if exchange not in of_group.known:
            entry = self.plan(group, exchange.device).entry_of(FORWARD, exchange) if self._keeps else None
            if together is not None:
                entry = common_groups(entry, exchange, together)
            if entry is None and exchange.parts > 1:
                entry = measured_groups(exchange, together or group, run, in_turn, device)
                if self._keeps:
                    self.keep(entry, group, exchange.device)
            number = 1 if entry is None else len(entry.sizes)
            of_group.known[exchange] = Known(number=number, because=because("measured"), original=number == 1)
        return of_group.known[exchange]

    def keeps_original(self, exchange: Exchange, group: dist.ProcessGroup) -> bool:
        """Tell whether the framework's own layer was measured to be as fast, in this run or for its plan (COC_PLAN)."""
        if self._settings.plan is not None:
            planned = self._settings.plan.find(exchange)
            return planned is not None and len(planned[0]) == 1
        known = self._of(group).known.get(exchange)
        return known is not None and known.original

    def note_left_whole(self, group: dist.ProcessGroup, call: tuple[Hashable, ...]) -> None:
        """Note that a call was left to the original: it is the whole decision, and the next such call is a look-up.

        call: everything that the decision depends on, beside the settings and the group.
        """
        of_group = self._of(group)
        if len(of_group.left_whole) == MOST_LEFT_WHOLE:
            of_group.left_whole.clear()
        of_group.left_whole.add((of_group.way, *call))

    def keep(self, entry: Entry, group: dist.ProcessGroup, device: str) -> None:
        """Add an entry to the plan of `group`, and with COC_TUNE to the file."""
        plan = self._of(group).plan = self.plan(group, device).with_entries((entry,))
        if self._settings.tune is not None and group.rank() == 0:
            self._file.save(plan)

    def plan(self, group: dist.ProcessGroup, device: str) -> Plan:
        """Return the plan of a group; the first call reads the file, and every rank of `group` makes it."""
        of_group = self._of(group)
        if of_group.plan is None:
            of_group.plan = self._file.starting_plan(group, device)
        return of_group.plan

    def _of(self, group: dist.ProcessGroup) -> OfGroup:
        if group not in self.groups:
            self.groups[group] = OfGroup()
        return self.groups[group]

    def _entry(self, shape: LayerShape, operator: LayerOperator, group: dist.ProcessGroup) -> Entry:
        timing = f"timing {operator.direction} {operator.matmul.operator} {operator.matmul.product_in_words}"
        # The modes: hide these matmuls from a selective checkpoint's policy.
        with working(timing, shown=dist.get_rank() == 0), without_grad_and_modes():
            layer, tunes = TimedLinear(shape, group, self._settings), self._settings.tune is not None
            known = self._of(group).breakdowns
            breakdown = layer.breakdown(operator, ROUNDS) if tunes else known.of(layer, operator)
            tuned = (measured if tunes else confirmed)(layer, operator, breakdown)
            if shape.device == "npu" and len(tuned.sizes) > 1:
                self._limit_stream(layer, operator, tuned.sizes, group)
        bound = breakdown.communication > breakdown.computation and not self._settings.region
        self._log_once(operator, tuned, self._hint if bound else "")
        return Entry.of(*operator, tuned.sizes, tuned.serial, tuned.chosen)

    def _limit_stream(
        self, layer: TimedLinear, operator: LayerOperator, sizes: Sizes, group: dist.ProcessGroup
    ) -> None:
        """Let the clock decide, once for each group, how many cores the stream of matmuls may take."""
        of_group = self._of(group)
        if of_group.limited or self._settings.stream_limit is not None:
            return
        of_group.limited = True
        if limits := stream_limit.candidates():
            limit, gain = limit_of_stream(layer, operator, sizes, limits)
            stream_limit.put(limit)
            if limit is not None and dist.get_rank() == 0:
                log.warning(
                    "%s: the stream of matmuls takes %d of the vector cores, %.1f %% faster (stream_limit = %s)",
                    self._file.option, limit[1], 100 * gain, list(limit),
                )  # fmt: skip

    def _as_replicas(
        self, plan: Plan, passes: list[LayerOperator], shape: LayerShape, group: dist.ProcessGroup
    ) -> Plan:
        """Return the plan with the fewest chunks that a rank of `group` has for each pass: a cut has to win on all."""
        mine = [entry for operator in passes if (entry := plan.entry_of(*operator)) is not None]
        value = {"entries": [asdict(entry) for entry in mine]}
        values = store_all_gather(group, f"the chunks of {shape}", value, DisagreementError).values()
        found = [[Entry(**{**raw, "sizes": tuple(raw["sizes"])}) for raw in each["entries"]] for each in values]
        fewest = tuple(min(same, key=_fewest) for same in zip(*found, strict=True))
        for entry, before in zip(fewest, mine, strict=True):
            if entry.sizes != before.sizes and dist.get_rank() == 0:
                variable = self._file.option
                rows = ", ".join(map(str, entry.sizes))
                log.warning("%s: %s %s: chunks of %s rows, as on a replica", variable, entry.run, entry.operator, rows)
        return plan.with_entries(fewest)

    def _log_known(self, plan: Plan, passes: list[LayerOperator]) -> None:
        """Log the entries of passes that the plan file already had."""
        for operator in passes:
            entry = plan.entry_of(*operator)
            assert entry is not None
            tuned = TunedPass(entry.sizes, entry.serial, entry.chosen, "no cut won when it was measured")
            self._log_once(operator, tuned, f" (known from {self._file.path(plan.machine)})")

    def _log_once(self, operator: LayerOperator, tuned: TunedPass, more: str = "") -> None:
        """Log the sizes of one pass once, on rank 0; as a warning, so that the default log level shows the line."""
        if operator not in self._logged and dist.get_rank() == 0:
            variable = self._file.option
            name, matmul = operator.matmul.operator, operator.matmul.product_in_words
            log.warning("%s: %s %s %s: %s%s", variable, operator.direction, name, matmul, tuned, more)
        self._logged.add(operator)
        CHUNKS[operator] = len(tuned.sizes)


def _way_of_call(of_group: OfGroup, contest: StepContest, layer: torch.nn.Module) -> int:
    """Return the way of a call: that of the contest, or where a checkpoint runs it again that of its forward.

    A turn begins with a collective: a column layer before it has run in the way of the turn before, and has to save the
    same tensors again.
    """
    again = in_backward()
    frame = checkpoint_frame(again=again)
    if frame is None:
        return contest.way
    if again:
        ways = of_group.checkpointed.get(frame)
        return contest.way if ways is None else ways.get(layer, contest.way)
    if contest.decision is None:
        of_group.checkpointed.setdefault(frame, WeakKeyDictionary())[layer] = contest.way
    return contest.way


def _check_same_call(group: dist.ProcessGroup, call: str) -> None:
    """Raise `DisagreementError` unless every rank of the group tunes the same call."""
    call_by_rank = store_all_gather(group, f"the tuning of {call}", {"call": call}, DisagreementError)
    if any(value["call"] != call for value in call_by_rank.values()):
        calls = "; ".join(f"rank {rank}: {value['call']}" for rank, value in call_by_rank.items())
        raise DisagreementError(
            f"ranks of {describe(group)} tune different calls ({calls}): call a layer with the same shapes, and with "
            "gradients or without, alike on every rank of its group"
        )


def _fewest(entry: Entry) -> tuple[Any, ...]:
    return len(entry.sizes), entry.sizes, entry.serial, entry.chosen
