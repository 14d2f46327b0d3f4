"""Kernels that run matmuls of a graph together with a collective, by `column_linear` and `row_linear`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch

from ascend_parallel.ops.decision import Known, because
from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.known import known_of
from ascend_parallel.overlap.layer import ForwardWrapper, ParallelLinear, run_directly
from ascend_parallel.overlap.layer_shape import COLUMN
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.overlap_pass import FusedMatmuls
from ascend_parallel.sharding.planner.overlapped_matmul import MatmulInputs
from ascend_parallel.sharding.runtime.regather import note_joined
from ascend_parallel.tuning.measured.decider import Decider

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kernel(ABC):
    """Runs the fused matmuls of one or several nodes together, at the position of the first.

    leaves_rows: the least rows in a chunk of a result that stays unfinished; 0: all rows are finished.
    """

    fused: FusedMatmuls
    mesh: ProcessMesh
    settings: Settings
    leaves_rows: int = 0

    @cached_property
    def layer(self) -> ParallelLinear:
        """The options of every call, with this rank's process group along the mesh dimension of the matmuls."""
        group = self.mesh.group(self.fused.mesh_dim)
        return ParallelLinear(
            kind=self.fused.kind,
            group=group,
            settings=self.settings,
            known=known_of(self.settings) if self.fused.is_even else Known(because=because("unlike_slices")),
            arithmetic=self.settings.arithmetic,
            sequence_parallel=self.fused.row_dim is not None,
            leaves_rows=self.leaves_rows,
        )

    @property
    def keeps_gathered(self) -> bool:
        """Whether backward has the rows of x that the forward gathered, and does not gather them again."""
        gathers = self.fused.kind == COLUMN and self.fused.communicates
        return gathers and not self.settings.recompute_all_gather

    @abstractmethod
    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return the output of each node, for the inputs of each node; `forward_wrapper` as for `column_linear`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        """Return the same kernel for a copy of its module: it never changes, and a process group has no copy."""
        return self

    def _call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        *bias: torch.Tensor | None,
        forward_wrapper: ForwardWrapper,
        parts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """Return ``function(x, weight, *bias, layer)`` with the rows in the first dimension, and back in their own."""
        row_dim = self.fused.row_dim
        if row_dim:
            x = x.movedim(row_dim, 0)
        tuned = self.settings.tunes and self.fused.is_even and self.mesh.shape[self.fused.mesh_dim] > 1
        layer = self._tuned(x, weight) if tuned else self.layer
        if forward_wrapper is not run_directly:
            layer = replace(layer, forward_wrapper=forward_wrapper)
        if parts and self.settings.arithmetic.forms_every_product:
            layer = replace(layer, parts=parts)
        y = function(x, weight, *bias, layer)
        return y.movedim(0, row_dim) if row_dim else y

    def _tuned(self, x: torch.Tensor, weight: torch.Tensor) -> ParallelLinear:
        """Return the layer with the chunks that are measured at the first call: of the forward and of the backward.

        The backward's too if this call has none: a block that is recomputed runs its forward again inside of it, and
        ranks may come to that in an order of their own.
        """
        fused, group = self.fused, self.layer.group
        shape = fused.shape._replace(dtype=operand_dtype(weight), device=x.device.type)
        others = (dim for dim, size in enumerate(self.mesh.shape) if size > 1 and dim != fused.mesh_dim)
        known = _decider(self.settings).known_of_layer(
            shape, group, backward=fused.differentiable, replicas=[*map(self.mesh.group, others)]
        )
        return replace(self.layer, known=known)


class ColumnKernel(Kernel):
    """Linear layers of the same input, with weights sharded along N, as one matmul.

    Without `row_dim` x is replicated, and the all-reduce of its gradient overlaps with the weight gradient. With
    `row_dim` x is this rank's rows, and their all-gather overlaps with the matmul.
    """

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y_shard_n [..., N / R]`` of each node, for x [..., K], weights [N / R, K] and biases [N / R]."""
        pairs = list(zip(self.fused.matmuls, inputs, strict=True))
        weights = [_weight(matmul, tensors) for matmul, tensors in pairs]
        biases = [tensors[matmul.bias] for matmul, tensors in pairs if matmul.bias is not None]
        sizes = tuple(weight.shape[0] for weight in weights) if len(weights) > 1 else ()
        x, bias = inputs[0][self.fused.matmuls[0].x], _joined(biases) if biases else None
        y = self._call(run_column, x, _joined(weights), bias, forward_wrapper=forward_wrapper, parts=sizes)
        return list(torch.split_with_sizes(y, sizes, dim=-1)) if sizes else [y]


class RowKernel(Kernel):
    """A linear layer with its weight sharded along K: the sum over ranks, or with `row_dim` this rank's rows of it."""

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y [..., N]`` of the node with its bias [N] added, for x [..., K / R] and the weight [N, K / R]."""
        (tensors,), (matmul,) = inputs, self.fused.matmuls
        run = partial(run_row, bias=None if matmul.bias is None else tensors[matmul.bias])
        return [self._call(run, tensors[matmul.x], _weight(matmul, tensors), forward_wrapper=forward_wrapper)]


def kernel_of(fused: FusedMatmuls, mesh: ProcessMesh, settings: Settings, leaves_rows: int) -> Kernel:
    """Return the kernel that runs fused matmuls on a rank of the mesh."""
    return (ColumnKernel if fused.kind == COLUMN else RowKernel)(fused, mesh, settings, leaves_rows)


@cache
def _decider(settings: Settings) -> Decider:
    """Return the decider of all kernels with these settings: stages and layers share what was measured."""
    return Decider(settings, hint="")


def _weight(matmul: MatmulInputs, tensors: Tensors) -> torch.Tensor:
    """Return the weight as [N, K]."""
    weight = tensors[matmul.weight]
    return weight.t() if matmul.transposed else weight


def _joined(tensors: Tensors) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.cat(list(tensors))
    note_joined(joined, tensors)
    return joined
