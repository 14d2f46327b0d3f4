"""A rank's part of an operator's call: its local tensors and their position in the whole tensors."""

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
"""all_reduce(local tensor, mesh dimension, "sum" or "max"): the reduction over the ranks of this rank's line."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a call.

    inputs
        Local tensors, one per `OpCall.inputs`.
    input_layouts, output_layouts
        One layout per tensor.
    coordinate
        The rank's index on each mesh dimension.
    all_reduce
        For an operator that runs collectives itself (`Reduction`); None without other ranks.
    stream
        Names the call's random numbers, the same on all ranks; another stream, other numbers. "": the call draws none.
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
        """Return a term to add to an output: `tensor` on the first of the ranks whose outputs are summed, else zeros.

        The zeros stay connected to `tensor` for autograd, because every rank may wait for its gradient.
        """
        places = zip(self.output_layouts[0], self.coordinate, strict=True)
        if all(place == 0 for placement, place in places if placement == SUM):
            return tensor
        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)

    def reduced(self, tensor: torch.Tensor, mesh_dim: int, op: str) -> torch.Tensor:
        """Return the "sum" or "max" of a tensor over this rank's line of a mesh dimension; not differentiable."""
        if self.all_reduce is None:
            raise RuntimeError(f"{self.call.name} runs a collective itself here: run_local needs all_reduce")
        return self.all_reduce(tensor, mesh_dim, op)

    def run(self, /, **changed: Any) -> Any:
        """Run the operator on the local tensors, with the named arguments replaced.

        An in-place operator writes to a copy: a graph's values are immutable.
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
        """Seed random numbers that differ between slices of the output, and agree between ranks with the same slice.

        The seed depends only on `stream` and the slice; the process's own generators are neither read nor changed.
        """
        if not self.stream:
            raise RuntimeError(f"{self.call.name} draws random numbers: run_local needs stream")
        digest = hashlib.sha256(f"{self.stream}/{self._slice_index()}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        devices = {tensor.device for tensor in self.inputs if tensor.device.type not in ("cpu", "meta")}
        kind = next(iter(devices)).type if devices else "cuda"
        with torch.random.fork_rng([device.index for device in devices], device_type=kind):
            torch.manual_seed(seed)
            yield

    def _slice_index(self) -> int:
        """Return the index of this rank's slice among the output's slices."""
        index = 0
        for placement, size, place in zip(self.output_layouts[0], self.mesh_shape, self.coordinate, strict=True):
            index = index * size + place if placement.kind == "shard" else index
        return index
