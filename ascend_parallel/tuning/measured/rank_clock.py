"""Time calls on all ranks of a group together: the time of a call is that of its slowest rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import runs_ahead, seconds_of
from ascend_parallel.ops.pending import NamedWork, run_collective

Name = TypeVar("Name", bound=Hashable)


class RankClock:
    """The clock of a group's ranks, on one type of device.

    A barrier stands before every timed call. On a device events time it, and the host (`seconds_of`). Every rank gets
    the same numbers, so all ranks decide alike.
    """

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        """device: the type, "cpu", "npu" or "cuda"; the rank's device is the current one."""
        self._group, self._device = group, device

    def rounds(
        self, runs: Mapping[Name, Callable[[], float]], rounds: int, progress: Callable[[int], object] = lambda _: None
    ) -> dict[Name, list[float]]:
        """Call each of `runs` once a round, in random order; return the slowest rank's seconds by round.

        runs: functions that return their seconds on this rank. A warm-up round comes first. progress: called with the
        number of each round; that of the warm-up is 0.
        """
        times: list[list[float]] = []
        order = list(enumerate(runs.values()))
        for index in range(rounds + 1):
            progress(index)
            random.Random(index).shuffle(order)  # the same order on every rank
            by_place = {place: run() for place, run in order}
            times.append([by_place[place] for place in range(len(order))])
        return dict(zip(runs, self._slowest(times[1:]).t().tolist(), strict=True))

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call on this rank."""
        self.begin_together()
        return seconds_of(call, self._device)

    def begin_together(self) -> None:
        """Wait for this rank's stream, then for all ranks."""
        self.synchronize()
        work, device = dist.barrier(self._group, async_op=True), torch.device(self._device)
        NamedWork("the start of a measurement", work, self._group, device).wait()

    def synchronize(self) -> None:
        """Wait for the work of the current stream; another stream may wait for other ranks."""
        if runs_ahead(self._device):
            torch.accelerator.current_stream().synchronize()

    def _slowest(self, times: list[list[float]]) -> torch.Tensor:
        """Return the slowest rank's seconds by round and call, on the CPU."""
        slowest = torch.tensor(times, dtype=torch.float64 if self._device == "cpu" else torch.float32)
        slowest = slowest.to(self._device)
        run_collective("the slowest rank's time", dist.all_reduce, slowest, group=self._group, op=dist.ReduceOp.MAX)
        return slowest.cpu()
