"""Whole steps in turn: which cut of a group's layers wins where the host launches for all of them, and runs ahead.

A pass that is timed alone does not show what its launches cost a step whose device waits for the host. Therefore the
training itself is the contest: its steps run in turn with the framework's own layers, as each pass was decided alone,
and in fixed numbers of chunks. Events in the device's stream time them, and nothing waits for the device. The fastest
runs in turn with the framework's own layers again, since among several ways a lucky one may be the fastest. Where the
rounds contradict each other, it does so up to `FINALS` times.

Every rank of the group takes the same turns, by construction. A pass begins with the call of one layer, the first whose
forward has a collective: each rank makes that call as often as the others. A group without such a layer has no contest.
A step begins with the pass behind an optimizer's step. Where a turn begins, ranks tell each other whether a forward
still waits for its backward; if any does, or if their steps differ, what was decided alone stays. Its time is taken
from the second such call on: the first one's collective has brought the ranks' devices together.

Steps of one shape are compared: as many passes, of the same inputs, with the optimizer's step behind the last one;
steps of several shapes that follow each other again and again, as of a generator and its critic, are one. A turn that
any rank saw run otherwise, as where the optimizer's step was skipped, or that has an evaluation in it, runs
again. A second unlike one in a row is another shape, as where a batch has grown: ranks look for steps anew.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import median
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ascend_parallel.ops.chunk_loop import LOOP
from ascend_parallel.ops.clocks import Mark
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.tuning.measured.contest import LEAST_GAIN, Contest, fastest, slowest

log = logging.getLogger("ascend_parallel")

# How the layers of a step run: as each pass was decided alone, as the framework's own, or in so many chunks.
ALONE, WHOLE, COUNTS = 0, 1, (2, 4)
ROUNDS = 7
FINALS = 3
# The passes at which ranks compare their steps, until these are the same and regular.
FIRST, LAST = 4, 4096
# From this pass on a step may be a pass: no optimizer of torch runs.
UNSTEPPED = 1024
# Calls without a new pass, and in lengths of the longest one: its layer is no longer called.
MOST_CALLS, MOST_LENGTHS = 4096, 16
MOST_IN_TURN = 8  # steps of several shapes that follow each other again and again: they are one
UNLIKE = 2  # turns in a row that are not like the agreed step: steps have another shape now
MOST_LOST = 64  # turns that were not compared
STARVED = 0.5  # share of a step's calls at which the device had already done what was launched before the last one


@dataclass(frozen=True)
class StepDecision:
    """The way that is kept, and why.

    seconds
        The median seconds of a step of each way, on the slowest rank; empty: nothing was timed.
    starved
        The share of the calls at which the device waits for the host, by way.
    """

    way: int
    why: str
    seconds: Mapping[int, float] = field(default_factory=dict)
    starved: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the decision with its figures, in words."""
        if not self.seconds:
            return f"whole steps are not timed: {self.why}"
        others = ", ".join(f"{_in_words(way)} {1e3 * spent:.2f}" for way, spent in self.seconds.items())
        return f"whole steps in ms: {others}; {_in_words(self.way)} stay{'s' * (self.way == ALONE)}: {self.why}"


def decide(times: Mapping[int, Sequence[float]], starved: Mapping[int, float]) -> StepDecision:
    """Return the fastest way if it beats the framework's own layers; the seconds are those of the slowest rank."""
    challengers = [way for way in times if way != WHOLE]
    best = fastest(times, challengers)
    contest, medians = Contest(times[WHOLE], times[best]), {way: median(spent) for way, spent in times.items()}
    change = f"{100 * abs(contest.gain):.1f} %"
    if contest.won:
        return StepDecision(best, f"{change} faster than the framework's own layers", medians, starved)
    lost = f"loses {contest.lost} of {len(times[best])} rounds"
    why = f"{_in_words(best)} gains {change} and {lost}" if contest.gain > 0 else f"{_in_words(best)} loses {change}"
    if max(starved.get(way, 0.0) for way in (best, WHOLE)) > STARVED:
        why += f"; the device waits for the host there in {100 * starved.get(best, 0.0):.0f} % of the layers' calls, "
        why += f"and in {100 * starved.get(WHOLE, 0.0):.0f} % with the framework's own: {_remedy()}"
    return StepDecision(WHOLE, why, medians, starved)


def _remedy() -> str:
    built = "" if not isinstance(LOOP, str) else f", or the C++ extension ({LOOP})"
    return f"chunks would gain in captured steps (CUDA graphs, NPUGraph) or with larger micro-batches{built}"


