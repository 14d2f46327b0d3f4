"""Log once, in a line, that layers are overlapped, how, and where to find more."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops import Problem, choose
from ascend_parallel.overlap.choices import backward_settings, column_backward_settings, overlap_in_words
from ascend_parallel.patches.megatron.coverage import coverage
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.pass_times import Case

log = logging.getLogger("ascend_parallel")

MEASURED = "each new shape is timed when it is first called, for some seconds; "
MORE = (
    "what is replaced: ascend-parallel status; what it hides: COC_TIMELINE=DIR; without this line: COC_LOG_LEVEL=error"
)


def announce(settings: Settings, layer: Any, group: dist.ProcessGroup, case: Case | None, *, tuned: bool) -> None:
    """Log on rank 0 that layers are overlapped, at the first call: of `layer` on `group`.

    case
        The call; None: it has an int8 weight.
    tuned
        Whether the chunks of each shape are measured during the run.

    Counts the layers of the outermost running module, since the whole model is unknown.
    """
    if dist.get_rank() == 0:
        ranks = group.size()
        how = MEASURED if tuned else _first_operators(case, ranks, settings) if case else ""
        covered = coverage(running_model(layer))
        log.warning("overlap is %s; %s, on %d ranks; %s%s", overlap_in_words(settings), covered, ranks, how, MORE)


def running_model(layer: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost module whose call led to the call of `layer`; `layer` itself if it is the outermost."""
    outermost = layer
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Reading a frame's locals keeps them alive, so read only torch's frames, which end with the forward.
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    return outermost


def _first_operators(case: Case, ranks: int, settings: Settings) -> str:
    """Return the first layer's operators in words; empty if its ranks have yet to choose the kernel."""
    if settings.fused:  # with shared memory or without
        return ""
    backward = (column_backward_settings if case.kind == "column" else backward_settings)(settings)
    text = ""
    for operator in case.passes(ranks):
        problem = Problem(operator.operator, operator.m, operator.k, operator.n, case.dtype, case.device, ranks)
        choice = choose(problem, settings if operator.run == "forward" else backward)
        text += f"first {operator.operator}: {choice.kernel} in {len(choice.sizes)}; "
    return text
