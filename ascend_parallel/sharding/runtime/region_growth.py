"""Finds the regions of rows of a program: a pure pass, alike on all ranks.

A region begins at a row matmul whose partial sums are all-reduced or reduce-scattered. It grows over the instructions
that read its rows while each of them works row by row. In a region that begins at a reduce-scatter, a fused column
matmul gathers the rows: behind it the rows of all ranks stand in blocks, until the next reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.layout import Placement, forward, local_shape, shard
from ascend_parallel.sharding.rules import OpPlacements, strategies
from ascend_parallel.sharding.runtime.compute_instructions import Run, RunKernel
from ascend_parallel.sharding.runtime.instructions import Instruction, Load, Redistribute, Register, Start, Wait
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, RowKernel
from ascend_parallel.sharding.runtime.row_regions import RunRegion, names_of

# Operators that work row by row, besides elementwise operators; dropout where it draws nothing.
ROW_WISE = (
    "aten.layer_norm.default",
    "aten.native_layer_norm.default",
    "aten.rms_norm.default",
    "aten.mean.dim",
    "aten.dropout.default",
    "aten.to.dtype",
    "aten._to_copy.default",
)
ATTENTION = "aten.scaled_dot_product_attention.default"
# Operators that keep the rows of the first dimension apart, where their rule says so.
ALONG_FIRST = (
    ATTENTION,
    "aten.view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.unsqueeze.default",
    "aten.expand.default",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.chunk.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.unbind.int",
    "aten.cat.default",
    "aten.repeat_interleave.self_int",
    "aten.contiguous.default",
    "aten.clone.default",
)


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
        row_dim = _row_dim(seed.kernel, shape)
        if seed.gathers or row_dim is None:
            reason = "backward gathers its weight again" if seed.gathers else "it has a single row"
            found.append(replace(seed, alone=reason))
            continue
        growing = _Growing(seed, seed.kernel, row_dim)
        count = growing.over(instructions[place:])
        if not count:
            found.append(replace(seed, alone=f"no matmul reads its rows before {growing.end}"))
            continue
        found += [*growing.before(instructions[place : place + count]), growing.region()]
        place += count
    return found


def _row_dim(kernel: RowKernel, shape: Sequence[int]) -> int | None:
    """Return the dimension of a row matmul's result [..., N] that is cut into chunks; None: it has a single row."""
    dims = range(len(shape) - 1) if kernel.row_dim is None else [kernel.row_dim]
    return next((dim for dim in dims if shape[dim] > 1), None)


