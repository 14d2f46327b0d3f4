"""Advises which operators to configure before propagation: a few that reach the least step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import seconds as seconds_of
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.search_tables import SharedTables
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.principles import TITLES
from ascend_parallel.sharding.visualize.proposals import Advised, proposals
from ascend_parallel.text import some_of
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware

# Step times that differ by less than this share are equal.
EQUAL = 1e-6


class Data(TypedDict):
    """The arguments of `propagate` about the batch."""

    data_dim: str | None
    only_data_cuts_batch: bool


@dataclass(frozen=True)
class Advice:
    """The operators to configure for the objective "redistribution".

    advised
        Operators whose strategies, given to propagation, reach the least step time, found greedily: each is needed, and
        none can be left out. Empty if nothing needs configuring.
    seconds
        Predicted time of a step, computing and communicating, with these strategies.
    least
        The least time of a step: that of the plan with the objective "time", which needs no configuration.
    alone
        The time of a step if nothing is configured.
    named
        All operators that the published principles name, with the strategies of the plan of least time.
    plan
        The plan that propagation finds with the strategies, and the objective "redistribution".
    """

    advised: tuple[Advised, ...]
    seconds: float
    least: float
    alone: float
    plan: ShardingPlan
    named: tuple[Advised, ...] = ()

    @property
    def strategies(self) -> dict[str, object]:
        """The proposed strategies, for `propagate`."""
        return {advised.pattern: (advised.in_strategy, None) for advised in self.advised}

    def __str__(self) -> str:
        """Return a text table, with times in ms."""
        return self.text()

    def text(self, *, full: bool = False) -> str:
        """Return a text table, with times in ms; `full` adds all operators that the principles name."""
        lines = [*self.headlines, *_table(self.advised, costs=True)]
        return "\n".join([*lines, "", *self._principles()] if full else lines)

    @property
    def headlines(self) -> list[str]:
        """What has to be configured for each objective, a line each."""
        least = f"{1e3 * self.least:.3f} ms a step"
        if not self.advised:
            return [f"nothing needs configuring: propagation alone reaches {least}, the least, with both objectives"]
        count = f"{len(self.advised)} operator{'s' if len(self.advised) > 1 else ''}"
        return [
            f"objective time: nothing needs configuring, propagation alone reaches {least}, the least",
            f"objective redistribution: propagation alone reaches {1e3 * self.alone:.3f} ms a step; with {count} "
            f"configured {1e3 * self.seconds:.3f} ms, and each is needed",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as plain values for JSON, with times in seconds."""
        return {
            "nothing_needs_configuring": not self.advised,
            "seconds": self.seconds,
            "least_seconds": self.least,
            "alone_seconds": self.alone,
            "advised": [_plain(each) for each in self.advised],
            "named": [_plain(each) for each in self.named],
        }

    def _principles(self) -> list[str]:
        lines = ["The published principles name these operators:", *_table(self.named, costs=False)]
        for number, title in TITLES.items():
            patterns = [advised.pattern for advised in self.named if number in advised.principles]
            lines.append(f"({number}) {title}: {some_of(patterns, 6) or 'none'}")
        return lines


def _plain(advised: Advised) -> dict[str, Any]:
    """Return an operator's advice as plain values; a partial sum's placements are texts."""
    cuts = [[str(each) for each in entry] if isinstance(entry, list) else entry for entry in advised.in_strategy]
    return {**vars(advised), "in_strategy": cuts, "strategy": advised.strategy}


def _table(advised: Sequence[Advised], *, costs: bool) -> list[str]:
    """Return the lines of a table; operators with equal strategies and reasons share their reason."""
    heads = ("configure", "operators", "proposed strategy", *(("left out",) if costs else ()))
    folded: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for each in advised:
        cells = (each.pattern, f"{each.count} x {each.operator}", each.strategy)
        row = (*cells, f"{1e3 * each.seconds:+.3f} ms") if costs else cells
        folded.setdefault((each.operator, each.strategy, each.reason), []).append(row)
    rows = [row for same in folded.values() for row in same]
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, heads, widths)).rstrip()]
    for (_, _, reason), same in folded.items():
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in same]
        lines.append(f"    {reason}")
    return lines


