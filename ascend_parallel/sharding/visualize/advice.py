"""Advises which operators to configure before propagation: the fewest that reach the least step time."""

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
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.principles import TITLES
from ascend_parallel.sharding.visualize.proposals import Advised, Proposal, in_strategy, proposals
from ascend_parallel.sharding.visualize.smallest_set import smallest_set
from ascend_parallel.text import some_of
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware

# Step times that differ by less than this share are equal.
EQUAL = 1e-6
# The propagations to make for the smallest set.
MOST = 300
# What an operator weighs in the search: of sets of the same size that with the most operators with weights, then that
# with the most operators that a principle names.
WITH_WEIGHTS, NAMED, OTHER = 1.0, 1.0001, 1.01


class Data(TypedDict):
    """The arguments of `propagate` about the batch."""

    data_dim: str | None
    only_data_cuts_batch: bool


@dataclass(frozen=True)
class Advice:
    """The operators to configure for the objective "redistribution".

    advised
        The smallest set of operators whose strategies, given to propagation, reach the least step time; empty if
        nothing needs configuring.
    smallest
        Whether no smaller set does; otherwise too many propagations would have been needed to tell.
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
    smallest: bool = True

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
        no_fewer = "no fewer" if self.smallest else "fewer may"
        return [
            f"objective time: nothing needs configuring, propagation alone reaches {least}, the least",
            f"objective redistribution: propagation alone reaches {1e3 * self.alone:.3f} ms a step; with {count} "
            f"configured {1e3 * self.seconds:.3f} ms, and {no_fewer} reach it",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as plain values for JSON, with times in seconds."""
        return {
            "nothing_needs_configuring": not self.advised,
            "seconds": self.seconds,
            "least_seconds": self.least,
            "alone_seconds": self.alone,
            "smallest": self.smallest,
            "advised": [_plain(each) for each in self.advised],
            "named": [_plain(each) for each in self.named],
        }

    def _principles(self) -> list[str]:
        """Return lines with what the principles name."""
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
    """Return the fewest operators of ``model(*args, **kwargs)`` to configure so that a step takes the least time.

    Propagation with the objective "time" finds the plan of the least step time without any strategy. With the objective
    "redistribution" it needs strategies. They come from that plan; the smallest set of operators is searched for by
    propagating with some of them, from a few to hundreds of times. A step time includes all collectives and each rank's
    computation. Of sets of the same size the search prefers operators with weights, then operators that one of the four
    published principles names.

    data_dim
        The mesh dimension of data parallelism, as for `propagate`: it alone cuts the batch, and no weight.
    progress
        Called before each propagation with a line that says how far the search is.
    """
    graph = trace(model, args, kwargs)
    data: Data = {"data_dim": data_dim, "only_data_cuts_batch": data_dim is not None}
    automatic = propagate(graph, mesh, objective="time", hardware=hardware, **data)
    return _Search(graph, automatic, hardware, data, progress).advice()


class _Search:
    """Propagations of a graph with some of the strategies of its plan of least time."""

    def __init__(
        self, graph: Graph, automatic: ShardingPlan, hardware: str, data: Data, progress: Callable[[str], None] | None
    ) -> None:
        self.graph, self.automatic, self.hardware, self.data, self.progress = graph, automatic, hardware, data, progress
        self.least, self.proposals, self.tries = step_seconds(automatic, hardware), proposals(automatic), 0

    def advice(self) -> Advice:
        named = tuple(each.advised for each in self.proposals if each.advised.principles)
        unconfigured = self.plan(frozenset())
        alone = self.seconds(unconfigured)
        if alone <= self.least * (1 + EQUAL):
            return Advice((), alone, self.least, alone, unconfigured, named)
        everything = frozenset(range(len(self.proposals)))
        # The operators that no pattern names alone, and the layouts of results, are free: the least time that can be
        # reached may be above that of the automatic plan.
        goal = max(self.least, self.seconds(self.plan(everything)))
        weights = [_weight(each.advised) for each in self.proposals]
        chosen, smallest = smallest_set(weights, lambda some: self.attempt(some, goal), MOST)
        plan = self.plan(chosen)
        reached = self.seconds(plan)
        advised = tuple(
            replace(self.proposals[each].advised, seconds=self.seconds(self.plan(chosen - {each})) - reached)
            for each in sorted(chosen)
        )
        return Advice(advised, reached, self.least, alone, plan, named, smallest)

    def plan(self, chosen: frozenset[int]) -> ShardingPlan:
        """Return the plan of propagation with the strategies of some proposals."""
        self.tries += 1
        if self.progress is not None:
            self.progress(f"searching the fewest operators to configure: propagation {self.tries}")
        advised = [self.proposals[each].advised for each in sorted(chosen)]
        strategies = {each.pattern: (each.in_strategy, None) for each in advised}
        return propagate(
            self.graph, self.automatic.mesh, strategies, objective="redistribution", hardware=self.hardware, **self.data
        )

    def seconds(self, plan: ShardingPlan) -> float:
        return step_seconds(plan, self.hardware)

    def attempt(self, chosen: frozenset[int], goal: float) -> frozenset[int] | None:
        """Return None if the chosen strategies reach the goal, else the proposals that the plan has anyway."""
        plan = self.plan(chosen)
        if self.seconds(plan) <= goal * (1 + EQUAL):
            return None
        return chosen | {index for index, each in enumerate(self.proposals) if _has(plan, each)}


def _has(plan: ShardingPlan, proposal: Proposal) -> bool:
    """Tell whether a plan gives a proposal's operators the proposed strategy."""
    return all(in_strategy(plan, node) == proposal.advised.in_strategy for node in proposal.nodes)


def _weight(advised: Advised) -> float:
    return WITH_WEIGHTS if 1 in advised.principles else NAMED if advised.principles else OTHER


def step_seconds(plan: ShardingPlan, hardware: str = DEFAULT_HARDWARE) -> float:
    """Return the predicted step time of a plan with any objective: its collectives and a rank's computation."""
    shape, model = tuple(plan.mesh.shape), CostModel(find_hardware(hardware))
    computing = 0.0
    for node in plan.graph.nodes.values():
        if node.call is not None:
            option = Option(plan.inputs[node.name], plan.output_layouts(node))
            computing += seconds_of(node.call, option, shape, model)
    return plan.seconds + computing
