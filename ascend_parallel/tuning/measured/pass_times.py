"""Time a layer's passes on a real group, with one chunk and with other chunk sizes.

The timed function is `column_linear` or `row_linear` itself, on random operands of the layer's shapes. A timed
backward therefore includes the weight gradient. A barrier stands before every call. The time of a call is that of
its slowest rank, so every rank has the same numbers and makes the same decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from ascend_parallel.ops import stream_limit
from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.call import Call
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Known, Reason, because
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.ops.registry import choose
from ascend_parallel.ops.rows import Sizes, is_one_gather
from ascend_parallel.ops.settings import StreamLimit
from ascend_parallel.overlap.digests import no_digests
from ascend_parallel.overlap.known import known_in_pass
from ascend_parallel.overlap.layer_shape import BACKWARD, COLUMN, FORWARD, LayerOperator, LayerShape
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.pass_parts import Calls, PassBreakdown, part_calls, rates, repeats
from ascend_parallel.tuning.measured.rank_clock import RankClock

Name = TypeVar("Name", bound=Hashable)
Times = dict[Sizes, list[float]]


class Variant(NamedTuple):
    """How a timed pass runs: with settings, and what is known beside them; None: their plan alone."""

    settings: Settings
    known: Known | None = None


class Tried(NamedTuple):
    """Knows the sizes with which one operator of a layer is tried, and nothing of others."""

    operator: LayerOperator
    sizes: Sizes
    run: str = FORWARD

    def find(self, call: Call) -> tuple[Sizes, Reason] | None:
        """Return the sizes, if the call is the one that is tried."""
        tried = self.operator.matmul
        same = (call.operator, call.shape, call.dtype) == (tried.operator, tried.shape, tried.dtype)
        return (self.sizes, TRIED) if same and self.run == self.operator.direction else None

    def of(self, run: str) -> Tried:
        """Return the same of the other pass."""
        return self._replace(run=run)


TRIED = because("tried")


class TimedLinear:
    """A layer of a shape, with random operands, on which its passes are timed."""

    def __init__(self, shape: LayerShape, group: dist.ProcessGroup, settings: Settings) -> None:
        """Draw the operands from a private generator, so that the run's random state does not change."""
        self.shape, self.group = shape, group
        self._settings = settings
        self._clock = RankClock(group, shape.device)
        generator = torch.Generator().manual_seed(group.rank())
        scatters = shape.kind != COLUMN and shape.sequence_parallel

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device="cpu").to(shape.device, shape.dtype)

        self.x = drawn(shape.own_rows, shape.k).requires_grad_()
        self.weight = drawn(shape.n, shape.k).requires_grad_()
        self.dy = drawn(shape.rows // shape.ranks if scatters else shape.rows, shape.n)

    def time_sizes(self, operator: LayerOperator, candidates: Sequence[Sizes], rounds: int) -> Times:
        """Time one pass with each of these chunk sizes; see `time`."""
        return self.time(operator, {sizes: self.with_sizes(operator, sizes) for sizes in candidates}, rounds)

    def time_limits(
        self, operator: LayerOperator, sizes: Sizes, limits: Sequence[StreamLimit | None], rounds: int
    ) -> dict[StreamLimit | None, list[float]]:
        """Time one pass in these sizes under each limit of the stream's cores; the last that was timed stays."""
        variant = self.with_sizes(operator, sizes)

        def under(limit: StreamLimit | None) -> float:
            self._clock.synchronize()  # what was launched before has the limit that stood then
            stream_limit.put(limit)
            return self._timed_alone(operator, variant)

        return self._clock.rounds({limit: partial(under, limit) for limit in limits}, rounds)

    def time(self, operator: LayerOperator, variants: Mapping[Name, Variant], rounds: int) -> dict[Name, list[float]]:
        """Time one pass with each of `variants`; return the slowest rank's seconds by variant and round.

        A warm-up round comes first. Every round has its own random order.
        """
        return self._clock.rounds(
            {name: partial(self._timed_alone, operator, variant) for name, variant in variants.items()}, rounds
        )

    def breakdown(self, operator: LayerOperator, rounds: int) -> PassBreakdown:
        """Time each part of the pass alone, and matmuls and collectives beside each other."""
        return self.time_with_breakdown(operator, {}, rounds)[0]

    def time_with_breakdown(
        self, operator: LayerOperator, variants: Mapping[Name, Variant], rounds: int
    ) -> tuple[PassBreakdown, dict[Name, list[float]]]:
        """Time variants and parts in the same rounds, so that a slow phase of the machine hits all of them."""
        calls = self.calls(operator)
        runs: dict[Any, Callable[[], float]] = {
            name: partial(self._timed_alone, operator, variant) for name, variant in variants.items()
        }
        runs |= {(name,): partial(self._clock.seconds, call) for name, call in calls.timed.items()}
        times = self._clock.rounds(runs, rounds)
        alone = {name: median(times.pop((name,))) for name in calls.timed}
        matmuls, collectives = repeats(alone["matmul_piece"], alone["pieces"])
        both = self._clock.rounds(
            {until: partial(self._beside, calls, matmuls, collectives, until) for until in (False, True)}, rounds
        )
        compute_rate, collective_rate = rates(
            matmuls * alone["matmul_piece"], collectives * alone["pieces"], median(both[False]), median(both[True])
        )
        breakdown = PassBreakdown(
            rows=calls.rows, count=calls.count, compute_rate=compute_rate, collective_rate=collective_rate, **alone
        )
        return breakdown, times

    def calls(self, operator: LayerOperator) -> Calls:
        """Return the parts of a pass as functions to time."""
        gathers_input = operator.direction == BACKWARD and self.shape.kind == COLUMN and self.shape.sequence_parallel
        gathers_input &= self._settings.recompute_all_gather
        return part_calls(operator, self.group, self.x.detach(), self.shape.k if gathers_input else None)

    def _beside(self, calls: Calls, matmuls: int, collectives: int, until: bool) -> float:
        """Time matmuls beside longer collectives: until the matmuls end, or with `until`, until both end."""
        self._clock.begin_together()
        start = time.perf_counter()
        waits = [calls.start() for _ in range(collectives)]
        for _ in range(matmuls):
            calls.piece()
        if until:
            _wait(waits)
        self._clock.synchronize()
        seconds = time.perf_counter() - start
        if not until:
            _wait(waits)
        return seconds

    def sizes_as_run(self, operator: LayerOperator, sizes: Sizes) -> Sizes:
        """Return the sizes that a call with `sizes` really runs: larger chunks where the matmul's bits need them.

        A collective function: every rank of the group must call it.
        """
        settings, known = self.with_sizes(operator, sizes)
        assert known is not None
        passes = known_in_pass(settings, known, self.shape.kind, operator.direction)
        decision = choose(operator.matmul, settings, passes)
        kept = keep_bits(replace(decision, given=False), self.group, self.weight.device, operator.layout).sizes
        return sizes if is_one_gather(sizes) and decision.kernel == "chunked" else kept

    def with_sizes(self, operator: LayerOperator, sizes: Sizes) -> Variant:
        """Return the variant in which this pass runs in chunks of `sizes`."""
        return Variant(self._settings, Known(plan=Tried(operator, sizes), because=TRIED, alone=True))

    def _timed_alone(self, operator: LayerOperator, variant: Variant) -> float:
        # An outer checkpoint or offload context must not see the tensors saved here.
        with saved_tensors_hooks(_identity, _identity), uncounted():
            return self._timed(operator, variant)

    def _timed(self, operator: LayerOperator, variant: Variant) -> float:
        run: Callable[..., torch.Tensor] = column_linear if self.shape.kind == COLUMN else row_linear
        options: dict[str, Any] = {
            "group": self.group,
            "settings": variant.settings,
            "known": variant.known,
            "sequence_parallel": self.shape.sequence_parallel,
        }
        if operator.direction == FORWARD:
            with torch.no_grad():
                return self._clock.seconds(lambda: run(self.x, self.weight, **options))
        with torch.enable_grad():
            y = run(self.x, self.weight, **options)
        seconds = self._clock.seconds(lambda: torch.autograd.backward(y, self.dy))
        self.x.grad = self.weight.grad = None
        return seconds


def _wait(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def uncounted() -> Iterator[None]:
    """Keep the calls inside out of the run's counts, out of its timeline and out of its digests."""
    counts, recorder = COUNTS.as_dict(), RECORDING.recorder
    RECORDING.recorder = None
    try:
        with no_digests():
            yield
    finally:
        RECORDING.recorder = recorder
        COUNTS.restore(counts)
