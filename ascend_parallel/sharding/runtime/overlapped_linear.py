"""Kernels that run matmuls of a graph together with a collective, by `column_linear` and `row_linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from ascend_parallel.overlap.layer import ForwardWrapper, ParallelLinear, run_directly
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.overlapped_matmul import Matmul
from ascend_parallel.sharding.runtime.regather import note_joined

Tensors = Sequence[torch.Tensor]


class Kernel(Protocol):
    """Runs one or several nodes together, at the position of the first."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes."""

    @property
    def communicates(self) -> bool:
        """Whether the forward communicates. The backward always does."""

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return the output of each node, for the inputs of each node; `forward_wrapper` as for `column_linear`."""


@dataclass(frozen=True)
class _Overlapped:
    """The common fields of both kernels.

    mesh_dim
        The mesh dimension whose collective overlaps with the matmul.
    row_dim
        The dimension of the rows that are gathered or scattered; None for an all-reduce. The operators need rows in the
        first dimension, so another dimension is moved to the front: a copy, unless all dimensions before have size 1.
    """

    nodes: tuple[str, ...]
    matmuls: tuple[Matmul, ...]
    mesh: ProcessMesh
    mesh_dim: int
    row_dim: int | None
    settings: Settings

    @cached_property
    def layer(self) -> ParallelLinear:
        """The options of every call, with this rank's process group along `mesh_dim`."""
        group = self.mesh.group(self.mesh_dim)
        rows = self.settings.region_rows if self.settings.region is True else 0
        return ParallelLinear(
            group=group, settings=self.settings, sequence_parallel=self.row_dim is not None, leaves_rows=rows
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Overlapped:
        """Return the same kernel for a copy of its module: it never changes, and a process group has no copy."""
        return self

    def _call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *operands: torch.Tensor | None,
        forward_wrapper: ForwardWrapper,
        parts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """Return ``function(x, *operands, layer)`` with the rows in the first dimension, and back in their own."""
        layer = self.layer if forward_wrapper is run_directly else replace(self.layer, forward_wrapper=forward_wrapper)
        if parts and self.settings.at_every_degree:
            layer = replace(layer, parts=parts)
        if not self.row_dim:
            return function(x, *operands, layer)
        return function(x.movedim(self.row_dim, 0), *operands, layer).movedim(0, self.row_dim)


class ColumnKernel(_Overlapped):
    """Linear layers of the same input, with weights sharded along N, as one matmul.

    Without `row_dim` x is replicated, and the all-reduce of its gradient overlaps with the weight gradient. With
    `row_dim` x is this rank's rows, and their all-gather overlaps with the matmul.
    """

    @property
    def communicates(self) -> bool:
        """True if the forward gathers rows."""
        return self.row_dim is not None

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y_shard_n [..., N / R]`` of each node."""
        x, weight, bias = self.operands(inputs)
        sizes = self._sizes(inputs)
        y = self._call(run_column, x, weight, bias, forward_wrapper=forward_wrapper, parts=sizes)
        return self.parts(y, inputs)

    def operands(self, inputs: Sequence[Tensors]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return x [..., K], and the weights [N / R, K] and biases [N / R] of all nodes as one."""
        pairs = list(zip(self.matmuls, inputs, strict=True))
        biases = [tensors[matmul.bias] for matmul, tensors in pairs if matmul.bias is not None]
        weight = _joined([_weight(matmul, tensors) for matmul, tensors in pairs])
        return inputs[0][self.matmuls[0].x], weight, _joined(biases) if biases else None

    def parts(self, y: torch.Tensor, inputs: Sequence[Tensors]) -> list[torch.Tensor]:
        """Return the output of each node, for the output of all as one."""
        sizes = self._sizes(inputs)
        return list(torch.split_with_sizes(y, sizes, dim=-1)) if sizes else [y]

    def _sizes(self, inputs: Sequence[Tensors]) -> tuple[int, ...]:
        """Return the features N / R of each of several nodes; of one node none."""
        pairs = zip(self.matmuls, inputs, strict=True)
        return tuple(_weight(matmul, tensors).shape[0] for matmul, tensors in pairs) if len(self.matmuls) > 1 else ()


class RowKernel(_Overlapped):
    """A linear layer with its weight sharded along K: the sum over ranks, or with `row_dim` this rank's rows of it."""

    @property
    def communicates(self) -> bool:
        """Always True."""
        return True

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``y [..., N]`` of the node, with its bias added."""
        x, weight, bias = self.operands(inputs)
        y = self._call(run_row, x, weight, forward_wrapper=forward_wrapper)
        return [y if bias is None else y + bias]

    def operands(self, inputs: Sequence[Tensors]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return x [..., K / R], the weight [N, K / R] and the bias [N] or None."""
        (tensors,), (matmul,) = inputs, self.matmuls
        return tensors[matmul.x], _weight(matmul, tensors), None if matmul.bias is None else tensors[matmul.bias]


def _weight(matmul: Matmul, tensors: Tensors) -> torch.Tensor:
    """Return the weight as [N, K]."""
    weight = tensors[matmul.weight]
    return weight.t() if matmul.transposed else weight


def _joined(tensors: Tensors) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.cat(list(tensors))
    note_joined(joined, tensors)
    return joined
