"""COC_PARALLEL_NUM=auto for experts: in how many groups an exchange runs, measured at its first call.

The caller's own rows and experts run some times in each number of groups, forward and backward, on copies that leave no
trace. The ranks exchange their times and take the same number; bits do not depend on it. Where groups gain nothing the
framework's own layer runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import name_of
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.process_groups.consistency import DisagreementError, exchange
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

CANDIDATES = (1, 2, 4)
ROUNDS = 3  # after one that warms up
LEAST_GAIN = 0.02  # share of the time in one group that more groups must gain


class ExpertGroups:
    """The measured numbers of groups of a run, by process group and problem."""

    def __init__(self, settings: Settings) -> None:
        """Measure if `settings` ask for it."""
        self._settings = settings
        self._measured: WeakKeyDictionary[dist.ProcessGroup, dict[Problem, Settings]] = WeakKeyDictionary()

    def keeps_original(self, problem: Problem, group: dist.ProcessGroup) -> bool:
        """Tell whether the framework's own layer was measured to be as fast."""
        measured = self._measured.get(group, {}).get(problem)
        return measured is not None and not measured.enabled

    def settings_for(
        self, problem: Problem, group: dist.ProcessGroup, run: Callable[[Settings], object], device: torch.device
    ) -> Settings:
        """Return the settings of an exchange; every rank of `group` calls this alike.

        ``run(settings)`` computes a pass and leaves no trace. The settings are not enabled where the framework's own
        layer is as fast.
        """
        settings = self._settings
        if not (settings.auto or settings.tune) or settings.fused or settings.effective_mode != 2:
            return settings
        measured = self._measured.setdefault(group, {})
        if problem not in measured:
            measured[problem] = self._measure(problem, group, run, device)
        return measured[problem]

    def _measure(
        self, problem: Problem, group: dist.ProcessGroup, run: Callable[[Settings], object], device: torch.device
    ) -> Settings:
        counts = [count for count in CANDIDATES if count <= problem.rows]
        times: dict[int, list[float]] = {count: [] for count in counts}
        for turn in range(1 + ROUNDS):
            for count in counts if turn % 2 else counts[::-1]:
                _finish(device)
                begin = time.perf_counter()
                run(in_groups(self._settings, count))
                _finish(device)
                if turn:
                    times[count].append(time.perf_counter() - begin)
        mine = {str(count): median(each) for count, each in times.items()}
        by_rank = exchange(group, f"the measurement of {name_of(problem)}", mine, DisagreementError, topic="experts")
        seconds = {count: max(float(each[str(count)]) for each in by_rank.values()) for count in counts}
        best = min(counts, key=lambda count: seconds[count])
        kept = best if seconds[best] < (1 - LEAST_GAIN) * seconds[1] else 1
        if dist.get_rank() == 0:
            figures = ", ".join(f"{1e3 * spent:.2f} ms in {count}" for count, spent in seconds.items())
            what = f"{kept} groups" if kept > 1 else "the framework's own layer"
            log.info("%s: %s (a pass takes %s)", name_of(problem), what, figures)
        return in_groups(self._settings, kept) if kept > 1 else replace(self._settings, mode=0)


@contextmanager
def without_trace(device: torch.device) -> Iterator[None]:
    """Run a pass on copies inside this context: random states, hooks on saved tensors and checkpoints see nothing."""
    devices = [] if device.type == "cpu" else [device.index]
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        hide_from_selective_checkpoint(),
    ):
        yield


def in_groups(settings: Settings, count: int) -> Settings:
    """Return settings that run exchanges in `count` groups."""
    return replace(settings, num_chunks=count, auto=False, tune=None, mode=2)


def _finish(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
