"""The instructions that a rank runs, as text, with the bytes that they allocate and free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_parallel.settings import Settings, current_settings
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import Layout, forward
from ascend_parallel.sharding.layout import text as layout_text
from ascend_parallel.sharding.planner.operator_cost import VIEWS
from ascend_parallel.sharding.planner.operator_strategy import operator_name, where
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.runtime.activation_memory import INSIDE, SavedTensors
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.compute_instructions import RecomputeBlock, Run, RunKernel, SyncBoundary
from ascend_parallel.sharding.runtime.instructions import (
    Free,
    Instruction,
    Load,
    Program,
    Redistribute,
    Start,
    Store,
    Wait,
)
from ascend_parallel.sharding.runtime.rank_plan import RankPlan, plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.segments import Segment
from ascend_parallel.text import size_of

# Operators whose results share the memory of their input, as a rule.
SHARING = frozenset(f"{VIEWS} flatten reshape".split())


@dataclass(frozen=True)
class ListedInstruction:
    """An instruction as text; the bytes that it allocates (negative: frees), and the bytes in use after it.

    Bytes are of a rank's activations: what registers hold, and what autograd keeps for backward. They leave out
    parameters, buffers, gradients and the work space of operators.
    """

    text: str
    change: float
    in_use: float


def list_instructions(
    plan: ShardingPlan,
    rank: int | None = None,
    *,
    settings: Settings | None = None,
    recompute: Recompute | None = None,
    gradients: bool = True,
) -> list[ListedInstruction]:
    """Return the instructions of a rank's forward. No process is needed, whatever the size of the mesh.

    rank
        A global rank; None: the first rank of the plan's mesh.
    settings
        Settings of the overlapped operators; None: the current settings.
    gradients
        Whether autograd records the forward, as in training.

    Raises `ValueError` for a rank outside of the mesh.
    """
    rank = plan.mesh.process_ids[0] if rank is None else rank
    coordinate = plan.mesh.coordinate(rank)
    if coordinate is None:
        raise ValueError(f"rank={rank} is not in {plan.mesh}: give one of its ranks")
    rank_plan = plan_for_rank(plan, coordinate, settings or current_settings(), recompute=recompute)
    program = compile_plan(rank_plan, plan.graph, gradients=gradients)
    kept: Mapping[tuple[Value, Layout], float] = {}
    if gradients:
        kept = SavedTensors(rank_plan).kept(rank_plan.checkpointed_blocks.values())
    return list(_Listing(rank_plan, program, kept).lines())


def instructions_as_text(listed: Sequence[ListedInstruction]) -> str:
    """Return the instructions as a table: number, bytes allocated or freed, bytes in use, instruction."""
    lines = [f"{'':5} {'bytes':>9} {'in use':>9}  instruction"]
    for number, each in enumerate(listed):
        change = f"{'-' if each.change < 0 else '+'}{size_of(abs(each.change))}" if each.change else ""
        lines.append(f"{number:5} {change:>9} {size_of(each.in_use):>9}  {each.text}")
    peak = max(listed, key=lambda each: each.in_use)
    lines.append(f"most in use: {size_of(peak.in_use)}, after instruction {listed.index(peak)}")
    lines.append(f"kept for backward and returned: {size_of(listed[-1].in_use)}")
    return "\n".join(lines)


class _Listing:
    """Goes through a program and counts the bytes in use."""

    def __init__(
        self,
        rank_plan: RankPlan,
        program: Program,
        kept: Mapping[tuple[Value, Layout], float],
        lent: Sequence[int] = (),
        in_use: float = 0.0,
    ) -> None:
        """Take a program; for the body of a checkpointed block the inputs, which the caller lends it, too."""
        self._rank_plan, self._program, self._kept, self._lent = rank_plan, program, kept, frozenset(lent)
        self._in_use = in_use
        self._owner: dict[int, int] = {}  # the register whose memory a view holds
        self._sharing = Counter[int]()  # how many views hold the memory of a register

    def lines(self) -> Iterator[ListedInstruction]:
        graph, registers = self._rank_plan.plan.graph, self._program.registers
        for register in self._program.inputs:
            entry = registers[register]
            self._in_use += entry.nbytes
            text = f"%{register} = input {graph.nodes[entry.value.node].source}: {layout_text(entry.layout)}"
            yield ListedInstruction(text, entry.nbytes, self._in_use)
        yield from self._body("")

    def _body(self, indent: str) -> Iterator[ListedInstruction]:
        for instruction in self._program.instructions:
            text, change = indent + self._text(instruction), self._change(instruction)
            if isinstance(instruction, RecomputeBlock):
                yield ListedInstruction(text, 0.0, self._in_use)
                body = instruction.body
                yield from _Listing(self._rank_plan, body, {}, body.inputs, self._in_use)._body(f"{indent}    ")
                self._in_use += change
            else:
                self._in_use += change
                yield ListedInstruction(text, change, self._in_use)

    def _change(self, instruction: Instruction) -> float:
        match instruction:
            case Free():
                return -sum(self._freed(register) for register in instruction.registers)
            case Wait() | SyncBoundary():
                self._share(instruction.writes, instruction.reads)
            case Run() if operator_name(instruction.node) in SHARING:
                self._share(instruction.writes, instruction.reads[:1] * len(instruction.writes))
            case Run() | RunKernel():
                first = instruction.node.name if isinstance(instruction, Run) else instruction.kernel.fused.nodes[0]
                inside = self._kept.get((Value(first), INSIDE), 0.0)
                return inside + sum(self._allocated(register) for register in instruction.writes)
            case _:
                return sum(self._allocated(register) for register in instruction.writes)
        return 0.0

    def _share(self, registers: Sequence[int], of: Sequence[int]) -> None:
        """Note that registers hold the memory of others: it is free after the last of them."""
        for register, other in zip(registers, of, strict=True):
            self._owner[register] = self._owner.get(other, other)
            self._sharing[self._owner[register]] += 1

    def _allocated(self, register: int) -> float:
        entry = self._program.registers[register]
        return 0.0 if entry.held or register in self._lent else entry.nbytes

    def _freed(self, register: int) -> float:
        owner = self._owner.get(register, register)
        self._sharing[owner] -= 1
        if self._sharing[owner] >= 0:
            return 0.0
        entry = self._program.registers[owner]
        saved = self._kept.get((entry.value, forward(entry.layout)), 0.0)
        return max(self._allocated(owner) - saved, 0.0)

    def _text(self, instruction: Instruction) -> str:
        reads = ", ".join(f"%{register}" for register in instruction.reads)
        writes = ", ".join(f"%{register}" for register in instruction.writes)
        left = f"{writes} = " if writes else ""
        match instruction:
            case Load():
                node = self._rank_plan.plan.graph.nodes[instruction.value.node]
                summed = ", gradient summed" if instruction.summed else ""
                return f"{left}load {node.source}: {self._outcome(instruction)}{summed}"
            case Run():
                return f"{left}run {where(instruction.node)}({reads}) -> {self._outcome(instruction)}"
            case Segment():
                names = ", ".join(operator_name(run.node) for run in instruction.runs)
                return f"{left}run compiled({reads}) -> {self._outcome(instruction)}: {names}"
            case RunKernel():
                nodes = [self._rank_plan.plan.graph.nodes[name] for name in instruction.kernel.fused.nodes]
                names = " and ".join(map(where, nodes))
                return f"{left}run overlapped {names}({reads}) -> {self._outcome(instruction)}"
            case Redistribute():
                return f"{left}redistribute {reads}: {self._steps(instruction.redistribution)}"
            case Start():
                return f"start {reads}: {self._steps(instruction.redistributions[0])}"
            case Wait():
                return f"{left}wait: {self._outcome(instruction)}"
            case Store():
                return f"store {instruction.buffer}: {reads}"
            case Free():
                return f"free {', '.join(self._freed_text(each) for each in instruction.registers)}"
            case RecomputeBlock():
                return f"{left}recompute {instruction.module}({reads}):"
        return f"{left}begin and end recomputation here({reads})"

    def _outcome(self, instruction: Instruction) -> str:
        return ", ".join(layout_text(self._program.registers[register].layout) for register in instruction.writes)

    def _freed_text(self, register: int) -> str:
        entry = self._program.registers[register]
        is_saved = not entry.held and (entry.value, forward(entry.layout)) in self._kept
        return f"%{register} (kept for backward)" if is_saved else f"%{register}"

    def _steps(self, redistribution: DifferentiableRedistribution) -> str:
        names = self._rank_plan.plan.mesh.dim_names
        ahead, back = (each.text(names) for each in (redistribution.forward, redistribution.backward))
        return f"{ahead}; backward: {back}"