@dataclass
class _Growing:
    """A region under construction.

    inside
        The registers that have the region's rows, and whether these are gathered from all ranks.
    attended
        Whether the region has passed an attention.
    end
        The instruction that ended the region, and why.
    """

    seed: RunKernel
    kernel: RowKernel
    row_dim: int
    members: list[Run | RunKernel] = field(default_factory=list)
    inside: dict[int, bool] = field(default_factory=dict)
    attended: bool = False
    end: str = "the end"

    def over(self, rest: Sequence[Instruction]) -> int:
        """Grow over the instructions behind the seed; return how many the region spans, 0 without another matmul."""
        self._add(self.seed)
        span, hides = 0, False
        for count, instruction in enumerate(rest, start=1):
            if self.inside.keys().isdisjoint(instruction.reads) and _movable(instruction):
                continue
            reason = self._obstacle(instruction)
            if reason:
                self.end = reason
                break
            assert isinstance(instruction, (Run, RunKernel))
            self._add(instruction)
            # Operators behind the last matmul stay: they run chunk by chunk, as its rows arrive.
            span, hides = count, hides or isinstance(instruction, RunKernel)
        return span if hides else 0

    def before(self, spanned: Sequence[Instruction]) -> list[Instruction]:
        """Return the instructions between the members, which run before the region."""
        return [each for each in spanned if not any(each is member for member in self.members)]

    def region(self) -> RunRegion:
        """Return the region."""
        reads = dict.fromkeys(at for member in self.members for at in member.reads if at not in self.inside)
        writes = tuple(at for member in self.members for at in member.writes)
        return RunRegion(tuple(reads), writes, tuple(self.members), self.row_dim, self.end)

    def _add(self, member: Run | RunKernel) -> None:
        if isinstance(member, RunKernel):
            gathered = isinstance(member.kernel, ColumnKernel) and member.kernel.row_dim is not None
        else:
            gathered = any(self.inside.get(at, False) for at in member.reads)
            self.attended |= member.local.call.name == ATTENTION
        self.members.append(member)
        self.inside |= dict.fromkeys(member.writes, gathered)

    def _obstacle(self, instruction: Instruction) -> str:
        """Return why an instruction cannot be part of the region; "" if it can."""
        if isinstance(instruction, Run):
            reason = self._operator_obstacle(instruction)
        elif isinstance(instruction, RunKernel):
            reason = self._kernel_obstacle(instruction)
        elif isinstance(instruction, Redistribute):
            redistribution = instruction.redistribution
            return f"its rows change their layout: {redistribution.forward.text(redistribution.mesh.dim_names)}"
        else:
            return f"an instruction of kind {type(instruction).__name__}"
        return f"{', '.join(names_of(instruction))}: {reason}" if reason else ""

    def _kernel_obstacle(self, member: RunKernel) -> str:
        kernel = member.kernel
        assert isinstance(kernel, (RowKernel, ColumnKernel))
        xs = {inputs[matmul.x] for inputs, matmul in zip(member.inputs, kernel.matmuls, strict=True)}
        others = {at for at in member.reads if at not in xs}
        if member.gathers:
            return "backward gathers its weight again"
        if self.attended and isinstance(kernel, RowKernel):  # so a region holds the tensors of one layer, not of all
            return "behind an attention it begins a region of its own"
        if not xs <= self.inside.keys() or not self.inside.keys().isdisjoint(others):
            return "its rows come from elsewhere"
        if kernel.row_dim != self.kernel.row_dim:
            return (
                "it gathers or scatters rows" if self.kernel.row_dim is None else "it neither gathers nor scatters rows"
            )
        if kernel.communicates and kernel.mesh_dim != self.kernel.mesh_dim:
            return "it communicates along another mesh dimension"
        scatters = kernel.row_dim is not None and isinstance(kernel, RowKernel)
        return "" if all(self.inside[x] == scatters for x in xs) else "it scatters rows that were never gathered"

    def _operator_obstacle(self, run: Run) -> str:
        call = run.local.call
        elementwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
        mine = [place for place, at in enumerate(run.reads[: len(run.node.inputs)]) if at in self.inside]
        gathered = {self.inside[run.reads[place]] for place in mine}
        if run.local.draws:
            return "it draws random numbers"
        if run.all_reduce or run.gathers:
            return "it communicates"
        along_first = self.row_dim == 0 and self.kernel.row_dim is None and call.name in ALONG_FIRST
        along_first = along_first and len({meta.shape[:1] for meta in (call.inputs[mine[0]], *call.outputs)}) == 1
        row_wise = run.local.run is None and (elementwise or call.name in ROW_WISE)
        if not (along_first or row_wise):
            return "it is not known to work row by row"
        if len(gathered) > 1:
            return "it reads gathered rows beside others"
        if any(_keeps(strategy, mine, shard(self.row_dim)) for strategy in strategies(call)):
            return ""
        return f"its rule offers no axis with dimension {self.row_dim} on all its inputs and outputs"


def _keeps(strategy: OpPlacements, mine: Sequence[int], rows: Placement) -> bool:
    """Tell whether a strategy of an operator has the rows on the inputs `mine` and on all outputs."""
    reads = all(strategy.inputs[place] == rows for place in mine)
    others = all(each == rows or each.kind != "shard" for each in strategy.inputs)
    return reads and others and all(each == rows for each in strategy.outputs)


def _movable(instruction: Instruction) -> bool:
    """Tell whether an instruction that reads no rows of the region may run before it."""
    if isinstance(instruction, (Load, Redistribute, Start, Wait)):
        return True
    return isinstance(instruction, Run) and not (
        instruction.local.draws or instruction.all_reduce or instruction.gathers
    )
