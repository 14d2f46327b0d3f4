"""Runs a block of a forward a second time in backward, and keeps some results from its first run.

The block runs under torch.utils.checkpoint, which keeps no tensor that autograd saves in the block. When backward
needs the first of these tensors, the block runs again until the last of them exists. This module adds two things:

- Kept results are not computed twice. Autograd functions and operators still run, because they save tensors.
- If the second run communicates, a tensor saved before the last operator makes all ranks begin and end the second run
  at the same operators, even if their parts of an operator save different numbers of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ascend_parallel.overlap.layer import Products
from ascend_parallel.sharding.rules.local import AllReduce

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Kept:
    """A result of the first run."""

    tensor: torch.Tensor
    requires_grad: bool
    version: int

    @classmethod
    def of(cls, result: torch.Tensor) -> _Kept:
        return cls(result.detach(), result.requires_grad, result._version)

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a result that was kept for recomputation was changed in place after forward")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class SavedResults:
    """The results that a block's first run keeps for its second run, in the order in which they are computed."""

    def __init__(self, *, keep_collectives: bool) -> None:
        """Begin before the first run."""
        self._keep_collectives = keep_collectives
        self._entries: list[Any] = []
        self._next: int | None = None

    def begin(self) -> None:
        """Begin the first run, or a later run."""
        self._in_backward = self._next is not None
        self._next = 0

    def conversion(self, run: Callable[[], torch.Tensor], communicates: bool) -> torch.Tensor:
        """Return ``run()``, a redistributed tensor. It is kept if `keep_collectives` and it `communicates`."""
        return self._kept(run, self._keep_collectives and communicates)

    def reducing(self, all_reduce: AllReduce, *, keep: bool) -> AllReduce:
        """Return an `all_reduce` for an operator; its results are kept with `keep` or `keep_collectives`.

        Those of the operator's own backward run once anyway.
        """

        def kept(tensor: torch.Tensor, mesh_dim: int, op: str, direction: str = "forward") -> torch.Tensor:
            if direction == "backward":
                return all_reduce(tensor, mesh_dim, op, direction)
            return self._kept(lambda: all_reduce(tensor, mesh_dim, op), keep or self._keep_collectives)

        return kept

    def kernel(self, run: Callable[[], Products], *, keep: bool, communicates: bool, read: bool) -> Products:
        """Return a kernel's output and the gathered input that it saves.

        keep
            Keep both. Without `keep` they are kept if the kernel `communicates` and `keep_collectives`.
        read
            Whether the block reads the output. If not, the second run gets zeros of its shape.
        """
        if self._in_backward:
            kept: tuple[_Kept, _Kept | None] | None = self._take()
            if kept is None:
                return run()
            kept_output, kept_saved = kept
            return kept_output.restore(), None if kept_saved is None else kept_saved.restore()
        output, saved = run()
        keep = keep or (communicates and self._keep_collectives)
        unread = not read and (keep or saved is None)
        left = output.new_zeros(()).expand(output.shape) if unread else output
        entry = (_Kept.of(left), None if saved is None else _Kept.of(saved)) if keep or unread else None
        self._entries.append(entry)
        return output, saved

    def operator(self, run: Callable[[], Tensors]) -> Tensors:
        """Return the outputs of an operator without collectives of its own, and keep them."""
        if self._in_backward:
            giving: AbstractContextManager[None] = self._take()
            with giving:
                return run()
        keeping, giving = create_selective_checkpoint_contexts(_all_but_views)  # type: ignore[no-untyped-call]
        self._entries.append(giving)
        with keeping:
            return run()

    def _kept(self, run: Callable[[], torch.Tensor], keep: bool) -> torch.Tensor:
        if self._in_backward:
            kept: _Kept | None = self._take()
            return run() if kept is None else kept.restore()
        result = run()
        self._entries.append(_Kept.of(result) if keep else None)
        return result

    def _take(self) -> Any:
        assert self._next is not None
        self._next += 1
        return self._entries[self._next - 1]


def recompute_in_backward(
    body: Callable[[SavedResults, Tensors], Tensors], inputs: Tensors, *, keep_collectives: bool
) -> Tensors:
    """Run `body` and make backward run it again. Only `inputs` and the entries of `SavedResults` are kept.

    Random numbers are the same in both runs. `body` must not write buffers or other state.
    """
    results = SavedResults(keep_collectives=keep_collectives)

    def run(*tensors: torch.Tensor) -> Tensors:
        results.begin()
        return body(results, tensors)

    outputs: Tensors = checkpoint(run, *inputs, use_reentrant=False)
    return outputs


def sync_boundary(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Save a tensor here so that every rank begins and ends recomputation at the same operator.

    Returns the operator's inputs. The first input that requires a gradient goes through an identity whose backward
    needs the saved tensor: recomputation starts at the latest in that backward, and does not end before this point.
    """
    place = next((index for index, tensor in enumerate(inputs) if tensor.requires_grad), None)
    if place is None:
        return inputs
    marked: torch.Tensor = _SyncBoundary.apply(inputs[place])  # type: ignore[no-untyped-call]
    return [*inputs[:place], marked, *inputs[place + 1 :]]


class _SyncBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors  # unpacking the saved tensor runs the block again
        return gradient


def _all_but_views(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save all results but views: a view would keep its base."""
    is_view = any(result.alias_info is not None for result in operator._schema.returns)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_view else CheckpointPolicy.MUST_SAVE
