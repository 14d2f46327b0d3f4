"""The call of a tensor-parallel linear layer in plain values, and the operators of its passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Matmul
from ascend_parallel.ops.probing import ROW_MAJOR, TRANSPOSED
from ascend_parallel.overlap.choices import operand_dtype

COLUMN, ROW = "column", "row"
FORWARD, BACKWARD = "forward", "backward"


class LayerOperator(NamedTuple):
    """The operator of a layer's pass: its direction, "forward" or "backward", and what its kernel sees."""

    direction: str
    matmul: Matmul

    @property
    def layout(self) -> str:
        """The memory layout of the right operand: the weight [N, K] transposed in forward, row-major in backward."""
        return TRANSPOSED if self.direction == FORWARD else ROW_MAJOR

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, by the keys of plans and of what `bench` measures."""
        sizes = dict(zip("mkn", self.matmul.shape, strict=True))
        return {"run": self.direction, "operator": self.matmul.operator, **sizes}


class LayerShape(NamedTuple):
    """What decides how a layer's call runs: the same on every rank of the layer's group.

    kind
        "column" or "row".
    own_rows
        The rows of this rank's input: the product of its leading dimensions. A column layer with sequence parallelism
        multiplies `ranks` times as many (`rows`), every other layer multiplies these.
    k, n
        This rank's weight is [n, k].
    ranks
        The size of the group.
    dtype
        In which the layer multiplies.
    device
        The type of the device.
    reduce_input_grad
        Whether the input gradient of a column layer is summed over the ranks.
    """

    kind: str
    own_rows: int
    k: int
    n: int
    ranks: int
    sequence_parallel: bool
    dtype: torch.dtype
    device: str
    reduce_input_grad: bool = True

    @property
    def rows(self) -> int:
        """The rows that this rank multiplies, in forward and in backward."""
        return self.own_rows * (self.ranks if self.kind == COLUMN and self.sequence_parallel else 1)

    @classmethod
    def of(cls, kind: str, x: torch.Tensor, weight: torch.Tensor, ranks: int, **options: Any) -> LayerShape:
        """Return the shape of the call of a layer of `kind` with x [..., K] and the weight [N, K] of this rank."""
        (n, k), options = weight.shape, {"sequence_parallel": False, **options}
        rows, dtype = x.shape[:-1].numel(), operand_dtype(weight)
        return cls(kind, rows, k, n, ranks, dtype=dtype, device=x.device.type, **options)

    @classmethod
    def of_rows(cls, kind: str, rows: int, ranks: int, sequence_parallel: bool, **fields: Any) -> LayerShape:
        """Return the shape of a call that multiplies `rows` rows, of which each rank may hold its share."""
        own = rows // ranks if kind == COLUMN and sequence_parallel else rows
        return cls(kind=kind, own_rows=own, ranks=ranks, sequence_parallel=sequence_parallel, **fields)

    @classmethod
    def beside(cls, matmul: Matmul, kind: str, k: int, n: int, sequence_parallel: bool, **options: Any) -> LayerShape:
        """Return the shape of a call with a weight [n, k] in a model that multiplies `matmul`: as many rows, alike."""
        fields = {"k": k, "n": n, "dtype": matmul.dtype, "device": matmul.device, **options}
        return cls.of_rows(kind, matmul.m, matmul.ranks, sequence_parallel, **fields)

    def sharing_rows(self, sequence_parallel: bool) -> LayerShape:
        """Return the shape of a call of as many rows with sequence parallelism, or without."""
        rest = {"k": self.k, "n": self.n, "dtype": self.dtype, "device": self.device}
        return self.of_rows(self.kind, self.rows, self.ranks, sequence_parallel, **rest)

    def operator(self, direction: str) -> LayerOperator | None:
        """Return the operator of "forward" or "backward"; None: the pass has no collective."""
        rows, k, n = self.rows, self.k, self.n
        if direction == BACKWARD:
            k, n = n, k
        if self.kind == ROW and self.sequence_parallel:
            name = REDUCE_SCATTER if direction == FORWARD else ALL_GATHER
        elif self.kind == ROW:
            name = ALL_REDUCE if direction == FORWARD else ""
        elif self.sequence_parallel:
            name = ALL_GATHER if direction == FORWARD else REDUCE_SCATTER
        else:
            name = ALL_REDUCE if direction == BACKWARD and self.reduce_input_grad else ""
        return LayerOperator(direction, Matmul(name, rows, k, n, self.dtype, self.device, self.ranks)) if name else None

    @property
    def operators(self) -> list[LayerOperator]:
        """The operators of forward and backward that have a collective."""
        found = (self.operator(FORWARD), self.operator(BACKWARD))
        return [operator for operator in found if operator is not None]
