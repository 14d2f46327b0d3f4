"""Matmuls of a graph that run together with a collective, by `column_linear` and `row_linear`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ascend_parallel.overlap.forward_wrapper import ForwardWrapper, run_directly
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.regather import note_joined

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Matmul:
    """Which inputs of a call are the two factors and the bias.

    transposed
        The weight is [K, N], as for aten.mm, and not [N, K], as for aten.linear.
    """

    x: int
    weight: int
    bias: int | None
    transposed: bool

    @property
    def n_dim(self) -> int:
        """The weight's dimension of the output's features."""
        return 1 if self.transposed else 0

    @property
    def k_dim(self) -> int:
        """The weight's dimension that is summed over."""
        return 1 - self.n_dim


def matmul_of(call: OpCall) -> Matmul | None:
    """Tell how a call is ``[..., K]`` times a weight of two dimensions, or None if it is not."""
    if call.kwargs or not all(argument is None or isinstance(argument, Ref) for argument in call.args):
        return None
    places = [None if argument is None else argument.index for argument in call.args]
    if call.name == "aten.linear.default":
        places = [*places, None][:3]
    elif call.name in ("aten.mm.default", "aten.matmul.default"):
        places = [*places, None]
    elif call.name == "aten.addmm.default":
        places = [*places[1:], places[0]]
    else:
        return None
    x, weight, bias = places
    assert x is not None and weight is not None
    dims = [len(call.inputs[place].shape) for place in (x, weight)]
    if dims[0] < 2 or dims[1] != 2 or (bias is not None and len(call.inputs[bias].shape) != 1):
        return None
    return Matmul(x, weight, bias, transposed=call.name != "aten.linear.default")


class Kernel(Protocol):
    """Runs one or several nodes at the place of the first."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names."""

    @property
    def communicates(self) -> bool:
        """Whether its forward does; the backward always."""

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return the output of each node for the inputs of each; `once` as for `column_linear`."""


@dataclass(frozen=True)
class _Overlapped:
    """What both kernels know.

    mesh_dim
        The mesh dimension whose collective runs under the matmul.
    row_dim
        The dimension of the rows that are gathered or scattered; None: sums are whole. The operators take rows in
        the first dimension, so that another one is brought there: a copy of x, unless all before it are of size 1.
    """

    nodes: tuple[str, ...]
    matmuls: tuple[Matmul, ...]
    mesh: ProcessMesh
    mesh_dim: int
    row_dim: int | None
    settings: Settings

    def _rows_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(self.row_dim, 0) if self.row_dim else x

    def _back(self, y: torch.Tensor) -> torch.Tensor:
        return y.movedim(0, self.row_dim) if self.row_dim else y


class ColumnKernel(_Overlapped):
    """Linear layers of the same input whose weights are cut along N, as one matmul.

    x is whole on every rank, and its gradient summed under the weight gradient; with `row_dim` x is this rank's rows,
    gathered under the matmul.
    """

    @property
    def communicates(self) -> bool:
        """Only if rows are gathered."""
        return self.row_dim is not None

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``[..., N / R]`` of each node."""
        weights = [_weight(matmul, one) for matmul, one in zip(self.matmuls, inputs, strict=True)]
        biases = [one[matmul.bias] for matmul, one in zip(self.matmuls, inputs, strict=True) if matmul.bias is not None]
        y = column_linear(
            self._rows_first(inputs[0][self.matmuls[0].x]),
            _joined(weights),
            _joined(biases) if biases else None,
            group=self.mesh.group(self.mesh_dim),
            settings=self.settings,
            sequence_parallel=self.row_dim is not None,
            forward_wrapper=forward_wrapper,
        )
        y = self._back(y)
        return list(torch.split_with_sizes(y, [len(weight) for weight in weights], dim=-1))


class RowKernel(_Overlapped):
    """A linear layer whose weight is cut along K; its sum over ranks, or with `row_dim` this rank's rows of it."""

    @property
    def communicates(self) -> bool:
        """Always."""
        return True

    def run(self, inputs: Sequence[Tensors], forward_wrapper: ForwardWrapper = run_directly) -> list[torch.Tensor]:
        """Return ``[..., N]`` of the node, bias added."""
        (given,), (matmul,) = inputs, self.matmuls
        y = row_linear(
            self._rows_first(given[matmul.x]),
            _weight(matmul, given),
            group=self.mesh.group(self.mesh_dim),
            settings=self.settings,
            sequence_parallel=self.row_dim is not None,
            forward_wrapper=forward_wrapper,
        )
        y = self._back(y)
        return [y if matmul.bias is None else y + given[matmul.bias]]


def _weight(matmul: Matmul, given: Tensors) -> torch.Tensor:
    """Return the weight as [N, K]."""
    weight = given[matmul.weight]
    return weight.t() if matmul.transposed else weight


def _joined(tensors: Tensors) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.cat(list(tensors))
    note_joined(joined, tensors)
    return joined
