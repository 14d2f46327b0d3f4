"""A region of a forward that runs again in backward, and what its second run takes over from the first.

The region runs under torch.utils.checkpoint, which keeps none of the tensors that autograd saves in it: when the first
of them is wanted, the region runs again, until the last of them is there. Two things are added. Some results are kept,
and so not computed twice: autograd functions and operators are called all the same, for what they save. And where
collectives run again, a saved tensor before the last operator sees to it that all ranks begin and end at the same ones,
however many tensors a rank's part of an operator saves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ascend_parallel.overlap.forward_wrapper import Products
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

    def again(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a result that was kept for recomputation has been changed in place since")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class Results:
    """What one region of one forward leaves to its second run, in the order in which it comes up."""

    def __init__(self, *, keep_collectives: bool) -> None:
        """Begin before the first run."""
        self._keep_collectives = keep_collectives
        self._entries: list[Any] = []
        self._next: int | None = None

    def begin(self) -> None:
        """Begin a run: the first, or another."""
        self._again = self._next is not None
        self._next = 0

    def conversion(self, run: Callable[[], torch.Tensor], communicated: Callable[[], bool]) -> torch.Tensor:
        """Return a tensor in another layout; what was sent for it is kept where collectives are."""
        return self._kept(run, lambda: self._keep_collectives and communicated())

    def reducing(self, all_reduce: AllReduce, *, keep: bool) -> AllReduce:
        """Return how an operator's own sums are made, which are kept where collectives are, or with `keep`."""

        def kept(tensor: torch.Tensor, mesh_dim: int, op: str) -> torch.Tensor:
            return self._kept(lambda: all_reduce(tensor, mesh_dim, op), lambda: keep or self._keep_collectives)

        return kept

    def kernel(self, run: Callable[[], Products], *, keep: bool, communicates: bool, read: bool) -> Products:
        """Return what a kernel gives and saves.

        keep
            Keep it anyway, and not only where collectives are kept and it `communicates`.
        read
            Whether the region needs what it gives; if not, nobody looks at it in a second run.
        """
        if self._again:
            kept: tuple[_Kept, _Kept | None] | None = self._take()
            if kept is None:
                return run()
            given, saved = kept
            return given.again(), None if saved is None else saved.again()
        given_now, saved_now = run()
        keep = keep or (communicates and self._keep_collectives)
        needless = not read and (keep or saved_now is None)
        left = given_now.new_zeros(()).expand(given_now.shape) if needless else given_now
        wanted = keep or needless
        self._entries.append((_Kept.of(left), None if saved_now is None else _Kept.of(saved_now)) if wanted else None)
        return given_now, saved_now

    def operator(self, run: Callable[[], Tensors]) -> Tensors:
        """Return what an operator without collectives of its own gives, which is kept."""
        if self._again:
            giving: AbstractContextManager[None] = self._take()
            with giving:
                return run()
        keeping, giving = create_selective_checkpoint_contexts(_all_but_views)  # type: ignore[no-untyped-call]
        self._entries.append(giving)
        with keeping:
            return run()

    def _kept(self, run: Callable[[], torch.Tensor], keep: Callable[[], bool]) -> torch.Tensor:
        if self._again:
            kept: _Kept | None = self._take()
            return run() if kept is None else kept.again()
        result = run()
        self._entries.append(_Kept.of(result) if keep() else None)
        return result

    def _take(self) -> Any:
        assert self._next is not None
        self._next += 1
        return self._entries[self._next - 1]


def recomputed(body: Callable[[Results, Tensors], Tensors], inputs: Tensors, *, keep_collectives: bool) -> Tensors:
    """Run `body`, of which backward keeps `inputs` and what goes through `Results`, and runs the rest again.

    Random numbers are the same in both runs. Buffers and other state must not be written inside.
    """
    results = Results(keep_collectives=keep_collectives)

    def run(*tensors: torch.Tensor) -> Tensors:
        results.begin()
        return body(results, tensors)

    given: Tensors = checkpoint(run, *inputs, use_reentrant=False)
    return given


def fenced(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an operator's inputs, one of them so that its backward, and the region's second run, needs what is there.

    The region runs again at the latest when the gradient comes by here, and does not end before it has come by here.
    """
    place = next((index for index, one in enumerate(inputs) if one.requires_grad), None)
    if place is None:
        return inputs
    return [_Fence.apply(one) if index == place else one for index, one in enumerate(inputs)]  # type: ignore[no-untyped-call]


class _Fence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors  # from here on the region has run again
        return gradient


def _all_but_views(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep results; a view would keep its base."""
    is_view = any(one.alias_info is not None for one in operator._schema.returns)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_view else CheckpointPolicy.MUST_SAVE
