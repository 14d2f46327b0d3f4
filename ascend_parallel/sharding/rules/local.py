"""A rank's part of an operator: its local tensors, and where they lie in the whole ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.layout import SUM, Layout, Shape, bounds, local_shape

AllReduce = Callable[[torch.Tensor, int, str], torch.Tensor]
"""Takes what this rank gives, a mesh dimension and "sum" or "max"; returns that over the ranks of the line."""


@dataclass(frozen=True)
class Part:
    """What a rank has when it runs its part of a call.

    inputs
        Local tensors, one per `OpCall.inputs`.
    input_layouts, output_layouts
        One layout per tensor.
    coordinate
        The rank's place on each mesh dimension.
    all_reduce
        For an operator that has collectives of its own (`Reduction`); None where no other rank is there.
    stream
        Names the random numbers of this call, alike on all ranks: another one, other numbers. "": it draws none.
    """

    call: OpCall
    inputs: tuple[torch.Tensor, ...]
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    all_reduce: AllReduce | None = None
    stream: str = ""

    def output_shape(self, index: int = 0) -> Shape:
        """Return the shape of a local output."""
        shape = self.call.outputs[index].shape
        return local_shape(shape, self.output_layouts[index], self.mesh_shape, self.coordinate)

    def input_bounds(self, index: int) -> list[tuple[int, int]]:
        """Return this rank's [start, stop) of every dimension of an input."""
        shape = self.call.inputs[index].shape
        return bounds(shape, self.input_layouts[index], self.mesh_shape, self.coordinate)

    def only_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a term to be added to an output: zeros but on the first of the ranks whose outputs are summed.

        The zeros stay connected to `tensor` for autograd, for its gradient may be waited for on every rank.
        """
        places = zip(self.output_layouts[0], self.coordinate, strict=True)
        if all(place == 0 for state, place in places if state == SUM):
            return tensor
        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)

    def reduced(self, tensor: torch.Tensor, mesh_dim: int, op: str) -> torch.Tensor:
        """Return a tensor's "sum" or "max" over the ranks of this rank's line of a mesh dimension; no gradient."""
        if self.all_reduce is None:
            raise RuntimeError(f"{self.call.name} has a collective of its own here: run_local needs all_reduce")
        return self.all_reduce(tensor, mesh_dim, op)

    def run(self, /, **changed: Any) -> Any:
        """Run the operator on the local tensors, the named arguments changed.

        An in-place operator works on a copy: a graph's values do not change.
        """
        args, kwargs = pytree.tree_map(self._replaced, (tuple(self.call.args), dict(self.call.kwargs)))
        args = list(args)
        for place, argument in enumerate(self._schema_arguments()):
            at: Any = (args, place) if place < len(args) else (kwargs, argument.name)
            if argument.name in changed:
                at[0][at[1]] = changed[argument.name]
            elif argument.alias_info is not None and argument.alias_info.is_write and argument.name != "out":
                at[0][at[1]] = pytree.tree_map_only(torch.Tensor, torch.clone, at[0][at[1]])
        return self.call.target(*args, **kwargs)

    def _replaced(self, argument: Any) -> Any:
        return self.inputs[argument.index] if isinstance(argument, Ref) else argument

    def _schema_arguments(self) -> Sequence[Any]:
        schema = getattr(self.call.target, "_schema", None)
        return schema.arguments if schema is not None else ()

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Give random numbers that differ between the pieces of the output and agree where ranks hold the same one.

        They are seeded by `stream` and the piece alone; the process's own generators are neither asked nor changed.
        """
        if not self.stream:
            raise RuntimeError(f"{self.call.name} draws random numbers: run_local needs stream")
        digest = hashlib.sha256(f"{self.stream}/{self._piece()}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        devices = {one.device for one in self.inputs if one.device.type not in ("cpu", "meta")}
        kind = next(iter(devices)).type if devices else "cuda"
        with torch.random.fork_rng([one.index for one in devices], device_type=kind):
            torch.manual_seed(seed)
            yield

    def _piece(self) -> int:
        """Return the number of this rank's piece among the output's pieces."""
        number = 0
        for state, size, place in zip(self.output_layouts[0], self.mesh_shape, self.coordinate, strict=True):
            number = number * size + place if state.kind == "shard" else number
        return number
