"""A rank's part of an operator's call: compiled once for its layouts, then run on local tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ascend_parallel.ops.clocks import runs_ahead
from ascend_parallel.overlap.projected import Projection
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.layout import SUM, Layout, Shape, bounds, local_shape


class AllReduce(Protocol):
    """The reduction of a local tensor over the ranks of this rank's line of a mesh dimension."""

    def __call__(self, tensor: torch.Tensor, mesh_dim: int, op: str, direction: str = "forward") -> torch.Tensor:
        """Return the "sum" or "max"; direction: "forward" or "backward", in which the operator asks for it."""


@dataclass(frozen=True)
class ExchangeRanks:
    """The ranks among which an operator exchanges tokens or heads: those of this rank's line of a mesh dimension.

    places
        The index along the mesh dimension of each rank of `group`.
    settings
        In how many groups the experts, or the heads, are exchanged.
    projection
        Of an attention: the linear layer that reads its output, the same on all ranks.
    """

    group: dist.ProcessGroup
    places: Sequence[int]
    settings: Settings
    projection: Projection | None = None


FindExchangeRanks = Callable[[int], ExchangeRanks]
"""Returns the ranks along a mesh dimension."""


@dataclass(frozen=True)
class LocalCall:
    """A rank's part of a call without its tensors: everything that is the same in every step.

    input_layouts, output_layouts
        One layout per tensor of `call.inputs` and `call.outputs`.
    coordinate
        The rank's index on each mesh dimension.
    run
        Runs the part where the operator on the local tensors would be wrong; None: the operator runs on them.
    draws
        Whether the call draws random numbers.
    """

    call: OpCall
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    run: Callable[[Part], Any] | None = None
    draws: bool = False

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        all_reduce: AllReduce | None = None,
        stream: str = "",
        find_exchange_ranks: FindExchangeRanks | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the local outputs; differentiable by autograd.

        inputs
            Local tensors, one per `call.inputs`: even slices of the whole tensors.
        all_reduce
            For an operator that runs collectives itself (`Reduction`).
        stream
            Names the call's random numbers, for operators that draw them; the same on all ranks.
        find_exchange_ranks
            For an operator that exchanges tokens or heads (`Exchange`).
        """
        if self.draws:
            result = self._seeded(Part(self, tuple(inputs), all_reduce, stream))
        elif self.run is None:
            result = self.operator(inputs)
        else:
            result = self.run(Part(self, tuple(inputs), all_reduce, stream, find_exchange_ranks))
        if isinstance(result, torch.Tensor):
            return (result,)
        return tuple(tensor for tensor in result if isinstance(tensor, torch.Tensor))

    def operator(self, inputs: Sequence[torch.Tensor], changed: Mapping[str, Any] | None = None) -> Any:
        """Run the operator on local tensors, with the named arguments replaced.

        An in-place operator writes to a copy: a graph's values are immutable.
        """
        args, kwargs = list(self.call.args), dict(self.call.kwargs)
        for position, index in self._inputs_in_args:
            args[position] = inputs[index]
        for into, place, fill in self._other_tensors:
            (args if into == "args" else kwargs)[place] = fill(inputs)  # type: ignore[index]
        if changed:
            for name, value in changed.items():
                place = self._places[name]
                (args if isinstance(place, int) else kwargs)[place] = value  # type: ignore[index]
        return self.call.target(*args, **kwargs)

    @cached_property
    def output_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the local outputs."""
        outputs = zip(self.call.outputs, self.output_layouts, strict=False)
        return tuple(local_shape(meta.shape, layout, self.mesh_shape, self.coordinate) for meta, layout in outputs)

    @cached_property
    def input_bounds(self) -> tuple[list[tuple[int, int]], ...]:
        """This rank's [start, stop) of every dimension of each input."""
        inputs = zip(self.call.inputs, self.input_layouts, strict=True)
        return tuple(bounds(meta.shape, layout, self.mesh_shape, self.coordinate) for meta, layout in inputs)

    @cached_property
    def slice_index(self) -> int:
        """The index of this rank's slice among the slices of the first output."""
        index = 0
        for placement, size, place in zip(self.output_layouts[0], self.mesh_shape, self.coordinate, strict=True):
            index = index * size + place if placement.kind == "shard" else index
        return index

    @cached_property
    def is_first(self) -> bool:
        """Whether this rank is the first of the ranks whose outputs are summed."""
        places = zip(self.output_layouts[0], self.coordinate, strict=True)
        return all(place == 0 for placement, place in places if placement == SUM)

    def _seeded(self, part: Part) -> Any:
        """Run the part with random numbers that differ between slices of the output, and agree on equal slices.

        The seed depends only on the stream and the slice; the process's own generators are left as they were.
        """
        if not part.stream:
            raise RuntimeError(f"{self.call.name} draws random numbers: give stream")
        digest = hashlib.sha256(f"{part.stream}/{self.slice_index}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        generators = [torch.default_generator, *map(_generator, self._accelerators(part.inputs))]
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            return (self.run or Part.run)(part)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _accelerators(self, inputs: Sequence[torch.Tensor]) -> set[torch.device]:
        """Return the devices other than the CPU on which the call draws."""
        made_on = self.call.kwargs.get("device")
        devices = {tensor.device for tensor in inputs} | ({torch.device(made_on)} if made_on else set())
        return {device for device in devices if runs_ahead(device.type)}

    @cached_property
    def _places(self) -> dict[str, int | str]:
        """The place of each argument of the schema: its index among `args`, or its name among `kwargs`."""
        count = len(self.call.args)
        names = [argument.name for argument in self.call.declared]
        return {name: place if place < count else name for place, name in enumerate(names)}

    @cached_property
    def _inputs_in_args(self) -> tuple[tuple[int, int], ...]:
        """The arguments among `args` that are inputs: the place there, and the input's index."""
        written, args = self._written, enumerate(self.call.args)
        return tuple(
            (place, argument.index) for place, argument in args if isinstance(argument, Ref) and place not in written
        )

    @cached_property
    def _other_tensors(self) -> tuple[tuple[str, int | str, Callable[[Sequence[torch.Tensor]], Any]], ...]:
        """The other arguments that hold tensors: "args" or "kwargs", the place there, and how to fill it."""
        direct = {place for place, _ in self._inputs_in_args}
        given = [("args", place, argument) for place, argument in enumerate(self.call.args) if place not in direct]
        given += [("kwargs", name, argument) for name, argument in self.call.kwargs.items()]  # type: ignore[misc]
        return tuple(
            (into, place, _filler(argument, copied=place in self._written))
            for into, place, argument in given
            if any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(argument))
        )

    @cached_property
    def _written(self) -> set[int | str]:
        """The places of the arguments that the operator writes to."""
        return {
            self._places[argument.name]
            for argument in self.call.declared
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "out"
        }


