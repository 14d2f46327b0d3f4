"""Kernels that run matmuls of a graph together with a collective, by `column_linear` and `row_linear`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch

from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.layer import ForwardWrapper, ParallelLinear, run_directly
from ascend_parallel.overlap.layer_shape import COLUMN, ROW, LayerShape
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.overlapped_matmul import MatmulInputs
from ascend_parallel.sharding.runtime.regather import note_joined
from ascend_parallel.tuning.measured.tuner import Tuner

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kernel(ABC):
    """Runs the matmuls of one or several nodes together, at the position of the first.

    mesh_dim
        The mesh dimension whose collective overlaps with the matmul.
    row_dim
        The dimension of the rows that are gathered or scattered; None for an all-reduce. The operators need rows in the
        first dimension, so another dimension is moved to the front: a copy, unless all dimensions before have size 1.
    differentiable
        Whether the plan has a backward of these matmuls.
    """

    nodes: tuple[str, ...]
    matmuls: tuple[MatmulInputs, ...]
    mesh: ProcessMesh
    mesh_dim: int
    row_dim: int | None
    settings: Settings
    differentiable: bool = True

    kind: ClassVar[str]

    @cached_property
    def layer(self) -> ParallelLinear:
        """The options of every call, with this rank's process group along `mesh_dim`."""
        group = self.mesh.group(self.mesh_dim)
        rows = self.settings.region_rows if self.settings.region is True else 0
        return ParallelLinear(
            kind=self.kind,
            group=group,
            settings=self.settings,
            sequence_parallel=self.row_dim is not None,
            leaves_rows=rows,
        )

    @property
    def communicates(self) -> bool:
        """Whether the forward communicates. The backward always does."""
        return True

    @property
    def keeps_gathered(self) -> bool:
        """Whether backward has the rows of x that the forward gathered, and does not gather them again."""
        return False

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
        if self.row_dim:
            x = x.movedim(self.row_dim, 0)
        tuned = self.settings.tunes and self.mesh.shape[self.mesh_dim] > 1
        layer = self._tuned(x, weight) if tuned else self.layer
        if forward_wrapper is not run_directly:
            layer = replace(layer, forward_wrapper=forward_wrapper)
        if parts and self.settings.arithmetic.forms_every_product:
            layer = replace(layer, parts=parts)
        y = function(x, weight, *bias, layer)
        return y.movedim(0, self.row_dim) if self.row_dim else y

    def _tuned(self, x: torch.Tensor, weight: torch.Tensor) -> ParallelLinear:
        """Return the layer with the chunks that are measured at the first call: of the forward and of the backward.

        The backward's too if this call has none: a block that is recomputed runs its forward again inside of it, and
        ranks may come to that in an order of their own.
        """
        key = x.shape, weight.shape, operand_dtype(weight), x.device.type
        if key not in self._tuned_layers:
            group, rows = self.layer.group, self.row_dim is not None
            shape = LayerShape.of(self.kind, x, weight, group.size(), sequence_parallel=rows)
            others = (dim for dim, size in enumerate(self.mesh.shape) if size > 1 and dim != self.mesh_dim)
            chunks = _tuner(self.settings).chunks_for(
                shape, group, backward=self.differentiable, replicas=[*map(self.mesh.group, others)]
            )
            self._tuned_layers[key] = replace(self.layer, settings=chunks.settings)
        return self._tuned_layers[key]

    @cached_property
    def _tuned_layers(self) -> dict[tuple[torch.Size, torch.Size, torch.dtype, str], ParallelLinear]:
        return {}


class ColumnKernel(Kernel):
    """Linear layers of the same input, with weights sharded along N, as one matmul.

    Without `row_dim` x is replicated, and the all-reduce of its gradient overlaps with the weight gradient. With
    `row_dim` x is this rank's rows, and their all-gather overlaps with the matmul.
    """

    kind = COLUMN

    @property
    def communicates(self) -> bool:
        """True if the forward gathers rows."""
        return self.row_dim is not None

    @property
    def keeps_gathered(self) -> bool:
        """True if the forward gathers rows, and the settings keep them."""
        return self.communicates and not self.settings.recompute_all_gather

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y_shard_n [..., N / R]`` of each node, for x [..., K], weights [N / R, K] and biases [N / R]."""
        pairs = list(zip(self.matmuls, inputs, strict=True))
        weights = [_weight(matmul, tensors) for matmul, tensors in pairs]
        biases = [tensors[matmul.bias] for matmul, tensors in pairs if matmul.bias is not None]
        sizes = tuple(weight.shape[0] for weight in weights) if len(weights) > 1 else ()
        x, bias = inputs[0][self.matmuls[0].x], _joined(biases) if biases else None
        y = self._call(run_column, x, _joined(weights), bias, forward_wrapper=forward_wrapper, parts=sizes)
        return list(torch.split_with_sizes(y, sizes, dim=-1)) if sizes else [y]


class RowKernel(Kernel):
    """A linear layer with its weight sharded along K: the sum over ranks, or with `row_dim` this rank's rows of it."""

    kind = ROW

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y [..., N]`` of the node with its bias [N] added, for x [..., K / R] and the weight [N, K / R]."""
        (tensors,), (matmul,) = inputs, self.matmuls
        y = self._call(run_row, tensors[matmul.x], _weight(matmul, tensors), forward_wrapper=forward_wrapper)
        return [y if matmul.bias is None else y + tensors[matmul.bias]]


@cache
def _tuner(settings: Settings) -> Tuner:
    """Return the tuner of all kernels with these settings: stages and layers share what was measured."""
    return Tuner(settings, hint="")


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
