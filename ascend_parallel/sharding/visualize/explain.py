"""A plan as text: each operator with its layouts and their reason, each collective with bytes and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ascend_parallel.overlap.choices import chunks_in_words
from ascend_parallel.sharding.graph import CALL, PARAMETER, Node
from ascend_parallel.sharding.layout import text
from ascend_parallel.sharding.planner.operator_cost import amount
from ascend_parallel.sharding.planner.operator_strategy import operator_name, where
from ascend_parallel.sharding.planner.sharding_plan import Conversion, ShardingPlan
from ascend_parallel.sharding.runtime.kernel_cost import exposed_collectives
from ascend_parallel.sharding.visualize.instructions import instructions_as_text, list_instructions
from ascend_parallel.text import size_of
from ascend_parallel.text.folded_rows import fold
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes

WIDTH = 34
# The share of the work that all ranks may compute redundantly without a warning.
REPEATED = 0.5

# What `ShardingPlan.memory` counts of activations: a sum over nodes, which the search bounds. Others ask autograd.
COUNTED = " (each output with a gradient, as memory_limit counts; strategy and plan-training count what autograd saves)"


def explain(plan: ShardingPlan, *, memory: bool = False, full: bool = False, held: RankBytes | None = None) -> str:
    """Return the plan as text, one line per node and one per conversion that communicates.

    memory
        Also list the instructions that the first rank runs, and the bytes of activations that each allocates and frees.
    full
        Show every repeated layer; otherwise nodes that are laid out alike in three or more layers share a line.
    held
        See `summary`.
    """
    lines = [*summary(plan, held), "", *_nodes(plan, full)]
    return "\n".join([*lines, "", instructions_as_text(list_instructions(plan))] if memory else lines)


def summary(plan: ShardingPlan, held: RankBytes | None = None) -> list[str]:
    """Return lines with the plan's cost, collectives and memory, and its warnings.

    held
        What a rank holds, where more is known than the plan: stages, recompute, ZeRO. None: `ShardingPlan.memory`.
    """
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(plan.collectives().items())) or "none"
    memory = held or plan.memory()
    overlaps = plan.overlap is not None or any(map(_in_groups, plan.graph.of_kind(CALL)))
    exposed = f", of which {1e3 * exposed_seconds(plan):.3f} ms stay exposed" if overlaps else ""
    return [
        headline(plan),
        f"collectives of a step, forward and backward: {kinds}; {size_of(plan.nbytes)} a rank, "
        f"{1e3 * plan.seconds:.3f} ms{exposed}",
        f"memory of a rank: parameters {size_of(memory.parameters)}, gradients {size_of(memory.gradients)}, "
        f"optimizer (Adam) {size_of(memory.optimizer)}, activations {size_of(memory.activations)}"
        + (COUNTED if held is None else ""),
        *(f"warning: {warning}" for warning in warnings(plan, memory.total)),
    ]


def headline(plan: ShardingPlan) -> str:
    """Return a line with the plan's operators, mesh, objective and cost."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.sizes.items())
    objective = plan.objective
    if plan.overlap is not None:
        objective += f" of matmuls that run with their collectives ({chunks_in_words(plan.overlap)})"
    proof = "the least there is" if plan.bound is None else f"no plan costs less than {1e3 * plan.bound:.3f} ms"
    calls = len(plan.graph.of_kind(CALL))
    return f"{calls} operators on a mesh of {mesh}; objective {objective}: {1e3 * plan.cost:.3f} ms, {proof}"


def _in_groups(node: Node) -> bool:
    """Tell whether an attention exchanges heads, or gathers keys, in several groups."""
    return node.call is not None and node.call.sequence is not None and node.call.sequence.groups > 1


def exposed_seconds(plan: ShardingPlan) -> float:
    """Return the seconds of collectives that no matmul and no backward hides."""
    return max(0.0, exposed_collectives(plan).seconds - plan.hidden_sums)


def warnings(plan: ShardingPlan, nbytes: float) -> list[str]:
    """Return warnings: ranks that compute the same work, marked weights that are gathered, too little memory.

    nbytes
        Bytes that a rank holds.
    """
    found = []
    for dim, (name, size) in enumerate(plan.mesh.sizes.items()):
        share = _repeated(plan, dim) if size > 1 else 0.0
        if share > REPEATED:
            how_much = "all of the work" if share == 1 else f"{100 * share:.0f} % of the work"
            found.append(f"each of the {size} ranks along {name} repeats {how_much}: shard operators along {name}")
    found += [f"{weight} is marked, and gathered: {what}" for weight, what in _gathered(plan).items()]
    hardware = plan.costs.hardware
    capacity = 0.0 if hardware is None else hardware.memory.capacity
    if hardware is not None and 0 < capacity < nbytes:
        found.append(
            f"a rank holds {size_of(nbytes)}, and {hardware.title} has {size_of(capacity)} a card: shard more, as by a "
            "larger mesh, stages, sharding.zero_stage or recompute"
        )
    return found


def _gathered(plan: ShardingPlan) -> dict[str, str]:
    """Return, by path, the weights that are gathered although their layouts were given, with readers and cost."""
    found = {}
    for one in plan.conversions:
        node = plan.graph.nodes[one.value.node]
        gathers = [step for step in one.ahead.steps if step.kind == "all_gather" and step.nbytes]
        if node.kind == PARAMETER and node.name in plan.configured and gathers:
            seconds, nbytes = 1e3 * one.seconds, size_of(one.nbytes)
            readers = ", ".join(where(plan.graph.nodes[name]) for name in one.reader.split(", ") if name)
            found[node.source] = f"{readers} is computed without its slices ({nbytes}, {seconds:.3f} ms a step)"
    return found