@dataclass(frozen=True)
class Part:
    """A rank's part of a call, as the `run` of a rule gets it.

    local
        What is the same in every step.
    inputs
        Local tensors, one per `OpCall.inputs`.
    all_reduce
        For an operator that runs collectives itself (`Reduction`); None without other ranks.
    stream
        Names the call's random numbers, the same on all ranks; another stream, other numbers. "": the call draws none.
    find_exchange_ranks
        For an operator that exchanges tokens or heads (`Exchange`); None without other ranks.
    """

    local: LocalCall
    inputs: tuple[torch.Tensor, ...]
    all_reduce: AllReduce | None = None
    stream: str = ""
    find_exchange_ranks: FindExchangeRanks | None = None

    @property
    def call(self) -> OpCall:
        """The call, with the whole tensors' shapes."""
        return self.local.call

    @property
    def input_layouts(self) -> tuple[Layout, ...]:
        """One layout per input."""
        return self.local.input_layouts

    @property
    def output_layouts(self) -> tuple[Layout, ...]:
        """One layout per output."""
        return self.local.output_layouts

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each mesh dimension."""
        return self.local.mesh_shape

    @property
    def coordinate(self) -> tuple[int, ...]:
        """The rank's index on each mesh dimension."""
        return self.local.coordinate

    def output_shape(self, index: int = 0) -> Shape:
        """Return the shape of a local output."""
        return self.local.output_shapes[index]

    def input_bounds(self, index: int) -> list[tuple[int, int]]:
        """Return this rank's [start, stop) of every dimension of an input."""
        return self.local.input_bounds[index]

    def only_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a term to add to an output: `tensor` on the first of the ranks whose outputs are summed, else zeros.

        The zeros stay connected to `tensor` for autograd, because every rank may wait for its gradient.
        """
        if self.local.is_first:
            return tensor
        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)

    def reduced(self, tensor: torch.Tensor, mesh_dim: int, op: str, direction: str = "forward") -> torch.Tensor:
        """Return the "sum" or "max" of a tensor over this rank's line of a mesh dimension; not differentiable.

        direction: "backward" in an operator's own backward.
        """
        if self.all_reduce is None:
            raise RuntimeError(f"{self.call.name} runs a collective itself here: give all_reduce")
        return self.all_reduce(tensor, mesh_dim, op, direction)

    def exchange_ranks(self, mesh_dim: int) -> ExchangeRanks:
        """Return the ranks among which the operator exchanges tokens or heads along a mesh dimension."""
        if self.find_exchange_ranks is None:
            raise RuntimeError(f"{self.call.name} exchanges tokens with other ranks here: give find_exchange_ranks")
        return self.find_exchange_ranks(mesh_dim)

    def run(self, /, **changed: Any) -> Any:
        """Run the operator on the local tensors, with the named arguments replaced.

        An in-place operator writes to a copy: a graph's values are immutable.
        """
        return self.local.operator(self.inputs, changed)


def _generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _filler(argument: Any, copied: bool) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return the function that replaces an argument's `Ref`s by tensors or copies of them."""

    def tensor(leaf: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        return inputs[leaf.index].clone() if copied else inputs[leaf.index]

    if isinstance(argument, (list, tuple)) and not any(isinstance(item, (list, tuple, dict)) for item in argument):
        return lambda inputs: [tensor(item, inputs) for item in argument]
    return lambda inputs: pytree.tree_map(lambda leaf: tensor(leaf, inputs), argument)
