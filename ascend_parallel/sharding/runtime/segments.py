"""Compute segments: the operators between two collectives, compiled by torch.compile as one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ascend_parallel.ops.unfinished import plain_tensor
from ascend_parallel.sharding.runtime.compute_instructions import Run
from ascend_parallel.sharding.runtime.instructions import Instruction, Load, Registers, Step

SEGMENTS = "segments"


@dataclass(frozen=True)
class Segment(Instruction):
    """Operators that run as one compiled function.

    torch.compile fuses them, so the bits of the results may differ from those of the single operators. The function is
    traced and compiled when it runs first, for the shapes of the plan and the dtype of autocast.
    """

    runs: tuple[Run, ...]

    def run(self, registers: Registers, step: Step) -> None:
        """Run the compiled function."""
        inputs = [plain_tensor(registers[register]) for register in self.reads]
        device = inputs[0].device.type if inputs else "cpu"
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if autocast not in self._compiled:
            traced = make_fx(self._body, tracing_mode="fake")(*(tensor.detach() for tensor in inputs))
            self._compiled[autocast] = torch.compile(traced, dynamic=False)
        self.write(registers, self._compiled[autocast](*inputs))

    @cached_property
    def _compiled(self) -> dict[torch.dtype | None, Callable[..., Any]]:
        """The compiled function by the dtype of autocast; None: without autocast. A trace contains autocast's casts."""
        return {}

    def _body(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the operators one by one."""
        known = dict(zip(self.reads, tensors, strict=True))
        for run in self.runs:
            known |= zip(run.writes, run.compute([known[register] for register in run.reads], ""), strict=True)
        return tuple(known[register] for register in self.writes)


def with_segments(instructions: Sequence[Instruction], outputs: Sequence[int]) -> list[Instruction]:
    """Return the instructions with a `Segment` in place of each two or more operators between other instructions.

    Operators that draw random numbers, communicate or save parameters to be gathered again stay as they are. Loads
    between the operators of a segment come before it.
    """
    blocks = list(_blocks(instructions))
    last_read: dict[int, int] = dict.fromkeys(outputs, len(blocks))
    for place, (_, block) in reversed(list(enumerate(blocks))):
        for register in (register for instruction in block for register in instruction.reads):
            last_read.setdefault(register, place)
    found: list[Instruction] = []
    for place, (fusible, block) in enumerate(blocks):
        runs = tuple(instruction for instruction in block if isinstance(instruction, Run))
        if not fusible or len(runs) < 2:
            found += block
            continue
        found += [instruction for instruction in block if isinstance(instruction, Load)]
        written = [register for run in runs for register in run.writes]
        reads = dict.fromkeys(register for run in runs for register in run.reads if register not in written)
        writes = tuple(register for register in written if last_read.get(register, -1) > place)
        found.append(Segment(tuple(reads), writes, runs))
    return found


def _blocks(instructions: Sequence[Instruction]) -> Iterator[tuple[bool, list[Instruction]]]:
    """Yield runs of instructions, and whether they are operators that can be one function, and loads."""
    block: list[Instruction] = []
    fusible = True
    for instruction in instructions:
        is_fusible = isinstance(instruction, Load) or (
            isinstance(instruction, Run)
            and not (instruction.local.draws or instruction.communicates or instruction.gathers)
        )
        if block and is_fusible != fusible:
            yield fusible, block
            block = []
        fusible = is_fusible
        block.append(instruction)
    if block:
        yield fusible, block
