"""A compiled plan as the calls of an eager forward run it: each call runs the operators that it ran when traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ascend_parallel.sharding.graph import CALL, INPUT, FunctionCall, Value
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.compute_instructions import Run, RunKernel
from ascend_parallel.sharding.runtime.instructions import Instruction, Step, Store
from ascend_parallel.sharding.runtime.rank_plan import RankPlan

LocalTensors = dict[int, torch.Tensor]
"""This rank's part of a tensor, by register: as it is produced, and in the layout that its readers share."""


class EagerProgram:
    """The instructions of a plan by the calls of the model's Python.

    own
        The register of each tensor as it is produced.
    kept
        The registers that later calls read too. Every other register is freed with the call that reads it.
    held
        The tensors that the model holds: parameters, buffers and constants.
    producers
        By register, the instruction that fills it.
    calls
        By the number of a call, its `Run`s and `RunKernel`s in order.
    stores
        Writes of buffers, after the last call.
    """

    def __init__(self, rank_plan: RankPlan, calls: Sequence[FunctionCall]) -> None:
        """Compile the plan; runs no collective."""
        fused_plan, graph = rank_plan.fused_plan, rank_plan.plan.graph
        program = compile_plan(rank_plan, graph, gradients=False)  # what runs again, torch's checkpoint decides
        self.registers, self.inputs, self.outputs = program.registers, program.inputs, program.outputs
        shared: dict[Value, int] = {}
        self.own: dict[Value, int] = {}
        for number, register in enumerate(program.registers):
            if register.layout == fused_plan.layouts[register.value]:
                self.own.setdefault(register.value, number)
            elif register.layout == fused_plan.shared_layouts.get(register.value) and number not in program.inputs:
                shared.setdefault(register.value, number)
        for number in program.inputs:  # on a mesh dimension of one rank the caller's layout may stand for the plan's
            self.own.setdefault(program.registers[number].value, number)
        self.kept = frozenset((*self.own.values(), *shared.values()))
        self.held = frozenset(value for value in self.own if graph.nodes[value.node].kind not in (CALL, INPUT))
        listed = program.instructions
        self.producers = {register: instruction for instruction in listed for register in instruction.writes}
        self.stores = tuple(instruction for instruction in listed if isinstance(instruction, Store))
        self.calls = tuple(self._instructions(call) for call in calls)

    def _instructions(self, call: FunctionCall) -> tuple[Run | RunKernel, ...]:
        found = [self.producers[self.own[value]] for node in call.nodes for value in node.values]
        once = {id(instruction): instruction for instruction in found}.values()
        return tuple(instruction for instruction in once if isinstance(instruction, (Run, RunKernel)))


class CallRegisters:
    """The registers of a call. What an instruction reads and is not there yet is loaded, or redistributed, for it."""

    def __init__(
        self, program: EagerProgram, step: Step, tensors: Mapping[Value, LocalTensors], held: dict[Value, LocalTensors]
    ) -> None:
        """Take the parts of the call's arguments, and those of what the model holds, which stay for later calls."""
        self.tensors = dict(tensors)
        self._program, self._step, self._held = program, step, held
        self._own: LocalTensors = {}

    def __getitem__(self, register: int) -> torch.Tensor:
        """Return the value of a register."""
        tensors = self._where(register)
        if register not in tensors:
            instruction: Instruction = self._program.producers[register]
            assert not isinstance(instruction, (Run, RunKernel)), f"{self._program.registers[register]} has not run"
            instruction.run(self, self._step)
        return tensors[register]

    def __setitem__(self, register: int, tensor: torch.Tensor) -> None:
        """Fill a register."""
        self._where(register)[register] = tensor

    def _where(self, register: int) -> LocalTensors:
        if register not in self._program.kept:
            return self._own
        value = self._program.registers[register].value
        return (self._held if value in self._program.held else self.tensors).setdefault(value, {})
