"""Assign the operators of a graph to the stages of a pipeline: by marks on modules, by patterns, or balanced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from torch import nn

from ascend_parallel.sharding.graph import CALL, Graph, Node, Value
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.planner.operator_cost import seconds
from ascend_parallel.sharding.planner.operator_strategy import named_nodes, path_matches
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware, find_hardware

Module = TypeVar("Module", bound=nn.Module)
MARK = "pipeline_stage"
# How far a cut may be from an even cut, as a fraction of a stage, to send fewer bytes.
WINDOW = 0.25


class StageError(ValueError):
    """Impossible stages: numbers with gaps, patterns that match nothing, or a stage that reads from a later stage."""


def set_stage(module: Module, stage: int) -> Module:
    """Put a module in a pipeline stage (from 0) and return the module; as ``module.pipeline_stage = stage``."""
    setattr(module, MARK, _checked(stage, type(module).__name__))
    return module


def assign(
    graph: Graph, model: nn.Module, patterns: Mapping[str, Any] | None = None, stages: int | None = None
) -> dict[str, int]:
    """Return the stage of every operator, by its node's name.

    patterns
        Stages by module path, as in ``{"layers.0": 0, "layers.*": 1}``, or by operator (``"layers.*:add"``, as in
        `named_nodes`); the first match counts. Patterns override `pipeline_stage` on the model's modules.
    stages
        The number of stages that there must be; None: any number.

    An operator gets the stage of the innermost module around it that has a stage. An operator outside of all such
    modules gets the latest stage that it reads from; if it reads from none, the first stage that reads it. Parameters,
    buffers and inputs belong to the stages that read them.

    Raises `StageError` for a pattern that matches nothing, stages that are not 0, 1, 2, ... without a gap, and a stage
    that reads from a later stage.
    """
    marked = _marked(graph, model, patterns or {})
    if not marked:
        raise StageError(
            "no module has a pipeline stage: give modules `pipeline_stage` (or set_stage), name patterns, or a number "
            "of stages"
        )
    assignment = _filled(graph, marked)
    _check_order(graph, assignment)
    _check_gaps(set(assignment.values()), stages)
    return assignment


def balanced(graph: Graph, stages: int, hardware: str = "910b") -> dict[str, int]:
    """Return stages of about equal work, cut where few bytes are sent.

    Operators keep the order in which they run, so every cut is possible. The work is the cost model's time of their
    forward and backward on one rank of `hardware`. Each cut is placed within a quarter of a stage around the even cut,
    where the tensors sent across have the fewest bytes; among equal places the nearest.

    Raises `StageError` unless there are at least as many operators as stages.
    """
    calls = [node for node in graph.nodes.values() if node.kind == CALL]
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= len(calls):
        raise StageError(f"stages={stages!r}: give a whole number from 1 to {len(calls)}, the number of operators")
    cuts = balanced_cuts(work_done(calls, hardware), crossing_bytes(graph, calls), stages)
    return {node.name: bisect_right(cuts, place) - 1 for place, node in enumerate(calls)}


def balanced_cuts(done: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Return the first operator of each stage, as `balanced` places them.

    done, crossing
        For each operator the work of all operators up to it, and the bytes that are sent if it ends a stage.
    """
    share, cuts = done[-1] / stages, [0]
    for stage in range(1, stages):
        even, first, last = stage * share, cuts[-1] + 1, len(done) - (stages - stage)
        # Work only grows, so the places near the even cut follow each other; one more on each side for rounding.
        begin = bisect_left(done, even - WINDOW * share, first - 1, last)
        end = bisect_right(done, even + WINDOW * share, first - 1, last)
        places = range(max(first, begin), min(last, end + 1) + 1)
        near = [place for place in places if abs(done[place - 1] - even) <= WINDOW * share]
        near = near or [min(range(first, last + 1), key=lambda place: abs(done[place - 1] - even))]
        cuts.append(min(near, key=lambda place: (crossing[place - 1], abs(done[place - 1] - even))))
    return cuts


def _checked(stage: object, where: str) -> int:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise StageError(f"{where}: pipeline stage {stage!r} is not allowed: give 0, 1, 2, ...")
    return stage


