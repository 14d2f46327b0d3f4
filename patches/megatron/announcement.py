"""The line in which a run says, once, that its layers are overlapped, how, and where to look for more."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops import Problem, choose
from ascend_parallel.overlap.choices import backward_settings, column_backward_settings
from ascend_parallel.overlap.summary import overlap_in_words
from ascend_parallel.patches.megatron.coverage import coverage
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.pass_times import Case

log = logging.getLogger("ascend_parallel")

MEASURED = "each new shape is timed when it is first called, for some seconds; "
MORE = (
    "what is replaced: ascend-parallel status; what it hides: COC_TIMELINE=DIR; without this line: COC_LOG_LEVEL=error"
)


class Announcement:
    """Said on rank 0 at the first covered call, once."""

    def __init__(self, settings: Settings, tuned: bool) -> None:
        """Have it said for `settings`; `tuned` if the chunks are found shape by shape while the run goes."""
        self._settings, self._tuned = settings, tuned
        self.said = False

    def say(self, layer: Any, group: dist.ProcessGroup, case: Case | None) -> None:
        """Say it, if it was not yet, for a call of `layer` on `group`, which is `case`; None with an int8 weight.

        The layers counted are those of the outermost module that is running, as much as can be known of the model.
        """
        if self.said:
            return
        self.said = True
        if dist.get_rank() == 0:
            settings, ranks = self._settings, group.size()
            how = MEASURED if self._tuned else _run(case, ranks, settings) if case else ""
            covered = coverage(running_model(layer))
            log.warning("overlap is %s; %s, on %d ranks; %s%s", overlap_in_words(settings), covered, ranks, how, MORE)


def running_model(layer: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost module whose call led to this one, or `layer` itself."""
    found = layer
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Only in torch's own frames, which end with the forward: looking at a frame's locals keeps them alive.
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


def _run(case: Case, ranks: int, settings: Settings) -> str:
    """Say what the first layer runs, where that does not depend on what its ranks have yet to find out."""
    if settings.fused:  # with shared memory or without
        return ""
    backward = (column_backward_settings if case.kind == "column" else backward_settings)(settings)
    text = ""
    for one in case.passes(ranks):
        problem = Problem(one.operator, one.m, one.k, one.n, case.dtype, case.device, ranks)
        choice = choose(problem, settings if one.run == "forward" else backward)
        text += f"first {one.operator}: {choice.kernel} in {len(choice.sizes)}; "
    return text
