"""The instructions of a compiled plan. A rank runs them in order; each reads and writes numbered registers.

load          reads a parameter, buffer or constant that the rank holds
run           runs the rank's part of an operator, or an overlapped kernel
redistribute  changes a tensor's layout, with the collectives that this takes
start, wait   the same in two instructions, so that collectives run beside the instructions between
recompute     runs a list of instructions that backward runs a second time
store         writes a buffer that the forward updated, such as running statistics
free          drops tensors after their last reader
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ascend_parallel.sharding.graph import Node, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.rules import LocalCall
from ascend_parallel.sharding.rules.local import AllReduce
from ascend_parallel.sharding.runtime.async_redistribute import start
from ascend_parallel.sharding.runtime.gradient_reduction import GradientReducer
from ascend_parallel.sharding.runtime.overlapped_linear import Kernel
from ascend_parallel.sharding.runtime.recompute_autograd import (
    Results,
    Tensors,
    recompute_in_backward,
    sync_boundary,
)
from ascend_parallel.sharding.runtime.redistribute_autograd import DifferentiableRedistribution
from ascend_parallel.sharding.runtime.regather import regather_in_backward

Registers = list[Any]


class Holder(Protocol):
    """Holds the rank's parameters, buffers and constants (`ShardedModule`)."""

    @property
    def gradients(self) -> GradientReducer:
        """Sums the gradients of parameters."""

    def load(self, name: str) -> torch.Tensor:
        """Return the rank's part of a parameter, buffer or constant by its node."""

    def store(self, name: str, value: torch.Tensor) -> None:
        """Write a buffer."""


@dataclass(slots=True)
class Step:
    """What a forward has besides registers.

    stream
        Names the forward's random numbers.
    results
        In a recompute region: the results that its first run keeps for its second.
    """

    holder: Holder
    stream: str
    results: Results | None = None


class Instruction(Protocol):
    """One entry of a program."""

    @property
    def reads(self) -> Sequence[int]:
        """The registers that it reads."""

    @property
    def writes(self) -> Sequence[int]:
        """The registers that it writes."""

    def run(self, registers: Registers, step: Step) -> None:
        """Run on this rank."""


@dataclass(frozen=True)
class Register:
    """A place for a rank's part of a tensor.

    nbytes
        Bytes of the rank's part.
    held
        Whether the tensor is a parameter, buffer or constant, which the rank holds anyway.
    """

    value: Value
    layout: Layout
    nbytes: float
    held: bool = False


@dataclass(frozen=True)
class Program:
    """The instructions of a forward, or of a part of it.

    inputs
        The registers that are filled before the first instruction.
    outputs
        The registers that are read after the last instruction.
    """

    instructions: tuple[Instruction, ...]
    registers: tuple[Register, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, tensors: Sequence[torch.Tensor], step: Step) -> list[torch.Tensor]:
        """Run all instructions on the inputs, and return the outputs."""
        registers: Registers = [None] * len(self.registers)
        for register, tensor in zip(self.inputs, tensors, strict=True):
            registers[register] = tensor
        for instruction in self.instructions:
            instruction.run(registers, step)
        return [registers[register] for register in self.outputs]


@dataclass(frozen=True)
class Load:
    """Read the rank's part of a parameter, buffer or constant.

    summed
        Whether the ranks' gradients of the parameter are summed.
    """

    value: Value
    target: int
    summed: bool

    @property
    def reads(self) -> Sequence[int]:
        """None."""
        return ()

    @property
    def writes(self) -> Sequence[int]:
        """The register of the tensor."""
        return (self.target,)

    def run(self, registers: Registers, step: Step) -> None:
        """Read the tensor that the rank holds now."""
        held = step.holder.load(self.value.node)
        registers[self.target] = step.holder.gradients.read(self.value, held) if self.summed else held


