"""The tensors that a repeated block returns, made without running the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._mode_utils import no_dispatch

from ascend_parallel.sharding.tracing.block_keys import UnknownValueError, flattened, key_of_tensor, rebuilt
from ascend_parallel.sharding.tracing.repeated_blocks import BlockCall


@dataclass(frozen=True)
class Output:
    """A leaf of a block's result: an argument, or a tensor that the block made, by number; or a constant."""

    number: int = -1
    is_made: bool = False
    requires_grad: bool = False
    constant: Any = None

    def leaf(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the argument or constant."""
        return tensors[self.number] if self.number >= 0 else self.constant


class Memory:
    """The memory of a copied block's tensors: what shares memory in one block shares it in the other."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Start with tensors of the block that was recorded, `old`, and their counterparts."""
        pairs = zip(old, new, strict=True)
        self._storages = {one.untyped_storage()._cdata: other.untyped_storage() for one, other in pairs}

    def like(self, tensor: FakeTensor) -> FakeTensor:
        """Return the counterpart of a tensor."""
        storage = tensor.untyped_storage()
        with torch._C.DisableTorchFunction(), no_dispatch():
            own = self._storages.get(storage._cdata)
            if own is None:
                own = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]
            plain = torch.empty(0, dtype=tensor.dtype, device="meta")
            plain.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
            return FakeTensor(tensor.fake_mode, plain, tensor.fake_device)

    def live(self, value: FakeTensor, output: Output) -> torch.Tensor:
        """Return the counterpart of a block's result, for the rest of the model: not a leaf for autograd."""
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), value.fake_mode, torch.enable_grad():
            result: torch.Tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.fake_device
            )
            if output.requires_grad:
                result = result.requires_grad_().clone()
        self._storages[value.untyped_storage()._cdata] = result.untyped_storage()
        return result


def outputs_of(
    leaves: Sequence[Any], tensors: Sequence[torch.Tensor], number_of: Callable[[torch.Tensor], int | None]
) -> tuple[Output, ...]:
    """Return where the leaves of a block's result come from.

    tensors
        The block's parameters, buffers and arguments.
    number_of
        Returns the number of a tensor that the block made, or None.

    Raises `UnknownValueError` for results that share memory with others or with arguments, or that `Memory.live` would
    not make the same.
    """
    outputs, memories = [], {tensor.untyped_storage()._cdata for tensor in tensors}
    places = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
    made: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            outputs.append(Output(constant=leaf))
        elif id(leaf) in places:
            outputs.append(Output(places[id(leaf)]))
        else:
            if not isinstance(leaf, FakeTensor):
                raise UnknownValueError("a result that is not traced")
            memory, number = leaf.untyped_storage()._cdata, number_of(leaf)
            if number is None or (memory in memories and made.get(number) != id(leaf)):
                raise UnknownValueError("a result that is not new")
            memories.add(memory)
            made[number] = id(leaf)
            outputs.append(Output(number, True, leaf.requires_grad))
            again = Memory([], []).live(leaf, outputs[-1])
            if key_of_tensor(again, {}) != key_of_tensor(leaf, {}):
                raise UnknownValueError("a result of unusual layout")
    return tuple(outputs)


@dataclass(frozen=True)
class CallsOfBlocks:
    """Records and repeats the calls of a forward that nothing traces; see `repeated_blocks.BlockRecorder`."""

    calls: list[Any]

    def key_of(self, call: BlockCall) -> Any:
        """Return nothing: all that counts is known."""
        return ()

    def begin(self, call: BlockCall) -> int:
        """Return the number of calls so far."""
        return len(self.calls)

    def end(self, begun: int, call: BlockCall, returned: Any) -> Any:
        """Return the block's calls and its result; raise `UnknownValueError` for a result that cannot be made again."""
        leaves: list[Any] = []
        structure = flattened(returned, leaves)
        made = {id(leaf): number for number, leaf in enumerate(leaves)}
        outputs = outputs_of(leaves, call.tensors, lambda leaf: made[id(leaf)])
        metas = tuple(key_of_tensor(leaf, {}) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return _Calls(tuple(self.calls[begun:]), outputs, (structure, metas), returned, tuple(leaves))

    def replay(self, record: _Calls, call: BlockCall) -> Any:
        """Repeat the calls, and return a new result."""
        self.calls.extend(record.calls)
        memory = Memory([], [])
        live = {
            output.number: memory.live(record.leaves[output.number], output)
            for output in record.outputs
            if output.is_made
        }
        leaves = [live[output.number] if output.is_made else output.leaf(call.tensors) for output in record.outputs]
        return rebuilt(record.returned, iter(leaves))


@dataclass(frozen=True)
class _Calls:
    """The calls of a block, and its result; of two blocks that did the same, the results are equal in their kinds."""

    calls: tuple[Any, ...]
    outputs: tuple[Output, ...]
    form: Any
    returned: Any = field(compare=False)
    leaves: tuple[Any, ...] = field(compare=False)