def _marked(graph: Graph, model: nn.Module, patterns: Mapping[str, Any]) -> dict[str, int]:
    """Return the stage of each call that a pattern, or a mark on a module around it, assigns."""
    marks = {path: _mark(path, module) for path, module in model.named_modules(remove_duplicate=False)}
    of_modules = {path: stage for path, stage in marks.items() if stage is not None}
    of_nodes: dict[str, int] = {}
    by_pattern: dict[str, int] = {}
    for pattern, value in patterns.items():
        stage = _checked(value, repr(pattern))
        if ":" in pattern:
            of_nodes = dict.fromkeys((node.name for node in named_nodes(graph, pattern)), stage) | of_nodes
            continue
        named = [path for path in marks if path_matches(path, pattern)]
        if not named:
            raise StageError(f"{pattern!r} names no module; there are {', '.join(path for path in marks if path)}")
        by_pattern = dict.fromkeys(named, stage) | by_pattern
    of_modules |= by_pattern
    stages = {}
    for node in graph.nodes.values():
        inner = _innermost(node.module, of_modules)
        if node.kind == CALL and (inner is not None or node.name in of_nodes):
            stages[node.name] = of_nodes.get(node.name, inner if inner is not None else 0)
    return stages


def _mark(path: str, module: nn.Module) -> int | None:
    return _checked(getattr(module, MARK), path or type(module).__name__) if hasattr(module, MARK) else None


def _innermost(path: str, stages: Mapping[str, int]) -> int | None:
    while path and path not in stages:
        path = path.rpartition(".")[0]
    return stages.get(path)


def _filled(graph: Graph, marked: Mapping[str, int]) -> dict[str, int]:
    """Add the calls without a stage: each gets the latest stage that it reads from, or the first that reads it."""
    stages = dict(marked)
    calls = [node for node in graph.nodes.values() if node.kind == CALL]
    for node in calls:
        before = [stages[value.node] for value in node.inputs if value.node in stages]
        if node.name not in stages and before:
            stages[node.name] = max(before)
    readers = graph.readers()
    for node in reversed(calls):
        after = [stages[name] for value in node.values for name, _ in readers[value]]
        stages.setdefault(node.name, min(after, default=0))
    return {node.name: stages[node.name] for node in calls}


def _check_order(graph: Graph, stages: Mapping[str, int]) -> None:
    for name, stage in stages.items():
        node = graph.nodes[name]
        for value in node.inputs:
            if stages.get(value.node, 0) > stage:
                source, source_stage = _where(graph.nodes[value.node]), stages[value.node]
                raise StageError(
                    f"{_where(node)} of stage {stage} reads what {source} of stage {source_stage} gives: a stage reads "
                    f"from itself and from earlier stages. Put {_where(node)} in stage {source_stage} or later, or "
                    f"{source} in stage {stage} or earlier"
                )


def _where(node: Node) -> str:
    assert node.call is not None
    return f"{node.module or 'the model itself'} ({node.call.name.split('.')[1]})"


def _check_gaps(used: set[int], stages: int | None) -> None:
    missing = sorted(set(range(max(used) + 1)) - used)
    if missing:
        raise StageError(
            f"stage {max(used)} is used, but no operator runs in stage {', '.join(map(str, missing))}: number the "
            "stages 0, 1, 2, ... without a gap"
        )
    if stages is not None and len(used) != stages:
        raise StageError(f"the model's operators are in {len(used)} stages, and there must be {stages}: give {stages}")


def work_done(calls: Sequence[Node], hardware: str | Hardware) -> list[float]:
    """Return, for each call, the seconds of all calls up to it, on one rank."""
    model, whole, sums, total = CostModel(find_hardware(hardware)), (REPLICATE,), [], 0.0
    for node in calls:
        assert node.call is not None
        option = Option((whole,) * len(node.inputs), (whole,) * len(node.outputs))
        total += seconds(node.call, option, (1,), model)
        sums.append(total)
    return sums


def crossing_bytes(graph: Graph, calls: Sequence[Node], size: Callable[[Value], float] | None = None) -> list[float]:
    """Return, for each call, the bytes of the tensors made up to it and read after it; `size`: by default whole."""
    order = {node.name: place for place, node in enumerate(calls)}
    change = [0.0] * (len(calls) + 1)
    for value, readers in graph.readers().items():
        last = max((order[name] for name, _ in readers), default=-1)
        if value.node in order and last > order[value.node]:
            nbytes = graph.meta(value).nbytes if size is None else size(value)
            change[order[value.node]] += nbytes
            change[last] -= nbytes
    return list(accumulate(change[:-1]))
