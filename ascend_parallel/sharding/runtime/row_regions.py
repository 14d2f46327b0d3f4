"""Regions of rows: instructions that run chunk by chunk, so that a collective runs under the instructions behind it.

A region begins at a row matmul whose partial sums are all-reduced. It grows over the instructions that read its rows
while each of them works row by row. Autograd records every operator as without regions, so backward does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.operators import rows_of
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.overlap.region.cuts import RegionCut, RegionMatmul, region_cut
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.layout import forward, local_shape, shard
from ascend_parallel.sharding.rules import strategies
from ascend_parallel.sharding.runtime.compute_instructions import Run, RunKernel
from ascend_parallel.sharding.runtime.instructions import (
    Instruction,
    Load,
    Redistribute,
    Register,
    Registers,
    Start,
    Step,
    Wait,
)
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, RowKernel

# Operators that work row by row, besides elementwise operators; dropout where it draws nothing.
ROW_WISE = (
    "aten.layer_norm.default",
    "aten.native_layer_norm.default",
    "aten.mean.dim",
    "aten.dropout.default",
)


@dataclass(frozen=True)
class RunRegion(Instruction):
    """Run operators and kernels chunk by chunk.

    members
        The instructions of the region, in order.
    row_dim
        The dimension that is cut; the dimensions before have size 1.
    end
        The instruction that ended the region, and why.
    """

    members: tuple[Run | RunKernel, ...]
    row_dim: int
    end: str

    @property
    def nodes(self) -> list[str]:
        """The names of the region's nodes."""
        return [name for member in self.members for name in _names(member)]

    def run(self, registers: Registers, step: Step) -> None:
        """Run the region; or one by one, if there is one chunk, in autocast, or if the run is recorded."""
        seed = self.members[0]
        assert isinstance(seed, RunKernel) and isinstance(seed.kernel, RowKernel)
        x = registers[seed.inputs[0][seed.kernel.matmuls[0].x]]
        cut = self._cut(x, registers)
        if len(cut.sizes) == 1:
            for member in self.members:
                member.run(registers, step)
            return
        length, group = x.shape[self.row_dim], seed.kernel.layer.group
        with Deferred(cut.sizes, self.row_dim, length, group) as deferred:
            for member in self.members:
                if isinstance(member, RunKernel):
                    _run_kernel(member, registers, deferred)
                else:
                    with deferred.operators():
                        member.run(registers, step)

    def _cut(self, x: torch.Tensor, registers: Registers) -> RegionCut:
        """Return the chunks; ranks decide alike, from shapes and settings."""
        kernels = [member for member in self.members if isinstance(member, RunKernel)]
        layer = kernels[0].kernel.layer  # type: ignore[attr-defined]
        rows = rows_of(x).shape[0]
        if torch.is_autocast_enabled(x.device.type) or RECORDING.recorder is not None:
            return RegionCut((rows,), layer.settings, "autocast, or a recorded run")
        matmuls = [_matmul(member, registers) for member in kernels if isinstance(member.kernel, RowKernel)][::-1]
        matmuls += [_matmul(member, registers) for member in kernels if isinstance(member.kernel, ColumnKernel)]
        return region_cut(matmuls, rows, x, layer.group, layer.settings, step=rows // x.shape[self.row_dim])


def _matmul(member: RunKernel, registers: Registers) -> RegionMatmul:
    """Return the matmul of a kernel; the weights of one kernel have one K."""
    pairs = zip(member.kernel.matmuls, member.inputs, strict=True)  # type: ignore[attr-defined]
    found = [(matmul, registers[inputs[matmul.weight]]) for matmul, inputs in pairs]
    (k,) = {weight.shape[matmul.k_dim] for matmul, weight in found}
    transposed = len(found) == 1 and found[0][0].transposed
    n = sum(weight.shape[matmul.n_dim] for matmul, weight in found)
    return RegionMatmul(k, n, ROW_MAJOR if transposed else TRANSPOSED)


def _run_kernel(member: RunKernel, registers: Registers, deferred: Deferred) -> None:
    """Run a kernel on rows that may be unfinished; so are its results."""
    inputs = [[registers[register] for register in of_matmul] for of_matmul in member.inputs]
    kernel = member.kernel
    assert isinstance(kernel, (RowKernel, ColumnKernel))
    x, weight, bias = kernel.operands(inputs)
    if isinstance(kernel, RowKernel):
        wrapper, rows = deferred.row(x, weight)
        y = run_row(x, weight, replace(kernel.layer, forward_wrapper=wrapper))
        deferred.track([y], rows())
        if bias is not None:
            with deferred.operators():
                y = y + bias
        outputs = [y]
    else:
        wrapper, rows = deferred.column(x, weight, bias)
        outputs = kernel.parts(run_column(x, weight, bias, replace(kernel.layer, forward_wrapper=wrapper)), inputs)
        deferred.track(outputs, rows())
    for register, output in zip(member.writes, outputs, strict=True):
        registers[register] = output


def with_row_regions(
    instructions: Sequence[Instruction],
    registers: Sequence[Register],
    graph: Graph,
    mesh_shape: tuple[int, ...],
    coordinate: Sequence[int],
) -> list[Instruction]:
    """Return the instructions with a `RunRegion` wherever a region grows, if the settings of the kernels ask for it.

    Operators and redistributions between the members of a region that do not read its rows come before it.
    """
    found, place = list[Instruction](), 0
    while place < len(instructions):
        seed = instructions[place]
        place += 1
        if not isinstance(seed, RunKernel) or not isinstance(seed.kernel, RowKernel):
            found.append(seed)
            continue
        if seed.kernel.settings.region is not True:
            found.append(seed)
            continue
        entry = registers[seed.writes[0]]
        shape = local_shape(graph.meta(entry.value).shape, forward(entry.layout), mesh_shape, coordinate)
        row_dim = next((dim for dim, size in enumerate(shape[:-1]) if size > 1), None)
        if reason := _no_seed(seed, row_dim):
            found.append(replace(seed, alone=reason))
            continue
        assert row_dim is not None
        before, region, end, count = _grown(seed, instructions[place:], row_dim)
        if region is None:
            found.append(replace(seed, alone=f"no matmul reads its rows before {end}"))
            continue
        found += [*before, region]
        place += count
    return found


def _no_seed(seed: RunKernel, row_dim: int | None) -> str:
    """Return why a row matmul begins no region; "" if it may."""
    if seed.kernel.row_dim is not None:  # type: ignore[attr-defined]
        return "a reduce-scatter, which regions of a graph do not cut yet"
    if seed.gathers:
        return "backward gathers its weight again"
    return "" if row_dim is not None else "it has a single row"


def _grown(
    seed: RunKernel, rest: Sequence[Instruction], row_dim: int
) -> tuple[list[Instruction], RunRegion | None, str, int]:
    """Return what comes before the region, the region or None, what ended it, and how many of `rest` these are."""
    inside, members = set(seed.writes), list[Run | RunKernel]([seed])
    end, behind, hides = "the end", 0, False
    for count, instruction in enumerate(rest, start=1):
        reads_rows = not inside.isdisjoint(instruction.reads)
        if not reads_rows and _movable(instruction):
            continue
        reason = _obstacle(instruction, inside, row_dim)
        if reason:
            end = reason
            break
        assert isinstance(instruction, (Run, RunKernel))
        members.append(instruction)
        inside |= set(instruction.writes)
        behind = count
        hides = hides or isinstance(instruction, RunKernel)
    if not hides:
        return [], None, end, 0
    # Operators behind the last matmul stay: they run chunk by chunk, as its rows arrive.
    before = [each for each in rest[:behind] if not any(each is member for member in members)]
    reads = dict.fromkeys(at for member in members for at in member.reads if at not in inside)
    writes = tuple(at for member in members for at in member.writes)
    return before, RunRegion(tuple(reads), writes, tuple(members), row_dim, end), end, behind


def _movable(instruction: Instruction) -> bool:
    """Tell whether an instruction that reads no rows of the region may run before it."""
    if isinstance(instruction, (Load, Redistribute, Start, Wait)):
        return True
    return isinstance(instruction, Run) and not (
        instruction.local.draws or instruction.all_reduce or instruction.gathers
    )


def _obstacle(instruction: Instruction, inside: set[int], row_dim: int) -> str:
    """Return why an instruction cannot be part of a region; "" if it can."""
    if isinstance(instruction, Run):
        reason = _operator_obstacle(instruction, inside, row_dim)
    elif isinstance(instruction, RunKernel):
        reason = _kernel_obstacle(instruction, inside)
    elif isinstance(instruction, Redistribute):
        redistribution = instruction.redistribution
        return f"its rows change their layout: {redistribution.forward.text(redistribution.mesh.dim_names)}"
    else:
        return f"an instruction of kind {type(instruction).__name__}"
    return f"{', '.join(_names(instruction))}: {reason}" if reason else ""


def _kernel_obstacle(member: RunKernel, inside: set[int]) -> str:
    kernel = member.kernel
    if not isinstance(kernel, (RowKernel, ColumnKernel)) or kernel.row_dim is not None:
        return "it gathers or scatters rows"
    if member.gathers:
        return "backward gathers its weight again"
    xs = {inputs[matmul.x] for inputs, matmul in zip(member.inputs, kernel.matmuls, strict=True)}
    others = {at for at in member.reads if at not in xs}
    if not xs <= inside or not others.isdisjoint(inside):
        return "its rows come from elsewhere"
    return ""


def _operator_obstacle(run: Run, inside: set[int], row_dim: int) -> str:
    if run.local.draws:
        return "it draws random numbers"
    if run.all_reduce or run.gathers:
        return "it communicates"
    call = run.local.call
    elementwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
    if run.local.run is not None or not (elementwise or call.name in ROW_WISE):
        return "it is not known to work row by row"
    rows = shard(row_dim)
    mine = [place for place, at in enumerate(run.reads[: len(run.node.inputs)]) if at in inside]
    for strategy in strategies(call):
        reads = all(strategy.inputs[place] == rows for place in mine)
        others = all(each == rows or each.kind != "shard" for each in strategy.inputs)
        if reads and others and all(each == rows for each in strategy.outputs):
            return ""
    return f"its rule offers no axis with dimension {row_dim} on all its inputs and outputs"


def _names(member: Run | RunKernel) -> tuple[str, ...]:
    return (member.node.name,) if isinstance(member, Run) else tuple(member.kernel.nodes)
