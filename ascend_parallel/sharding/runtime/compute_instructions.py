"""The instructions that compute: operators, overlapped kernels, and parts that backward runs a second time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from ascend_parallel.overlap.projected import Projection
from ascend_parallel.sharding.graph import Node
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.rules import LocalCall
from ascend_parallel.sharding.rules.local import AllReduce, ExchangeRanks, FindExchangeRanks
from ascend_parallel.sharding.runtime.instructions import Instruction, Program, Registers, Step
from ascend_parallel.sharding.runtime.overlapped_linear import Kernel
from ascend_parallel.sharding.runtime.recompute_autograd import (
    SavedResults,
    Tensors,
    recompute_in_backward,
    sync_boundary,
)
from ascend_parallel.sharding.runtime.regather import regather_in_backward


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
class Run(Instruction):
    """Run the rank's part of an operator.

    It reads its inputs, then the parameters that backward gathers again, then those of its projection.

    keep
        In a checkpointed block: keep the results for the second run.
    gathers
        The inputs that backward gathers again.
    find_exchange_ranks
        For an operator that exchanges tokens or heads. It communicates again in the second run of a checkpointed block.
    projection
        For an attention that exchanges: the registers of weight and bias of the linear layer that reads its output.
    """

    node: Node
    local: LocalCall
    all_reduce: AllReduce | None = None
    keep: bool = False
    gathers: tuple[Gather, ...] = ()
    find_exchange_ranks: FindExchangeRanks | None = None
    projection: tuple[int, ...] = ()

    def run(self, registers: Registers, step: Step) -> None:
        """Run the operator."""
        inputs = [registers[register] for register in self._inputs]
        projection = Projection.of(*map(registers.__getitem__, self.projection)) if self.projection else None
        if step.results is not None:
            outputs = self._checkpointed(inputs, step.results, step.stream, projection)
        elif self.gathers:
            with regather_in_backward([(inputs[each.place], each.again(registers)) for each in self.gathers]):
                outputs = self.compute(inputs, step.stream)
        else:
            outputs = self.compute(inputs, step.stream, projection=projection)
        self.write(registers, outputs)

    @cached_property
    def _inputs(self) -> tuple[int, ...]:
        return self.reads[: len(self.node.inputs)]

    @property
    def communicates(self) -> bool:
        """Whether the operator itself communicates."""
        return self.all_reduce is not None or self.find_exchange_ranks is not None

    def compute(
        self,
        inputs: Sequence[torch.Tensor],
        stream: str,
        all_reduce: AllReduce | None = None,
        projection: Projection | None = None,
    ) -> Tensors:
        """Return the outputs for these inputs; `stream` names the forward's random numbers."""
        names = f"{stream}/{self.node.name}" if self.local.draws else ""
        find = self.find_exchange_ranks if projection is None else partial(self._projecting, projection)
        outputs = self.local(inputs, all_reduce or self.all_reduce, names, find)
        if len(outputs) != len(self.node.outputs):
            raise AssertionError(f"{self.node.name} gave {len(outputs)} of {len(self.node.outputs)} outputs")
        return outputs

    def _projecting(self, projection: Projection, mesh_dim: int) -> ExchangeRanks:
        assert self.find_exchange_ranks is not None
        return replace(self.find_exchange_ranks(mesh_dim), projection=projection)

    def _checkpointed(
        self, inputs: list[torch.Tensor], results: SavedResults, stream: str, projection: Projection | None
    ) -> Tensors:
        all_reduce = None if self.all_reduce is None else results.reducing(self.all_reduce, keep=self.keep)
        run = partial(self.compute, inputs, stream, all_reduce, projection)
        return results.operator(run) if self.keep and not self.communicates else run()


@dataclass(frozen=True)
class RunKernel(Instruction):
    """Run matmuls that overlap with their collective.

    inputs
        The registers of each matmul's inputs.
    keep, read
        In a checkpointed block: whether to keep the results, and whether the block reads them.
    """

    kernel: Kernel
    inputs: tuple[tuple[int, ...], ...]
    keep: bool = False
    read: bool = True
    gathers: tuple[tuple[int, Gather], ...] = ()

    def run(self, registers: Registers, step: Step) -> None:
        """Run the kernel."""
        inputs = [[registers[register] for register in of_matmul] for of_matmul in self.inputs]
        if step.results is not None:
            kept = partial(
                step.results.kernel, keep=self.keep, communicates=self.kernel.fused.communicates, read=self.read
            )
            outputs = self.kernel.run(inputs, kept)
        elif self.gathers:
            found = [(inputs[matmul][gather.place], gather.again(registers)) for matmul, gather in self.gathers]
            with regather_in_backward(found):
                outputs = self.kernel.run(inputs)
        else:
            outputs = self.kernel.run(inputs)
        self.write(registers, outputs)


@dataclass(frozen=True)
class SyncBoundary(Instruction):
    """Mark an operator's inputs so that every rank begins and ends recomputation at this operator."""

    def run(self, registers: Registers, step: Step) -> None:
        """Mark the first input that requires a gradient."""
        self.write(registers, sync_boundary([registers[register] for register in self.reads]))


@dataclass(frozen=True)
class RecomputeBlock(Instruction):
    """Run a part of the forward that backward runs a second time."""

    module: str
    body: Program
    keep_collectives: bool

    def run(self, registers: Registers, step: Step) -> None:
        """Run the part for the first time."""
        body, first = self.body, step

        def run(results: SavedResults, tensors: Tensors) -> Tensors:
            return tuple(body.run(tensors, replace(first, results=results)))

        inputs = tuple(registers[register] for register in self.reads)
        self.write(registers, recompute_in_backward(run, inputs, keep_collectives=self.keep_collectives))