def advise(
    model: torch.nn.Module,
    args: Sequence[Any],
    mesh: ProcessMesh,
    kwargs: Mapping[str, Any] | None = None,
    hardware: str = DEFAULT_HARDWARE,
    data_dim: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Return a few operators of ``model(*args, **kwargs)`` to configure so that a step takes the least time.

    Propagation with the objective "time" finds the plan of the least step time without any strategy. With the objective
    "redistribution" it needs strategies. They come from that plan. The search is greedy: it adds the operator that
    shortens the step most until the least time is reached, then leaves out what is not needed; it propagates once for
    each attempt. A step time includes all collectives, in full,
    and each rank's computation. Of operators that gain the same, the
    search takes one with weights, then one that one of the four published principles names.

    data_dim
        The mesh dimension of data parallelism, as for `propagate`: it alone cuts the batch, and no weight.
    progress
        Called before each propagation with a line that says how far the search is.
    """
    graph = trace(model, args, kwargs)
    data: Data = {"data_dim": data_dim, "only_data_cuts_batch": data_dim is not None}
    automatic = propagate(graph, mesh, objective="time", hardware=hardware, overlap=False, **data)
    return _Search(graph, automatic, hardware, data, progress).advice()


class _Search:
    """Propagations of a graph with some of the strategies of its plan of least time."""

    def __init__(
        self, graph: Graph, automatic: ShardingPlan, hardware: str, data: Data, progress: Callable[[str], None] | None
    ) -> None:
        self.graph, self.automatic, self.hardware, self.data, self.progress = graph, automatic, hardware, data, progress
        self.least, self.proposals, self.tries = step_seconds(automatic, hardware), proposals(automatic), 0
        self.shared = SharedTables()

    def advice(self) -> Advice:
        named = tuple(each for each in self.proposals if each.principles)
        unconfigured = self.plan(frozenset())
        alone = self.seconds(unconfigured)
        if alone <= self.least * (1 + EQUAL):
            return Advice((), alone, self.least, alone, unconfigured, named)
        everything = frozenset(range(len(self.proposals)))
        # The operators that no pattern names alone, and the layouts of results, are free: the least time that can be
        # reached may be above that of the automatic plan.
        goal = max(self.least, self.seconds(self.plan(everything)))
        chosen = self.greedy(goal * (1 + EQUAL))
        plan = self.plan(chosen)
        reached = self.seconds(plan)
        advised = tuple(
            replace(self.proposals[each], seconds=self.seconds(self.plan(chosen - {each})) - reached)
            for each in sorted(chosen)
        )
        return Advice(advised, reached, self.least, alone, plan, named)

    def plan(self, chosen: frozenset[int]) -> ShardingPlan:
        """Return the plan of propagation with the strategies of some proposals."""
        self.tries += 1
        if self.progress is not None:
            self.progress(f"searching operators to configure: propagation {self.tries}")
        advised = [self.proposals[each] for each in sorted(chosen)]
        strategies = {each.pattern: (each.in_strategy, None) for each in advised}
        return propagate(
            self.graph,
            self.automatic.mesh,
            strategies,
            objective="redistribution",
            hardware=self.hardware,
            shared=self.shared,
            **self.data,
        )

    def seconds(self, plan: ShardingPlan) -> float:
        return step_seconds(plan, self.hardware)

    def greedy(self, goal: float) -> frozenset[int]:
        """Return proposals with which a step takes at most `goal` seconds, and without any of which it takes longer."""
        rest = sorted(range(len(self.proposals)), key=lambda each: _rank(self.proposals[each]))
        chosen: list[int] = []
        reached = False
        while rest and not reached:
            gains = [self.seconds(self.plan(frozenset((*chosen, each)))) for each in rest]
            least = min(gains)
            best = next(place for place, seconds in enumerate(gains) if seconds <= least * (1 + EQUAL))
            chosen.append(rest.pop(best))
            reached = least <= goal
        for each in chosen[-2::-1]:
            fewer = [other for other in chosen if other != each]
            if self.seconds(self.plan(frozenset(fewer))) <= goal:
                chosen = fewer
        return frozenset(chosen)


def _rank(advised: Advised) -> int:
    """Return 0 for an operator with weights, 1 for another that a principle names, 2 for the others."""
    return 0 if 1 in advised.principles else 1 if advised.principles else 2


def step_seconds(plan: ShardingPlan, hardware: str = DEFAULT_HARDWARE) -> float:
    """Return the predicted step time of a plan with any objective: its collectives and a rank's computation."""
    shape, model = plan.mesh.shape, CostModel(find_hardware(hardware))
    computing = 0.0
    for node in plan.graph.nodes.values():
        if node.call is not None:
            option = Option(plan.inputs[node.name], plan.output_layouts(node))
            computing += seconds_of(node.call, option, shape, model)
    return plan.seconds + computing