def _repeated(plan: ShardingPlan, dim: int) -> float:
    """Return the share of the work that every rank along a mesh dimension computes redundantly."""
    done = {True: 0.0, False: 0.0}
    for node in plan.graph.nodes.values():
        if node.call is not None:
            layouts = (*plan.inputs[node.name], *plan.output_layouts(node))
            cut = any(layout[dim].kind in ("shard", "partial") for layout in layouts)
            done[cut] += amount(node.call)
    return done[False] / (done[True] + done[False] or 1.0)


def diff(plan: ShardingPlan, other: ShardingPlan) -> list[str]:
    """Return a line for every node that both plans lay out, and lay out differently."""
    lines = []
    for name, node in plan.graph.nodes.items():
        if name in other.graph.nodes:
            ours, theirs = _layouts(plan, node), _layouts(other, node)
            if ours != theirs:
                lines.append(f"{where(node)}: {ours}; other: {theirs}")
    return lines


@dataclass(frozen=True)
class NodeRow:
    """What the text and the page say of a node: before it its conversions, then its layouts."""

    path: str
    operator: str
    is_call: bool
    layouts: str
    why: str
    conversions: tuple[str, ...]
    inside: str

    @property
    def kind(self) -> tuple[object, ...]:
        """What equal nodes of repeated layers share; the names of converted tensors differ."""
        changes = tuple(text.partition(": ")[2] for text in self.conversions)
        return self.operator, self.layouts, self.why, changes, self.inside

    def where(self, label: str) -> str:
        """Return the label with the operator: "layers.0-31.mlp.up linear", or "parameter layers.0-31.up.weight"."""
        return f"{label} {self.operator}".strip() if self.is_call else f"{self.operator} {label}"


def node_rows(plan: ShardingPlan) -> list[NodeRow]:
    """Return the rows of a plan's nodes, in running order."""
    into: dict[str, list[Conversion]] = {}
    for conversion in plan.conversions:
        if conversion.communicates:
            into.setdefault(conversion.reader.split(",")[0], []).append(conversion)
    rows = []
    for node in plan.graph.nodes.values():
        call = node.kind == CALL
        rows.append(
            NodeRow(
                path=node.module if call else node.source,
                operator=operator_name(node) if call else node.kind,
                is_call=call,
                layouts=_layouts(plan, node),
                why=plan.why(node),
                conversions=tuple(_arrow(conversion, plan) for conversion in into.get(node.name, [])),
                inside="; ".join(plan.texts_inside(node.name)),
            )
        )
    returned = tuple(_arrow(conversion, plan) for conversion in into.get("", []))
    return [*rows, NodeRow("", "", False, "", "", returned, "")] if returned else rows


def _nodes(plan: ShardingPlan, full: bool) -> Iterator[str]:
    rows = node_rows(plan)
    for folded in fold([row.path for row in rows], [row.kind for row in rows], full=full):
        row = rows[folded.first]
        yield from (f"    {conversion}{folded.times}" for conversion in row.conversions)
        if row.operator:
            shown = f"{row.where(folded.label)}{folded.times}"
            yield f"{shown:{WIDTH}}  {row.layouts}   [{row.why}]"
        if row.inside:
            yield f"    inside: {row.inside}"


def _layouts(plan: ShardingPlan, node: Node) -> str:
    outputs = ", ".join(map(text, plan.output_layouts(node)))
    if node.kind != CALL:
        return outputs
    return f"({', '.join(map(text, plan.inputs[node.name]))}) -> {outputs}"


def _arrow(conversion: Conversion, plan: ShardingPlan) -> str:
    names, layouts = plan.mesh.dim_names, f"{text(conversion.source)} -> {text(conversion.target)}"
    line = f"{conversion.value.node}: {layouts}   {conversion.ahead.text(names)}"
    return line if conversion.back is None else f"{line}; backward: {conversion.back.text(names)}"


def as_dict(plan: ShardingPlan) -> dict[str, Any]:
    """Return the plan as plain values for JSON, in seconds and bytes."""
    nodes = [
        {
            "name": node.name,
            "kind": node.kind,
            "where": where(node),
            "inputs": [text(layout) for layout in plan.inputs[node.name]],
            "outputs": [text(layout) for layout in plan.output_layouts(node)],
            "why": plan.why(node),
            "inside": "; ".join(plan.texts_inside(node.name)) or None,
        }
        for node in plan.graph.nodes.values()
    ]
    conversions = [
        {
            "tensor": conversion.value.node,
            "readers": conversion.reader,
            "from": text(conversion.source),
            "to": text(conversion.target),
            "forward": conversion.ahead.text(plan.mesh.dim_names),
            "backward": conversion.back.text(plan.mesh.dim_names) if conversion.back else None,
            "seconds": conversion.seconds,
            "bytes": conversion.nbytes,
        }
        for conversion in plan.conversions
    ]
    return {
        "mesh": plan.mesh.sizes,
        "objective": plan.objective,
        "overlapped": plan.overlap is not None,
        "cost": plan.cost,
        "bound": plan.bound,
        "communication": plan.seconds,
        "exposed": exposed_seconds(plan),
        "collectives": plan.collectives(),
        "memory": plan.memory().without_buffers(),
        "nodes": nodes,
        "conversions": conversions,
    }