@dataclass(frozen=True)
class Store:
    """Write a buffer that the forward updated; its redistribution, if any, has no gradient."""

    buffer: str
    source: int
    redistribution: DifferentiableRedistribution | None

    @property
    def reads(self) -> Sequence[int]:
        """The register of the new value."""
        return (self.source,)

    @property
    def writes(self) -> Sequence[int]:
        """None."""
        return ()

    def run(self, registers: Registers, step: Step) -> None:
        """Write the buffer."""
        with torch.no_grad():
            value = registers[self.source]
            step.holder.store(self.buffer, value if self.redistribution is None else self.redistribution(value))


@dataclass(frozen=True)
class Gather:
    """A gathered parameter that backward gathers again: the input's place, and the parameter's register."""

    place: int
    source: int
    name: str
    redistribution: DifferentiableRedistribution

    def again(self, registers: Registers) -> Callable[[], torch.Tensor]:
        """Return the function that gathers the parameter in backward."""
        local = registers[self.source].detach()
        version = local._version

        def gather() -> torch.Tensor:
            if local._version != version:
                raise RuntimeError(f"{self.name} was changed between forward and backward")
            with torch.no_grad():
                return self.redistribution(local)

        return gather


@dataclass(frozen=True)
class Run:
    """Run the rank's part of an operator.

    keep
        In a recompute region: keep the results for the second run.
    gathers
        The inputs that backward gathers again.
    """

    node: Node
    local: LocalCall
    inputs: tuple[int, ...]
    writes: tuple[int, ...]
    all_reduce: AllReduce | None = None
    keep: bool = False
    gathers: tuple[Gather, ...] = ()

    @property
    def reads(self) -> Sequence[int]:
        """The registers of the inputs, and of the parameters that backward gathers again."""
        return [*self.inputs, *(gather.source for gather in self.gathers)]

    def run(self, registers: Registers, step: Step) -> None:
        """Run the operator."""
        inputs = [registers[register] for register in self.inputs]
        if step.results is not None:
            outputs = self._in_region(inputs, step.results, step.stream)
        elif self.gathers:
            with regather_in_backward([(inputs[each.place], each.again(registers)) for each in self.gathers]):
                outputs = self.on(inputs, step.stream)
        else:
            outputs = self.on(inputs, step.stream)
        for register, output in zip(self.writes, outputs, strict=True):
            registers[register] = output

    def on(self, inputs: Sequence[torch.Tensor], stream: str, all_reduce: AllReduce | None = None) -> Tensors:
        """Return the outputs for these inputs; `stream` names the forward's random numbers."""
        names = f"{stream}/{self.node.name}" if self.local.draws else ""
        outputs = self.local(inputs, all_reduce or self.all_reduce, names)
        if len(outputs) != len(self.node.outputs):
            raise AssertionError(f"{self.node.name} gave {len(outputs)} of {len(self.node.outputs)} outputs")
        return outputs

    def _in_region(self, inputs: list[torch.Tensor], results: Results, stream: str) -> Tensors:
        all_reduce = None if self.all_reduce is None else results.reducing(self.all_reduce, keep=self.keep)
        run = partial(self.on, inputs, stream, all_reduce)
        return results.operator(run) if self.keep and self.all_reduce is None else run()


@dataclass(frozen=True)
class RunKernel:
    """Run matmuls that overlap with their collective.

    inputs
        The registers of each matmul's inputs.
    keep, read
        In a recompute region: whether to keep the results, and whether the region reads them.
    """

    kernel: Kernel
    inputs: tuple[tuple[int, ...], ...]
    writes: tuple[int, ...]
    keep: bool = False
    read: bool = True
    gathers: tuple[tuple[int, Gather], ...] = ()

    @property
    def reads(self) -> Sequence[int]:
        """The registers of all inputs, and of the parameters that backward gathers again."""
        inputs = [register for registers in self.inputs for register in registers]
        return [*inputs, *(gather.source for _, gather in self.gathers)]

    def run(self, registers: Registers, step: Step) -> None:
        """Run the kernel."""
        inputs = [[registers[register] for register in of_matmul] for of_matmul in self.inputs]
        if step.results is not None:
            kept = partial(step.results.kernel, keep=self.keep, communicates=self.kernel.communicates, read=self.read)
            outputs = self.kernel.run(inputs, kept)
        elif self.gathers:
            found = [(inputs[matmul][gather.place], gather.again(registers)) for matmul, gather in self.gathers]
            with regather_in_backward(found):
                outputs = self.kernel.run(inputs)
        else:
            outputs = self.kernel.run(inputs)
        for register, output in zip(self.writes, outputs, strict=True):
            registers[register] = output


