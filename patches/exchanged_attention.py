"""Attention of a sequence that ranks share, with the settings of a framework: measured, checked and announced."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.key_gather import GATHER, HEADS
from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.ops.unfinished import plain_tensor
from ascend_parallel.overlap.choices import overlap_in_words
from ascend_parallel.overlap.context import (
    Attention,
    attention_call,
    attention_decision,
    attention_in_turn,
    run_attention,
)
from ascend_parallel.overlap.projected import ProjectedTensor, Projection
from ascend_parallel.overlap.selective_checkpoint import without_trace
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.check import CheckedCall, Gradients
from ascend_parallel.patches.coverage import ATTENTION, MORE
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.framework import Framework
from ascend_parallel.process_groups import describe
from ascend_parallel.settings import Settings, current_settings

log = logging.getLogger("ascend_parallel")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Own = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [s, B, N, D] to o [s, B, N, D]

# The frameworks that have logged that exchanges are overlapped.
_ANNOUNCED: WeakSet[Framework] = WeakSet()


def exchanged_attention(
    module: Any,
    operands: Operands,
    attention: Attention,
    group: dist.ProcessGroup,
    framework: Framework | None,
    exchange: str = HEADS,
    own: Own | None = None,
    projection: Projection | None = None,
    by_rows: bool = False,
    batch_first: bool = True,
    gradients: Gradients | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens, [s, B, N, D], with a framework's settings; check it if they ask.

    operands: q, k and v, as `run_attention` takes them. framework: None: overlap is off, and one group runs. exchange:
    `HEADS` or `GATHER`. own: the framework's own exchange around its attention, which runs where groups were measured
    to gain nothing, and with which checks compare; None: one group runs then, and checks have torch's collectives.
    projection, by_rows, batch_first: as of `run_attention`. gradients: reads those of the call for checks.
    """
    if framework is None:
        current_settings().arithmetic.refuse("context parallelism has no tree")
        ATTENTION[module] = 1
        return run_attention(*operands, attention, group=group, settings=Settings(), exchange=exchange)
    _announce(framework, group)
    named, settings = dict(zip(("input", "keys", "values"), operands, strict=True)), framework.settings
    if projection is not None:
        named |= {"weight": projection.weight} | ({} if projection.bias is None else {"bias": projection.bias})

    def ours(known: Known, begin: Begin | None) -> torch.Tensor:
        decision = attention_decision(*operands, group, settings, known, exchange, projection)
        ATTENTION[module] = len(decision.sizes)
        how: dict[str, Any] = {"settings": settings, "known": known, "exchange": exchange, "begin": begin}
        how |= {"projection": projection, "by_rows": by_rows, "batch_first": batch_first}
        return run_attention(*operands, attention, group=group, **how)

    def theirs(own: Own) -> torch.Tensor:
        ATTENTION[module] = "not overlapped: groups of heads gain nothing over the framework's own exchange"
        return own(*operands)

    def original(given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        q, k, v, *layer = given.values()
        o = own(q, k, v) if own else attention_in_turn(q, k, v, attention, group=group, exchange=exchange)
        rows = o.transpose(0, 1) if batch_first else o
        return {"output": o} | ({"projection": linear(rows.flatten(2), *layer)} if layer else {})

    def operators(known: Known, direction: str) -> str:
        decision = attention_decision(*operands, group, settings, known, exchange, projection)
        return f"Its {direction} ran {decision.call.in_words} in groups of heads {list(decision.sizes)}"

    def results(o: torch.Tensor) -> Mapping[str, torch.Tensor]:
        y = o.projected if isinstance(o, ProjectedTensor) else None
        return {"output": o} | ({} if y is None else {"projection": y})

    def checked(known: Known, run: Run) -> CheckedCall:
        return CheckedCall(
            layer=module,
            path="context parallel",
            group=group,
            operands=named,
            run=run,
            results=results,
            original=original,
            operators=lambda: functools.partial(operators, known),
            gradients=Gradients() if gradients is None else gradients,
            of_rank=frozenset(("weight", "bias")),
        )

    call = CoveredCall(
        layer=module,
        group=group,
        device=operands[0].device,
        agreeing=group,
        decide=functools.partial(_known_of, framework, operands, attention, group, exchange, own),
        ours=ours,
        theirs=None if own is None else functools.partial(theirs, own),
        checked=checked,
    )
    output: torch.Tensor = run_covered(framework, call)
    return output


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the integers x [n, ...] of all ranks, [R, n, ...]: positions of tokens, and what belongs to them."""
    of_all = x.new_empty(group.size() * len(x), *x.shape[1:])
    name = "the positions of a sequence that ranks share"
    NamedWork(name, all_gather_single(of_all, x.contiguous(), group), group, x.device).wait()
    return of_all.view(group.size(), *x.shape)


def _known_of(
    framework: Framework,
    operands: Operands,
    attention: Attention,
    group: dist.ProcessGroup,
    exchange: str,
    own: Own | None,
) -> Known:
    """Decide the groups of an exchange, as measured at its first call or for the plan.

    `original` where the framework's own exchange was as fast. What watches a run needs ours: then one group is.
    """
    device = operands[0].device
    watched = framework.verifier is not None or framework.settings.timeline is not None
    in_turn = None if watched else own

    def run(known: Known | None) -> None:
        with without_trace(device), torch.enable_grad():
            q, k, v = (plain_tensor(x).detach().requires_grad_() for x in operands)
            if known is None and in_turn is not None:
                made = in_turn(q, k, v)
            else:
                how: dict[str, Any] = {"known": known or Known(number=1, alone=True), "exchange": exchange}
                made = run_attention(q, k, v, attention, group=group, settings=framework.settings, **how)
            torch.autograd.grad(made, [q, k, v], torch.ones_like(made))

    call = attention_call(*operands, group, exchange)
    known = framework.decider.known_of_exchange(call, group, run, functools.partial(run, None), device)
    original = known.original or framework.decider.keeps_original(call, group)
    return known._replace(original=original and not watched)


def log_exchange(where: str, exchange: str, why: str, *, asked: bool) -> None:
    """Log which exchange runs, and why; a gather that nobody asked for, whose bits are others, is a warning."""
    how = "keys and values are gathered" if exchange == GATHER else "heads are exchanged"
    log.log(
        logging.WARNING if exchange == GATHER and not asked else logging.INFO, "%s: %s, because %s", where, how, why
    )


def _announce(framework: Framework, group: dist.ProcessGroup) -> None:
    """Log once, on the first rank of the group, that exchanges are overlapped."""
    if framework not in _ANNOUNCED:
        _ANNOUNCED.add(framework)
        if group.rank() == 0:
            how = overlap_in_words(framework.settings)
            log.warning("overlap is %s; attention in groups of heads, on %s; %s", how, describe(group), MORE)