def _in_words(way: int) -> str:
    names = {ALONE: "each pass as timed alone", WHOLE: "the framework's own layers"}
    return names.get(way, f"{way} chunks")


class OptimizerSteps:
    """Counts the steps of this process's optimizers."""

    taken: ClassVar[int] = 0

    @classmethod
    def note(cls, *_: object) -> None:
        """Note a step."""
        cls.taken += 1


@lru_cache(maxsize=1)
def _count_optimizer_steps() -> None:
    register_optimizer_step_post_hook(OptimizerSteps.note)


class Pass(NamedTuple):
    """The shape of a pass: its input, the optimizers' steps behind it, and whether its graph was dropped behind it.

    What a generator makes may be detached in one step, and have a backward in the next.
    """

    x: torch.Size
    steps: int
    dropped: bool


class Boundary(NamedTuple):
    """The number of the pass at which a step begins, and the passes since the boundary before."""

    number: int
    passes: tuple[Pass, ...]

    @property
    def begin(self) -> int:
        """The number of the boundary before."""
        return self.number - len(self.passes)


class StepContest:
    """The contest of one group's layers."""

    def __init__(self, cuts: bool) -> None:
        """Begin with what is decided of each pass alone, and whether that cuts one."""
        _count_optimizer_steps()
        self.way = ALONE
        self.decision: StepDecision | None = None
        self._anchor: ReferenceType[torch.nn.Module] | None = None  # whose call begins a pass
        self._passes = self._changed = 0  # so many have begun; at which one something was decided alone
        self._calls = self._longest = 0  # since the latest pass began, and in the longest
        self._waiting: dict[int, Any] = {}  # pass whose backward has not ended -> the hook on its way
        self._graded = False  # whether a pass had gradients
        self._rests = False  # whether the calls since the latest pass belong to none: without gradients
        self._first_steps = self._steps = OptimizerSteps.taken  # at the beginning, and at the latest boundary
        self._boundaries: list[Boundary] = []  # where steps began
        self._x, self._taken = torch.Size(), OptimizerSteps.taken  # of the latest pass: its input; steps at its begin
        self._since: list[Pass] = []  # the latest boundary, or begin of a turn
        self._origin = 0  # the pass at which ranks began to look for steps
        self._step: tuple[Pass, ...] = ()  # what a turn has to be like
        self._next = 0  # the first pass of the next turn
        self._unlike = self._lost = 0  # turns that ran otherwise: in a row, and all that were not compared
        self._evaluations = 0  # calls of evaluations when this turn began
        self._cuts = cuts  # whether a pass was cut, timed alone
        self._turns: list[int] = []
        self._spans: list[tuple[Mark, Mark]] = []  # begin and end of each turn
        self._begun: Mark | None = None  # of the running turn
        self._unmarked = False  # whether the running turn has no begin yet
        self._finals = 0  # of the fastest way and the framework's own layers, that have begun
        self._pooled: dict[int, list[float]] = {}  # seconds of all finals
        self._depth: Mark | None = None
        self._depths: dict[int, list[bool]] = {}

    def changed(self, cuts: bool) -> None:
        """Note that a call was decided alone, and whether that cuts a pass."""
        self._changed, self._cuts = self._passes, self._cuts or cuts

    def enter(
        self, layer: torch.nn.Module, x: torch.Tensor, group: dist.ProcessGroup, communicates: bool, evaluations: int
    ) -> None:
        """Begin a call of a layer on `group`, which is no evaluation.

        communicates
            Whether its forward has a collective.
        evaluations
            The number of calls of evaluations so far.
        """
        if self.decision is not None:
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputed forward
            if self._anchor is not None and self._anchor() is layer:
                self._recomputed()
            return
        if backend_of(group, x.device).blocks_host:  # a pass alone costs what it costs in a step
            self.decision = StepDecision(ALONE, "the backend blocks the host")
            return
        if communicates:
            self._anchor = self._anchor or ref(layer)
        begins = self._anchor is not None and self._anchor() is layer
        if begins:
            self._note_grad_mode()
        self._calls += communicates and (begins or not self._rests)
        if begins and not self._rests:
            self._begin(x, group, evaluations)
        elif communicates and self._unmarked:
            self._begun, self._unmarked = Mark(x.device), False
        self._hook(x)
        if self._calls > max(MOST_CALLS, MOST_LENGTHS * self._longest):
            self._keep(StepDecision(ALONE, "the layer that began them is no longer called"))
        if self.decision is None and self._turns and len(self._spans) >= self._timed:
            self._look(x.device)

    @property
    def _timed(self) -> int:
        """The number of turns that are timed, with those that warm up; behind them the queue's depth is asked."""
        return len(self._turns) - len(set(self._turns))

    def _begin(self, x: torch.Tensor, group: dist.ProcessGroup, evaluations: int) -> None:
        """Begin a pass, and maybe the next turn."""
        self._passes += 1
        self._longest, self._calls = max(self._longest, self._calls), 0
        if self._passes > 1:
            dropped = self._passes - 1 in self._forget_dropped()
            self._since.append(Pass(self._x, OptimizerSteps.taken - self._taken, dropped))
        self._x, self._taken = x.shape, OptimizerSteps.taken
        if not self._next:
            self._watch(group)
        elif self._passes == self._next:
            self._turn(x.device, group, evaluations)
        if self.decision is None:
            self._waiting[self._passes] = None

    def _note_grad_mode(self) -> None:
        """See whether a pass has gradients: once one had, those without are no training; else they are recomputed."""
        graded = torch.is_grad_enabled()
        if graded and not self._graded:
            self._waiting.clear()
        self._graded |= graded
        self._rests = self._graded and not graded

    def _hook(self, x: torch.Tensor) -> None:
        """Have the backward of the latest pass noted where it comes to its first call that has one."""
        if torch.is_grad_enabled() and x.requires_grad and self._waiting.get(self._passes, self) is None:
            hook = partial(self._came_back, self._passes)
            self._waiting[self._passes] = x.register_hook(hook)  # type: ignore[no-untyped-call]

    def _forget_dropped(self) -> list[int]:
        """Forget the passes whose graph is gone, and return them: their backward cannot come."""
        gone = [number for number, hook in self._waiting.items() if hook is not None and hook.hooks_dict_ref() is None]
        for number in gone:
            del self._waiting[number]
        return gone

    def _recomputed(self) -> None:
        """Note that the first of the passes that began without gradients is recomputed; of others a hook tells."""
        unhooked = [number for number, hook in self._waiting.items() if hook is None]
        if unhooked:
            self._came_back(unhooked[0])

    def _came_back(self, number: int, _: object = None) -> None:
        """Note that the backward of a pass has come to the layer that began it."""
        hook = self._waiting.pop(number, None)
        if hook is not None:
            hook.remove()

    def _watch(self, group: dist.ProcessGroup) -> None:
        """See where steps begin; at some passes, which are the same on all ranks, agree on the contest's first one."""
        stepped = OptimizerSteps.taken != self._first_steps
        if not self._waiting and (not stepped or OptimizerSteps.taken != self._steps):
            # What began before the first optimizer's step may be one of several micro-batches.
            before = [] if self._steps == self._first_steps and stepped else self._boundaries[-2 * MOST_IN_TURN :]
            self._boundaries = [*before, Boundary(self._passes, tuple(self._since))]
            self._since, self._steps = [], OptimizerSteps.taken
        looked = self._passes - self._origin
        if looked < FIRST or looked & (looked - 1):
            return
        steps = repeated(self._boundaries) if stepped or self._passes >= UNSTEPPED else ()
        step = tuple(each for boundary in steps for each in boundary.passes)
        begin = self._boundaries[-1].number + len(step) if steps and self._changed < steps[0].begin else 0
        while begin and begin <= self._passes:
            begin += len(step)
        mine = {"begin": begin, "period": len(step), "cuts": self._cuts, "as before": step == self._step}
        found = list(_gathered(group, mine).values())
        if begin and all(each == mine for each in found):
            self._next = begin
            if step != self._step:
                ways = [WHOLE, *([ALONE] if self._cuts else []), *COUNTS]
                self._step, self._turns, self._spans, self._depths, self._finals = step, turns_of(ways), [], {}, 0
        elif looked >= LAST:
            self._keep(
                StepDecision(
                    ALONE, "they are not regular, differ between ranks, or leave a forward without its backward"
                )
            )

    def _watch_anew(self, waits: bool) -> None:
        """Look for steps again; waits: whether a forward waits for its backward on any rank. Then the way stays."""
        self.way = self.way if waits else ALONE
        self._boundaries, self._origin, self._steps, self._next = [], self._passes, OptimizerSteps.taken, 0
        self._begun, self._unmarked, self._depth, self._unlike = None, False, None, 0

    def _turn(self, device: torch.device, group: dist.ProcessGroup, evaluations: int) -> None:
        """End a turn, and begin the next one, or decide."""
        ended, timed = Mark(device), self._begun is not None or self._unmarked
        like = tuple(self._since[-len(self._step) :]) == self._step
        mine = {"waiting": len(self._waiting), "like": like, "evaluated": evaluations != self._evaluations}
        found = _gathered(group, mine).values()
        like, waits = all(each["like"] for each in found), any(each["waiting"] for each in found)
        counts = like and not any(each["evaluated"] for each in found)
        self._since, self._evaluations = [], evaluations
        self._unlike, self._lost = 0 if like else self._unlike + 1, self._lost + (timed and not counts)
        if self._lost > MOST_LOST:
            self._keep(StepDecision(ALONE, "too many of them are unlike the others, or evaluate"))
        elif self._unlike and (not timed or self._unlike == UNLIKE):
            self._watch_anew(waits)
            return
        elif like and waits:
            self._keep(StepDecision(ALONE, "a forward waits for its backward where a step begins"))
        elif counts and self._unmarked:
            self._keep(StepDecision(ALONE, "they have one layer with a collective"))
        elif counts and self._begun is not None:
            self._spans.append((self._begun, ended))
        if self.decision is None and len(self._spans) == len(self._turns):
            self._decide(group)
        if self.decision is None:
            self.way = self._turns[len(self._spans)]
            self._begun, self._unmarked, self._depth = None, True, None
            self._next = self._passes + len(self._step)

    def _look(self, device: torch.device) -> None:
        """Ask whether the device has done what was launched before the last call."""
        if self._depth is not None:
            self._depths.setdefault(self.way, []).append(self._depth.is_reached)
        self._depth = Mark(device)

    def _decide(self, group: dist.ProcessGroup) -> None:
        spent: dict[int, list[float]] = {}
        for way, (begin, end) in list(zip(self._turns, self._spans, strict=True))[: self._timed]:
            spent.setdefault(way, []).append(begin.seconds_until(end))
        depths = {way: sum(asked) / len(asked) for way, asked in self._depths.items()}
        ways = list(spent)
        mine = {"seconds": [spent[way][1:] for way in ways], "starved": [depths.get(way, 0.0) for way in ways]}
        found = list(_gathered(group, mine).values())
        times = {way: slowest([each["seconds"][index] for each in found]) for index, way in enumerate(ways)}
        starved = {way: max(float(each["starved"][index]) for each in found) for index, way in enumerate(ways)}
        if not self._finals:
            self._pooled = {way: [] for way in ways}
        for way, seconds in times.items():
            self._pooled[way] += seconds
        decision, best = decide(self._pooled, starved), fastest(self._pooled, [way for way in ways if way != WHOLE])
        hopes = Contest(self._pooled[WHOLE], self._pooled[best]).gain > LEAST_GAIN
        if not hopes or self._finals == FINALS or (self._finals and decision.way != WHOLE):
            self._keep(decision)
        else:
            finalists = [WHOLE, best]
            if not self._finals:
                self._pooled = {way: [] for way in finalists}
            self._finals, self._turns, self._spans, self._depths = self._finals + 1, turns_of(finalists), [], {}

    def _keep(self, decision: StepDecision) -> None:
        """Keep a way for the rest of the run."""
        self.decision, self.way = decision, decision.way
        for hook in self._waiting.values():
            if hook is not None:
                hook.remove()
        self._waiting, self._spans, self._begun, self._depth = {}, [], None, None
        if dist.get_rank() == 0:
            log.warning("COC_PARALLEL_NUM=auto: %s", decision)


def repeated(boundaries: Sequence[Boundary]) -> Sequence[Boundary]:
    """Return the fewest latest steps that were alike twice in a row, by their ends; the first may have begun early."""
    for number in range(1, min(MOST_IN_TURN, (len(boundaries) - 1) // 2) + 1):
        latest, before = boundaries[-number:], boundaries[-2 * number : -number]
        if [each.passes for each in latest] == [each.passes for each in before]:
            return latest
    return ()


def turns_of(ways: Sequence[int]) -> list[int]:
    """Return the ways of all turns: a round that warms up, those that are timed, and one that asks the queue's depth.

    Each round has an order of its own, the same on all ranks.
    """
    return [way for index in range(ROUNDS + 2) for way in random.Random(index).sample(ways, len(ways))]


def _gathered(group: dist.ProcessGroup, mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    return store_all_gather(group, "the contest of whole steps", mine, DisagreementError, topic="steps")
