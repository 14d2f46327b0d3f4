"""COC_REGION=auto: the first passes of a training run in turn layer by layer and in regions; the faster way stays.

A pass is one forward through the layers, and its backward: the time from the first layer's entry to the last layer's
exit, and from the gradient of the last layer's output, or the first recomputed layer, to the end of backward. What lies
between (loss, optimizer, data, other pipeline stages) is not timed. The way changes only where no forward waits for its
backward, so that a recomputed forward runs as the first one did, and a pipeline's micro-batches of one step run alike.

Every decision follows from the calls of the layers, which are the same on all ranks of a tensor-parallel group, and
from figures that all of them have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import finish, runs_ahead
from ascend_parallel.ops.unfinished import finished
from ascend_parallel.process_groups.consistency import DisagreementError, refuse_while_capturing, store_all_gather
from ascend_parallel.tuning.measured.contest import LEAST_GAIN, Contest, may_lose, slowest

log = logging.getLogger("ascend_parallel")

# The way of each turn, True: in regions. The first two warm up. The order of the others is the same for every second
# and for every fourth turn, so that what returns with such a period falls upon both ways alike.
WARM_UP = 2
TURNS = (False, True, False, True, True, False, True, False, False, True)
HOST_BOUND = 0.9  # share of a pass on a device in which the host is busy, so that the device waits for it
# A forward whose backward has not come after so many further forwards is no longer waited for.
MOST_WAITING = 256


@dataclass(frozen=True)
class Decision:
    """The way that is kept.

    region
        Whether modules run as regions where they can.
    layers, regions
        The median seconds of a pass of either way, of the slowest rank; None: nothing was measured.
    why
        The reason, in words.
    """

    region: bool
    layers: float | None
    regions: float | None
    why: str

    def __str__(self) -> str:
        """Return the decision with its figures, in words."""
        way = "regions" if self.region else "layers one by one"
        if self.layers is None or self.regions is None:
            return f"{way}: {self.why}"
        return (
            f"{way}: a pass takes {1e3 * self.layers:.2f} ms in layers and {1e3 * self.regions:.2f} ms in regions; "
            f"{self.why}"
        )


def decide(seconds: Sequence[float], host: Sequence[float] = ()) -> Decision:
    """Return the way to keep, from the seconds of a pass in each turn of `TURNS`.

    host: the seconds in which the host is busy with it, where it runs ahead of a device; they explain what is lost.
    """
    turns = list(zip(TURNS, seconds, strict=True))[WARM_UP:]
    # Turns 2i and 2i + 1 are neighbours of different ways, as are the i-th turns of both.
    contest = Contest(*([each for region, each in turns if region is way] for way in (False, True)))
    layers, regions = contest
    gain, share = contest.gain, f"{100 * abs(contest.gain):.1f} %"
    if contest.won:
        return Decision(True, median(layers), median(regions), f"regions gain {share}")
    asked = f"they must gain more than {100 * LEAST_GAIN:.0f} % and lose at most {may_lose(len(layers))}"
    won = f"regions gain {share} and lose {contest.lost} of {len(layers)} turns; {asked}"
    why = won if gain > 0 else f"regions lose {share}"
    busy = [each for region, each in zip(TURNS[WARM_UP:], host[WARM_UP:], strict=False) if region]
    if busy and median(busy) > HOST_BOUND * median(regions):
        why += f"; the host is busy with them for {1e3 * median(busy):.2f} ms: their Python costs more than they hide"
    return Decision(False, median(layers), median(regions), why)


class Instant(NamedTuple):
    """When the host came to a place, and when the device had done its work there, in monotonic seconds."""

    host: float
    done: float


class Spent(NamedTuple):
    """Seconds between two instants, and those of the host."""

    seconds: float = 0.0
    host: float = 0.0

    @classmethod
    def between(cls, begin: Instant, end: Instant) -> Spent:
        """Return the time from one instant, at which the device was idle, to another."""
        return cls(end.done - begin.done, end.host - begin.done)

    def plus(self, other: Spent, share: int = 1) -> Spent:
        """Return these seconds and a share of others: one part in so many."""
        return Spent(self.seconds + other.seconds / share, self.host + other.host / share)


class RegionChoice:
    """Whether modules run as regions: as the settings say, or, with "auto", as the first passes of a training show."""

    def __init__(self, region: bool | str | None) -> None:
        """Follow the setting `region`; with "auto" begin layer by layer."""
        self.on = region is True
        self.decision: Decision | None = None
        self._trial = Trial() if region == "auto" else None
        self.undecided = self._trial is not None
        """Whether calls are still timed."""
        self._inside = False

    def call(
        self, layer: torch.nn.Module, hidden: torch.Tensor, run: Callable[[], Any], excluded: str | None = None
    ) -> Any:
        """Return ``run()``, a call of `layer` with `hidden`, and time it while nothing is decided.

        excluded
            Why no module can run as a region, or be timed; the layers then stay.

        Layers that run inside this call belong to it.
        """
        if self._trial is None or self._inside or torch.compiler.is_compiling():
            return run()
        if excluded is not None:
            self._keep(Decision(False, None, None, f"nothing is measured: {excluded}"))
            return run()
        self._inside = True
        try:
            return self._timed(self._trial, layer, hidden, run)
        finally:
            self._inside = False

    def ran(self, group: dist.ProcessGroup) -> None:
        """Note that a layer of `group` has left rows unfinished."""
        if self._trial is not None:
            self._trial.group = group

    def __str__(self) -> str:
        """Return the decision, and the figures behind it."""
        if self.decision is not None:
            return f"COC_REGION=auto: {self.decision}"
        if self._trial is not None:
            done = len(self._trial.seconds)
            return f"COC_REGION=auto: not decided yet, {done} of {len(TURNS)} turns of the first passes are done"
        return "in regions where they can run (COC_REGION=1)" if self.on else "layers one by one (COC_REGION=0)"

    def _timed(self, trial: Trial, layer: torch.nn.Module, hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
        if torch._C._current_graph_task_id() != -1:  # a recomputed forward
            trial.in_backward(layer, hidden)
            return run()
        if not layer.training:
            return run()
        refuse_while_capturing("the timing of COC_REGION=auto", DisagreementError)
        if trial.begins(layer):
            self._follow(trial)
        if self._trial is None:
            return run()
        trial.enter(layer, hidden)
        output = run()
        trial.leave(layer, output)
        return output

    def _follow(self, trial: Trial) -> None:
        """Take the way of the turn that begins, or the way to keep."""
        if (decision := trial.next_pass()) is not None:
            self._keep(decision)
        else:
            self.on = trial.region

    def _keep(self, decision: Decision) -> None:
        self._trial, self.undecided, self.decision, self.on = None, False, decision, decision.region
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("COC_REGION=auto: %s", decision)


class Trial:
    """The turns of both ways, timed."""

    def __init__(self) -> None:
        """Begin with the first turn."""
        self.seconds: list[float] = []  # of a pass, in each finished turn
        self.host: list[float] = []  # of the host, in the same
        self.group: dist.ProcessGroup | None = None  # of the modules that ran as a region
        self._first: ReferenceType[torch.nn.Module] | None = None
        self._latest: ReferenceType[torch.nn.Module] | None = None
        self._last: ReferenceType[torch.nn.Module] | None = None  # known after the first pass
        self._layers: WeakSet[torch.nn.Module] = WeakSet()  # between first and last
        self._number = 0  # of the latest pass
        self._waiting: dict[int, Spent] = {}  # pass whose backward has not ended -> what its forward took
        self._finished: list[Spent] = []  # of the turn's passes that have ended
        self._forward_began = Instant(0.0, 0.0)
        self._backward_began = Instant(0.0, 0.0)
        self._runs_ahead = False  # whether the host runs ahead of the device
        self._reached: set[int] = set()  # passes that the running backward has come to

    @property
    def region(self) -> bool:
        """The way of this turn."""
        return TURNS[len(self.seconds)]

    def begins(self, layer: torch.nn.Module) -> bool:
        """Tell whether a pass begins with this layer."""
        if self._first is None:
            self._first = ref(layer)
        return self._first() is layer

    def next_pass(self) -> Decision | None:
        """Begin a pass, and the next turn if no forward waits for its backward; return the way to keep, once known."""
        if self._number and self._last is None:
            self._last = self._latest
        self._waiting = {n: spent for n, spent in self._waiting.items() if self._number - n < MOST_WAITING}
        if self._finished and not self._waiting:
            count = len(self._finished)
            self.seconds.append(sum(each.seconds for each in self._finished) / count)
            self.host.append(sum(each.host for each in self._finished) / count)
            self._finished = []
            if (decision := self._decision()) is not None:
                return decision
        self._number += 1
        self._waiting[self._number] = Spent()
        return None

    def enter(self, layer: torch.nn.Module, hidden: torch.Tensor) -> None:
        """Begin a layer's forward."""
        if self._last is None:
            self._latest = ref(layer)
            self._layers.add(layer)
        if self.begins(layer):
            self._forward_began, self._runs_ahead = now(hidden), runs_ahead(hidden.device.type)

    def leave(self, layer: torch.nn.Module, output: Any) -> None:
        """End a layer's forward."""
        if self._last is not None and self._last() is not layer:
            return
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        if self._last is not None:
            finished(hidden)
            self._waiting[self._number] = Spent.between(self._forward_began, now(hidden))
        if hidden.requires_grad:
            number = self._number
            hidden.register_hook(lambda gradient: self.in_backward(layer, gradient, number))  # type: ignore[no-untyped-call]

    def in_backward(self, layer: torch.nn.Module, like: torch.Tensor, number: int | None = None) -> None:
        """Note that the backward of a pass has come to `layer`; None: of the pass that has waited longest."""
        if layer not in self._layers or not self._waiting:
            return
        if not self._reached:
            self._backward_began = now(like)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end(like))
        self._reached.add(min(self._waiting) if number is None else number)

    def _end(self, like: torch.Tensor) -> None:
        """End a backward, of one or several passes; a second backward through the same forward is not timed."""
        reached, self._reached = self._reached & self._waiting.keys(), set()
        if reached:
            spent = Spent.between(self._backward_began, now(like))
            self._finished += [self._waiting.pop(number).plus(spent, len(reached)) for number in reached]

    def _decision(self) -> Decision | None:
        """Return the way to keep; None: further turns are needed. The last turn exchanges all ranks' figures."""
        if len(self.seconds) >= WARM_UP and self.group is None:
            return Decision(False, None, None, "no layer leaves rows unfinished")
        if len(self.seconds) < len(TURNS) or self.group is None:
            return None
        mine = {"seconds": self.seconds, "host": self.host if self._runs_ahead else []}
        by_rank = store_all_gather(
            self.group, "the decision of COC_REGION=auto", mine, DisagreementError, topic="region"
        )
        seconds, host = (slowest([each[name] for each in by_rank.values()]) for name in mine)
        return decide(seconds, host)


def now(like: torch.Tensor) -> Instant:
    """Return when the host came here, and when the accelerator that holds `like` had done its work."""
    host = time.perf_counter()
    finish(like.device)
    return Instant(host, time.perf_counter())
