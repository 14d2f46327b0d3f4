"""The part of ``bench --moe`` that runs on the ranks: forward and backward of a layer of experts.

Gated experts get the rows of all ranks; beside them a shared expert may run on a rank's own rows. All variants compute
the same: in turn ("serial"), with the shared expert and weight gradients under whole all-to-alls ("no cut"), and in
groups of experts with both. T_comp and T_comm are those of the experts alone and of the four all-to-alls alone, whole
or in pieces: gloo sends whole ones in one direction after the other if a rank comes late.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import linear, silu

from ascend_parallel.ops.call import Exchange, experts_exchange
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts
from ascend_parallel.ops.part_exchange import all_to_all
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.overlap.experts import LocalExperts, SharedExpert, experts_in_turn, run_experts
from ascend_parallel.settings import Settings
from ascend_parallel.text import parse_int, shown
from ascend_parallel.tuning.bench.exchanges import AUTO, COMMUNICATION, COMPUTATION, SERIAL, Run, plan_of, times_of
from ascend_parallel.tuning.bench.shapes import MOST
from ascend_parallel.tuning.cost_model.tables import PlanningError
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.decider import Decider

NO_CUT = "no cut"
PIECES = {COMMUNICATION: 1, f"{COMMUNICATION} in 4 pieces": 4}
SEED = 7


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """A layer of experts.

    experts  of all ranks together
    rows     that each rank sends, over all experts; the experts' loads differ at random
    hidden   width of a row
    inner    width inside an expert
    shared   width inside the shared expert; 0: none
    grouped  torch's grouped matmul computes a group's experts in one call, forward and backward
    """

    experts: int
    rows: int
    hidden: int
    inner: int
    shared: int = 0
    dtype: str = "float32"
    grouped: bool = False

    @classmethod
    def parse(cls, text: str, shared: int, dtype: str, ranks: int) -> ExpertsCase:
        """Read ``EXPERTS,ROWS,HIDDEN,INNER``; raises `PlanningError` for another text."""
        sizes = [parse_int(part) or 0 for part in text.split(",")]
        if len(sizes) != 4 or not all(0 < size <= MOST for size in sizes) or sizes[0] % ranks or sizes[0] // ranks < 2:
            raise PlanningError(
                f"--moe {shown(text)} is not allowed: give EXPERTS,ROWS,HIDDEN,INNER, with two experts or more on "
                f"each of the {ranks} ranks, such as {4 * ranks},2048,1024,512, each up to {MOST}"
            )
        experts, rows, hidden, inner = sizes
        return cls(experts=experts, rows=rows, hidden=hidden, inner=inner, shared=shared, dtype=dtype)

    def parts(self, ranks: int) -> int:
        """Return the number of a rank's experts, of which groups are made."""
        return self.experts // ranks

    def __str__(self) -> str:
        """Return the case in words."""
        shared = f", a shared expert of {self.shared}" if self.shared else ""
        experts = "grouped experts" if self.grouped else "experts"
        return (
            f"{self.experts} {experts} of {self.inner}{shared}, {self.rows} rows of {self.hidden} a rank, {self.dtype}"
        )