@dataclass(frozen=True)
class Redistribute:
    """Change a tensor's layout.

    keep
        In a recompute region: keep the result if the region keeps the results of collectives.
    """

    source: int
    target: int
    redistribution: DifferentiableRedistribution
    keep: bool

    @property
    def reads(self) -> Sequence[int]:
        """The register of the tensor."""
        return (self.source,)

    @property
    def writes(self) -> Sequence[int]:
        """The register of the result."""
        return (self.target,)

    def run(self, registers: Registers, step: Step) -> None:
        """Run the collectives."""
        local = registers[self.source]
        if step.results is None:
            registers[self.target] = self.redistribution(local)
        else:
            registers[self.target] = step.results.conversion(partial(self.redistribution, local), self.keep)


@dataclass(frozen=True)
class Start:
    """Start redistributions, coalesced to one collective; `writes` are registers for what `Wait` waits for."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    redistributions: tuple[DifferentiableRedistribution, ...]

    def run(self, registers: Registers, step: Step) -> None:
        """Start the collective."""
        ends = start([registers[register] for register in self.reads], self.redistributions)
        for register, end in zip(self.writes, ends, strict=True):
            registers[register] = end


@dataclass(frozen=True)
class Wait:
    """Wait for a started redistribution."""

    started: int
    target: int

    @property
    def reads(self) -> Sequence[int]:
        """The register that `Start` wrote."""
        return (self.started,)

    @property
    def writes(self) -> Sequence[int]:
        """The register of the result."""
        return (self.target,)

    def run(self, registers: Registers, step: Step) -> None:
        """Wait."""
        registers[self.target] = registers[self.started]()


@dataclass(frozen=True)
class SyncBoundary:
    """Mark an operator's inputs so that every rank begins and ends recomputation at this operator."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def run(self, registers: Registers, step: Step) -> None:
        """Mark the first input that requires a gradient."""
        for register, tensor in zip(self.writes, sync_boundary([registers[at] for at in self.reads]), strict=True):
            registers[register] = tensor


@dataclass(frozen=True)
class Recompute:
    """Run a part of the forward that backward runs a second time."""

    module: str
    body: Program
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    keep_collectives: bool

    def run(self, registers: Registers, step: Step) -> None:
        """Run the part for the first time."""
        body, holder, stream = self.body, step.holder, step.stream

        def run(results: Results, tensors: Tensors) -> Tensors:
            return tuple(body.run(tensors, Step(holder, stream, results)))

        inputs = tuple(registers[register] for register in self.reads)
        outputs = recompute_in_backward(run, inputs, keep_collectives=self.keep_collectives)
        for register, output in zip(self.writes, outputs, strict=True):
            registers[register] = output


@dataclass(frozen=True)
class Free:
    """Drop tensors that no later instruction reads."""

    registers: tuple[int, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    def run(self, registers: Registers, step: Step) -> None:
        """Drop the tensors."""
        for register in self.registers:
            registers[register] = None


def with_frees(instructions: Sequence[Instruction], outputs: Sequence[int]) -> tuple[Instruction, ...]:
    """Return the instructions with a `Free` after the last reader of each register; `outputs` are never freed."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        last |= dict.fromkeys((*instruction.reads, *instruction.writes), place)
    dying: dict[int, list[int]] = {}
    for register, place in last.items():
        if register not in outputs:
            dying.setdefault(place, []).append(register)
    found: list[Instruction] = []
    for place, instruction in enumerate(instructions):
        found.append(instruction)
        if place in dying:
            found.append(Free(tuple(dying[place])))
    return tuple(found)
