"""Sums of a replica's work by pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_parallel.training.degrees.work import Numbers, OperatorCosts
from ascend_parallel.training.pipeline.stage_assignment import balanced_cuts


@dataclass(frozen=True)
class StageSums:
    """Seconds and bytes by stage.

    runs
        ``[stages, operators]``: how often each operator runs in each stage.
    held
        ``[stages, parameters]``: how many parameters like each are in each stage.
    received
        Bytes of a micro-batch's tensors that a stage receives, from both neighbours.
    sent
        The most bytes that a rank sends between two stages, per micro-batch.
    """

    work: OperatorCosts
    runs: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    received: Numbers
    sent: float

    def sum(self, numbers: Numbers) -> Numbers:
        """Return, per stage, the sum over its operators."""
        return np.asarray(self.runs @ numbers)

    def most(self, numbers: Numbers) -> Numbers:
        """Return, per stage, the largest number of its operators."""
        return np.asarray(np.where(self.runs > 0, numbers, 0.0).max(axis=1))


def stage_sums(work: OperatorCosts, stages: int) -> StageSums:
    """Cut the model into stages as `balanced` does, and add up each."""
    sequence = work.sequence
    cuts = [0]
    if stages > 1:
        cuts = balanced_cuts(_list(np.cumsum(work.whole[sequence])), _list(work.crossing[sequence]), stages)
    runs = np.zeros((stages, len(work.forward)), dtype=np.int64)
    for stage, (start, stop) in enumerate(zip(cuts, [*cuts[1:], len(sequence)], strict=True)):
        np.add.at(runs[stage], sequence[start:stop], 1)
    held = np.array([runs[:, list(parameter.readers)].max(axis=1) for parameter in work.parameters]).T
    crossing = np.array([0.0, *(work.sent[sequence[cut - 1]] for cut in cuts[1:]), 0.0])
    return StageSums(work, runs, held.reshape(stages, -1), crossing[:-1] + crossing[1:], float(crossing.max()))


def _list(numbers: npt.NDArray[Any]) -> list[float]:
    return [float(number) for number in numbers]
