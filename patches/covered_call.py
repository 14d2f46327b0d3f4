"""A call of a patched forward that this package covers: what decides how it is cut, who runs it, who checks it.

A replaced forward finds out, alike on all ranks, whether its call is covered. It then describes the call as a
`CoveredCall` and hands it to `run_covered`, whichever framework it is of: ranks agree, what cuts the call is asked
once, and the framework's own code, ours, or both beside each other run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.decision import Known
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.check import CheckedCall
from ascend_parallel.patches.framework import Framework

Run = Callable[[Begin | None], Any]


@dataclass(kw_only=True, slots=True)  # not frozen: that takes three times as long to make, and each call makes one
class CoveredCall:
    """A covered call of a layer.

    layer
        The module.
    group, device
        The ranks that a plan must fit, with their device: those of the layer's collectives.
    agreeing
        The ranks that compare settings before the call is decided. None: the first collective of `ours` has them do it,
        because the forward of some layers communicates nothing, and may run on one rank alone.
    decide
        Returns what is known of the call, which with the settings decides what cuts it.
    ours
        Runs the call with what is known of it; its second argument observes the start of the backward.
    theirs
        Runs the framework's own code, where that is known to be as fast. None: it has none for this call; ours runs.
    checked
        Puts the call, which its second argument runs, beside the framework's own code. None, or a function that returns
        None: it cannot be checked.
    """

    layer: Any
    group: dist.ProcessGroup
    device: torch.device
    agreeing: dist.ProcessGroup | None
    decide: Callable[[], Known]
    ours: Callable[[Known, Begin | None], Any]
    theirs: Callable[[], Any] | None
    checked: Callable[[Known, Run], CheckedCall | None] | None


def run_covered(framework: Framework, call: CoveredCall) -> Any:
    """Return the output of a call; compare it with the framework's own where COC_VERIFY asks."""
    if call.agreeing is not None:
        framework.agree(call.group, call.device, call.agreeing)
    known = call.decide()
    if framework.verifier is None or call.checked is None:
        return call.theirs() if known.original and call.theirs is not None else call.ours(known, None)
    run = functools.partial(_ours_or_theirs, call, known)
    checked = call.checked(known, run)
    return run(None) if checked is None else framework.verifier.run(checked)


def _ours_or_theirs(call: CoveredCall, known: Known, begin: Begin | None) -> Any:
    """Run a call that is checked."""
    return call.theirs() if known.original and call.theirs is not None else call.ours(known, begin)
