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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.runtime.async_redistribute import start
from ascend_parallel.sharding.runtime.gradient_plan import SummedGradient
from ascend_parallel.sharding.runtime.gradient_reduction import GradientReducer
from ascend_parallel.sharding.runtime.recompute_autograd import SavedResults


class Registers(Protocol):
    """The tensors of a forward by their registers: a list, or those of an eager call (`CallRegisters`)."""

    def __getitem__(self, register: int, /) -> Any:
        """Return the value of a register."""

    def __setitem__(self, register: int, tensor: Any, /) -> None:
        """Fill a register."""


class Holder(Protocol):
    """Holds the rank's parameters, buffers and constants (`ShardedModule`, or an `EagerForward`)."""

    def local_tensor(self, name: str) -> torch.Tensor:
        """Return the rank's part of a parameter, buffer or constant by its node."""

    def write_buffer(self, name: str, value: torch.Tensor) -> None:
        """Write a buffer."""


@dataclass(slots=True)
class Step:
    """What a forward has besides registers.

    stream
        Names the forward's random numbers.
    results
        In a checkpointed block: the results that its first run keeps for its second.
    gradients
        Sums the gradients of parameters; None: autograd adds what each rank has of them.
    """

    holder: Holder
    stream: str
    results: SavedResults | None = None
    gradients: GradientReducer | None = None


@dataclass(frozen=True)
class Instruction(ABC):
    """An entry of a program: the registers that it reads and writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @abstractmethod
    def run(self, registers: Registers, step: Step) -> None:
        """Run on this rank."""

    def write(self, registers: Registers, results: Iterable[Any]) -> None:
        """Fill the registers that the instruction writes."""
        for register, result in zip(self.writes, results, strict=True):
            registers[register] = result


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
        registers: list[Any] = [None] * len(self.registers)
        for register, tensor in zip(self.inputs, tensors, strict=True):
            registers[register] = tensor
        for instruction in self.instructions:
            instruction.run(registers, step)
        return [registers[register] for register in self.outputs]


@dataclass(frozen=True)
class Load(Instruction):
    """Read the rank's part of a parameter, buffer or constant.

    summed
        The parameter whose gradient is summed over ranks; None: the gradient is not summed.
    """

    value: Value
    summed: SummedGradient | None

    def run(self, registers: Registers, step: Step) -> None:
        """Read the tensor that the rank holds now."""
        summed, gradients = self.summed, step.gradients
        if summed is None or gradients is None:
            registers[self.writes[0]] = step.holder.local_tensor(self.value.node)
        elif summed.name in gradients.leaves:
            registers[self.writes[0]] = gradients.leaves[summed.name]
        else:
            registers[self.writes[0]] = gradients.read(summed, step.holder.local_tensor(self.value.node))


@dataclass(frozen=True)
class Store(Instruction):
    """Write a buffer that the forward updated; its redistribution, if any, has no gradient."""

    buffer: str
    redistribution: DifferentiableRedistribution | None

    def run(self, registers: Registers, step: Step) -> None:
        """Write the buffer."""
        with torch.no_grad():
            value = registers[self.reads[0]]
            step.holder.write_buffer(self.buffer, value if self.redistribution is None else self.redistribution(value))


@dataclass(frozen=True)
class Redistribute(Instruction):
    """Change a tensor's layout.

    keep
        In a checkpointed block: keep the result if the block keeps the results of collectives.
    """

    redistribution: DifferentiableRedistribution
    keep: bool

    def run(self, registers: Registers, step: Step) -> None:
        """Run the collectives."""
        run = partial(self.redistribution, registers[self.reads[0]])
        registers[self.writes[0]] = run() if step.results is None else step.results.conversion(run, self.keep)


@dataclass(frozen=True)
class Start(Instruction):
    """Start redistributions, coalesced to one collective; `writes` are registers for what `Wait` waits for."""

    redistributions: tuple[DifferentiableRedistribution, ...]

    def run(self, registers: Registers, step: Step) -> None:
        """Start the collective."""
        self.write(registers, start([registers[register] for register in self.reads], self.redistributions))


@dataclass(frozen=True)
class Wait(Instruction):
    """Wait for a started redistribution."""

    def run(self, registers: Registers, step: Step) -> None:
        """Wait."""
        registers[self.writes[0]] = registers[self.reads[0]]()


@dataclass(frozen=True)
class Free(Instruction):
    """Drop tensors that no later instruction reads."""

    registers: tuple[int, ...]

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
    returned = set(outputs)
    for register, place in last.items():
        if register not in returned:
            dying.setdefault(place, []).append(register)
    found: list[Instruction] = []
    for place, instruction in enumerate(instructions):
        found.append(instruction)
        if place in dying:
            found.append(Free((), (), tuple(dying[place])))
    return tuple(found)
