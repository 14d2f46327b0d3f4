"""Regions of rows: instructions that run chunk by chunk, so that a collective runs under the instructions behind it.

`region_growth` finds the regions. Autograd records every operator as without regions, so backward does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.overlap.region.cuts import RegionCut, RegionMatmul, region_cut
from ascend_parallel.overlap.region.deferred import Deferred
from ascend_parallel.overlap.region.deferred_linear import deferred_column, deferred_row
from ascend_parallel.overlap.region.rows import saved_hook_reason
from ascend_parallel.sharding.runtime.compute_instructions import Run, RunKernel
from ascend_parallel.sharding.runtime.instructions import Instruction, Registers, Step
from ascend_parallel.sharding.runtime.overlapped_linear import ColumnKernel, RowKernel


@dataclass(frozen=True)
class RunRegion(Instruction):
    """Run operators and kernels chunk by chunk.

    members
        The instructions of the region, in order.
    row_dim
        The dimension that is cut. The dimensions before have size 1, unless rows are scattered and gathered.
    end
        The instruction that ended the region, and why.
    """

    members: tuple[Run | RunKernel, ...]
    row_dim: int
    end: str

    @property
    def nodes(self) -> list[str]:
        """The names of the region's nodes."""
        return [name for member in self.members for name in names_of(member)]

    def run(self, registers: Registers, step: Step) -> None:
        """Run the region; or one by one, with one chunk, in autocast, recorded, or with hooks on saved tensors."""
        seed = self.members[0]
        assert isinstance(seed, RunKernel) and isinstance(seed.kernel, RowKernel)
        x, layer = registers[seed.inputs[0][seed.kernel.matmuls[0].x]], seed.kernel.layer
        blocks = layer.group.size() if layer.sequence_parallel else 1
        length = x.shape[self.row_dim] // blocks
        cut = self._cut(x, x.shape[:-1].numel() // blocks, length, registers)
        if len(cut.sizes) == 1:
            for member in self.members:
                member.run(registers, step)
            return
        with Deferred(cut.sizes, self.row_dim, length, layer.group, layer.sequence_parallel) as deferred:
            for member in self.members:
                if isinstance(member, RunKernel):
                    _run_kernel(member, registers, deferred)
                else:
                    with deferred.operators():
                        member.run(registers, step)

    def _cut(self, x: torch.Tensor, rows: int, length: int, registers: Registers) -> RegionCut:
        """Return the chunks of a rank's `rows` rows; ranks decide alike, from shapes and settings."""
        kernels = [member for member in self.members if isinstance(member, RunKernel)]
        layer = kernels[0].kernel.layer  # type: ignore[attr-defined]
        if torch.is_autocast_enabled(x.device.type) or RECORDING.recorder is not None:
            return RegionCut((rows,), layer.settings, "autocast, or a recorded run")
        if torch.is_grad_enabled() and (reason := saved_hook_reason()) is not None:
            return RegionCut((rows,), layer.settings, reason)
        matmuls = [_matmul(member, registers) for member in kernels if isinstance(member.kernel, RowKernel)][::-1]
        matmuls += [_matmul(member, registers) for member in kernels if isinstance(member.kernel, ColumnKernel)]
        step = rows // length
        return region_cut(matmuls, rows, x, layer.group, layer.settings, layer.sequence_parallel, step)


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
    kernel, ranks = member.kernel, deferred.group.size() if deferred.sequence_parallel else 1
    assert isinstance(kernel, (RowKernel, ColumnKernel))
    x, weight, bias = kernel.operands(inputs)
    x = deferred.rows_first(x)
    if isinstance(kernel, RowKernel):
        wrapper, rows = deferred_row(deferred, x, weight)
        y = run_row(x, weight, replace(kernel.layer, forward_wrapper=wrapper))
        y = deferred.rows_back(y, rows())
        if bias is not None:
            with deferred.operators():
                y = y + bias
        outputs = [y]
    else:
        keep = torch.is_grad_enabled() and weight.requires_grad and not kernel.settings.recompute_all_gather
        wrapper, rows = deferred_column(deferred, x, weight, bias, keep)
        y = run_column(x, weight, bias, replace(kernel.layer, forward_wrapper=wrapper))
        found = rows()
        outputs = kernel.parts(deferred.rows_back(y, found, ranks), inputs)
        deferred.track(outputs, found, ranks)
    for register, output in zip(member.writes, outputs, strict=True):
        registers[register] = output


def names_of(member: Run | RunKernel) -> tuple[str, ...]:
    """Return the names of the nodes of a member."""
    return (member.node.name,) if isinstance(member, Run) else tuple(member.kernel.nodes)