def measure(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, by variant and round; T_comp and T_comm are among the variants."""
    layer = _Layer(ExpertsCase(**case), group)
    runs: dict[str, Run] = {COMPUTATION: layer.compute}
    runs |= {name: functools.partial(layer.communicate, pieces) for name, pieces in PIECES.items()}
    runs[SERIAL] = layer.serial
    runs[NO_CUT] = functools.partial(layer.overlapped, 1)
    runs |= {f"{count} groups": functools.partial(layer.overlapped, count) for count in groups}
    report("auto")
    runs[AUTO], chosen = layer.automatic()
    return {"times": times_of(runs, group, rounds), "auto": chosen, "torch": torch.__version__}


def tune(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int]) -> dict[str, Any]:
    """Return a plan with the fastest groups of the layer, as COC_TUNE measures them."""
    layer = _Layer(ExpertsCase(**case), group)
    report("timing groups of experts")
    return plan_of(layer.exchange, group, layer.overlapped, layer.serial, groups)


class _Layer:
    """The operands of this rank, and the variants of a forward and backward."""

    def __init__(self, case: ExpertsCase, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()
        local, dtype = case.experts // group.size(), getattr(torch, case.dtype)
        draw = np.random.default_rng(SEED)
        shares = draw.uniform(0.5, 1.5, case.experts)
        loads = [
            draw.multinomial(case.rows, shares / shares.sum()).reshape(-1, local).tolist() for _ in range(self._ranks)
        ]
        self._counts = RowCounts(sent=loads[group.rank()], received=[each[group.rank()] for each in loads])
        (self._whole,) = self._counts.groups((local,))

        def drawn(*shape: int) -> torch.Tensor:
            made: torch.Tensor = torch.randn(shape) / shape[-1] ** 0.5
            return made.to(dtype).requires_grad_()

        self._rows, self._dy = drawn(case.rows, case.hidden), torch.ones(case.rows, case.hidden, dtype=dtype)
        self._up = drawn(local, 2 * case.inner, case.hidden)
        self._down = drawn(local, case.hidden, case.inner)
        self._shared = [drawn(2 * case.shared, case.hidden), drawn(case.hidden, case.shared)] if case.shared else []
        self._run_group = _run_grouped if case.grouped else _run_group
        self._received = drawn(sum(self._whole.received_sizes), case.hidden)

    @property
    def exchange(self) -> Exchange:
        """The exchange, as its number of groups is chosen."""
        return experts_exchange(self._rows, self._counts.experts, self._group)

    def overlapped(self, groups: int) -> None:
        """Run the layer's operator in `groups` groups of experts."""
        local = LocalExperts(run=self._run_group, weights=[self._up, self._down])
        shared = None
        if self._shared:
            shared = SharedExpert(x=self._rows, parts=self._shared_parts(), parameters=self._shared)
        options: dict[str, Any] = {"settings": Settings(), "known": Known(number=groups), "shared": shared}
        y, shared_y = run_experts(self._rows, self._counts, local, group=self._group, **options)
        self._backward(y, shared_y)

    def serial(self) -> None:
        """Run all-to-all, experts, all-to-all and the shared expert in turn, with torch's own autograd."""
        local = LocalExperts(run=self._run_group, weights=[self._up, self._down])
        y = experts_in_turn(self._rows, self._counts, local, group=self._group)
        self._backward(y, self._run_shared())

    def compute(self) -> None:
        """Run the experts and the shared expert on rows that are there."""
        made = self._run_group(self._whole, self._received, None, [self._up, self._down])
        made.backward(torch.ones_like(made))  # type: ignore[no-untyped-call]
        if (y := self._run_shared()) is not None:
            y.backward(self._dy)  # type: ignore[no-untyped-call]

    def automatic(self) -> tuple[Run, str]:
        """Return the variant that COC_PARALLEL_NUM=auto takes, and its name."""
        found = Decider(Settings(auto=True), keeps=False).known_of_exchange(
            self.exchange, self._group, lambda tried: self.overlapped(tried.number), self.serial, self._rows.device
        )
        if found.original:
            return self.serial, SERIAL
        return functools.partial(self.overlapped, found.number), f"{found.number} groups"

    def communicate(self, pieces: int) -> None:
        """Run the four all-to-alls of a forward and backward, each in pieces that are started together."""
        rows, received = self._rows.detach(), self._received.detach()
        groups = self._counts.groups(split_rows(self._counts.experts, pieces, 1))
        for _ in range(2):
            for sent, out, there in ((rows, received, True), (received, rows, False)):
                sizes = [(each.received_sizes, each.sent_sizes) for each in groups]
                if not there:
                    sizes = [(theirs, ours) for ours, theirs in sizes]
                parts = torch.split_with_sizes(sent, [sum(theirs) for _, theirs in sizes])
                places = torch.split_with_sizes(torch.empty_like(out), [sum(ours) for ours, _ in sizes])
                works = [
                    all_to_all(place, part, ours, theirs, self._group)
                    for place, part, (ours, theirs) in zip(places, parts, sizes, strict=True)
                ]
                for work in works:
                    work.wait()

    def _shared_parts(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        up, down = self._shared
        return [lambda x: _gated(x, up), lambda x: linear(x, down)]

    def _run_shared(self) -> torch.Tensor | None:
        if not self._shared:
            return None
        first, second = self._shared_parts()
        return second(first(self._rows))

    def _backward(self, y: torch.Tensor, shared_y: torch.Tensor | None) -> None:
        results = [y] if shared_y is None else [y, shared_y]
        torch.autograd.backward(results, [self._dy] * len(results))


def _gated(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, value = linear(x, up).chunk(2, dim=-1)
    return silu(gate) * value


def _run_group(group: ExpertGroup, rows: torch.Tensor, _: object, weights: Any) -> torch.Tensor:
    """Compute experts one by one, of rows in the order [source][expert]."""
    parts = torch.split_with_sizes(group.by_expert(rows), group.expert_sizes)
    outputs = [linear(_gated(part, up), down) for part, up, down in zip(parts, *weights, strict=True)]
    return group.by_source(torch.cat(outputs))


def _run_grouped(group: ExpertGroup, rows: torch.Tensor, _: object, weights: Any) -> torch.Tensor:
    """Compute experts in one grouped matmul for each weight, of rows in the order [source][expert]."""
    ends = torch.tensor(group.expert_sizes).cumsum(0).to(torch.int32)
    up, down = (weight.transpose(1, 2) for weight in weights)
    gate, value = torch._grouped_mm(group.by_expert(rows), up, offs=ends).chunk(2, dim=-1)
    return group.by_source(torch._grouped_mm(silu(gate) * value, down, offs=ends))
