"""Parameters that are gathered where they are read, and gathered again in backward instead of being kept for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

Gather = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Again:
    """A saved tensor as a view of what `gather` gives."""

    gather: Gather
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.gather().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Kept:
    """A saved tensor as it is, detached: a result would keep its graph. Under hooks torch checks no version."""

    kept: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        if self.kept._version != self.version:
            shape = list(self.kept.shape)
            raise RuntimeError(f"a tensor of shape {shape} that backward needs was changed in place after forward")
        return self.kept


_KNOWN: ContextVar[dict[int, Gather] | None] = ContextVar("gathered", default=None)


@contextmanager
def gathered_again(tensors: Sequence[tuple[torch.Tensor, Gather]]) -> Iterator[None]:
    """Have autograd keep, of these tensors and what is joined of them, only how they are made; the rest as it is.

    Each is contiguous and given with what makes it again. That is a collective: ranks run the same backward.
    """
    known = {_storage(tensor): gather for tensor, gather in tensors if tensor.numel()}
    token = _KNOWN.set(known)

    def pack(saved: torch.Tensor) -> _Kept | _Again:
        gather = known.get(_storage(saved))
        if gather is None:
            return _Kept(saved.detach(), saved._version)
        return _Again(gather, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def unpack(kept: _Kept | _Again) -> torch.Tensor:
        return kept.tensor()

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _KNOWN.reset(token)


def note_joined(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Tell that `joined` is ``torch.cat(parts)``: if all parts are gathered again, so is it."""
    known = _KNOWN.get()
    if not known:
        return
    found = [(known.get(_storage(part)), part) for part in parts]
    gathers = [_part(gather, part) for gather, part in found if gather is not None]
    if len(gathers) == len(parts):
        known[_storage(joined)] = lambda: torch.cat([gather() for gather in gathers])


def _part(gather: Gather, part: torch.Tensor) -> Gather:
    return _Again(gather, tuple(part.shape), part.stride(), int(part.storage_offset())).tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
