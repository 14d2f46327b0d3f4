"""Parameters that are gathered where they are read. Backward gathers them a second time instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

Gather = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Regathered:
    """A saved tensor as a view of the result of `gather`."""

    gather: Gather
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.gather().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Kept:
    """A saved tensor, detached so that a saved result does not keep its graph. Under hooks torch checks no version."""

    kept: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        if self.kept._version != self.version:
            shape = list(self.kept.shape)
            raise RuntimeError(f"a tensor of shape {shape} that backward needs was changed in place after forward")
        return self.kept


_GATHERS: ContextVar[dict[int, Gather] | None] = ContextVar("gathered", default=None)


@contextmanager
def regather_in_backward(tensors: Sequence[tuple[torch.Tensor, Gather]]) -> Iterator[None]:
    """Make autograd save how to gather these tensors, and their concatenations, instead of the tensors.

    Each pair is a contiguous tensor and the function that gathers it. The function runs a collective, so all ranks must
    run the same backward. Other tensors are saved unchanged.
    """
    gathers = {_storage(tensor): gather for tensor, gather in tensors if tensor.numel()}
    token = _GATHERS.set(gathers)

    def pack(saved: torch.Tensor) -> _Kept | _Regathered:
        gather = gathers.get(_storage(saved))
        if gather is None:
            return _Kept(saved.detach(), saved._version)
        return _Regathered(gather, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def unpack(packed: _Kept | _Regathered) -> torch.Tensor:
        return packed.tensor()

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _GATHERS.reset(token)


def note_joined(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Note that `joined` is ``torch.cat(parts)``: if all parts are regathered in backward, so is `joined`."""
    known = _GATHERS.get()
    if not known:
        return
    found = [(known.get(_storage(part)), part) for part in parts]
    gathers = [_gather_part(gather, part) for gather, part in found if gather is not None]
    if len(gathers) == len(parts):
        known[_storage(joined)] = lambda: torch.cat([gather() for gather in gathers])


def _gather_part(gather: Gather, part: torch.Tensor) -> Gather:
    return _Regathered(gather, tuple(part.shape), part.stride(), int(part.storage_offset())).tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
