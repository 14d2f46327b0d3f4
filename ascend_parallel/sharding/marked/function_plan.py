"""A compiled call of a torch function on DTensors: this rank's part of each of its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import TensorMeta, Value
from ascend_parallel.sharding.layout import Layout
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.rules import LocalCall
from ascend_parallel.sharding.rules.local import AllReduce


@dataclass(frozen=True)
class Argument:
    """A DTensor among a call's arguments: the whole tensor, and the layout in which it is held."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    differentiable: bool


@dataclass(frozen=True)
class OperatorRun:
    """A rank's part of an operator: the conversions of what it reads, its local call, and what it gives."""

    reads: tuple[tuple[Value, DifferentiableRedistribution | None], ...]
    local: LocalCall
    all_reduce: AllReduce | None
    gives: tuple[tuple[Value, DifferentiableRedistribution | None], ...]


@dataclass(frozen=True)
class FunctionPlan:
    """A compiled call.

    inputs
        For each argument the layout in which it is read, which is how its gradient is laid out.
    results
        What the function returns, with a `Value` for each tensor.
    metas, layouts
        Whole tensor, and layout, of each `Value`.
    updates
        The new values of arguments that the function writes to, by the argument's index.
    views
        For each value that is a view of an argument, on one card: the argument's index.
    constants
        Whole tensors that the function made of its other arguments.
    """

    runs: tuple[OperatorRun, ...]
    inputs: tuple[Layout, ...]
    names: tuple[Value, ...]
    results: tuple[Any, ...]
    results_spec: pytree.TreeSpec
    metas: dict[Value, TensorMeta]
    layouts: dict[Value, Layout]
    updates: dict[int, Value]
    views: dict[Value, int]
    constants: dict[Value, torch.Tensor]

    @cached_property
    def draws(self) -> bool:
        """Whether the call draws random numbers."""
        return any(run.local.draws for run in self.runs)

    def run(self, locals_: Sequence[torch.Tensor], stream: str) -> dict[Value, torch.Tensor]:
        """Return this rank's part of each tensor, from those of the arguments; differentiable.

        stream: names the random numbers; the same on all ranks.
        """
        values = {**self.constants, **dict(zip(self.names, locals_, strict=True))}
        for place, run in enumerate(self.runs):
            inputs = [_converted(values[value], conversion) for value, conversion in run.reads]
            outputs = run.local(inputs, run.all_reduce, f"{stream}/{place}" if stream else "")
            for (value, conversion), output in zip(run.gives, outputs, strict=True):
                values[value] = _converted(output, conversion)
        return values


def _converted(tensor: torch.Tensor, conversion: DifferentiableRedistribution | None) -> torch.Tensor:
    return tensor if conversion is None else conversion(tensor)
