"""Gradients of parameters summed over ranks: in buckets under backward, or later.

What autograd brings to a parameter that is read as a copy is this rank's term of its gradient. The terms of a bucket
are summed as one tensor, started as soon as the last of them is there, while backward goes on; the end of backward
waits. All ranks run the same graph, whose backward torch runs in the reverse of its order, so buckets fill alike on all
of them, and they are started in the buckets' own order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import note
from ascend_parallel.sharding.redistribute.costs import ALL_REDUCE, sent
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.gradient_buckets import Backward, Slot, Sum, Term, give_all
from ascend_parallel.sharding.runtime.gradient_plan import Bucket, Summed, buckets


class Gradients:
    """Sums the gradients of a rank's parameters."""

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: ProcessMesh,
        summed: Sequence[Summed],
        bucket_bytes: int,
        counts: Counter[CollectiveEvent],
    ) -> None:
        """Take the module with the parameters, those that are held whole somewhere, and the size of a bucket."""
        place = mesh.coordinate(dist.get_rank())
        assert place is not None
        self._module, self._mesh, self._place, self._counts = module, mesh, place, counts
        self._summed, self._bucket_bytes = {one.value: one for one in summed}, bucket_bytes
        self.buckets = buckets(summed, bucket_bytes)
        self._bucket_of = {one.value: index for index, bucket in enumerate(self.buckets) for one in bucket.members}
        self._suspended: frozenset[int] = frozenset()
        self._held_back: dict[Value, tuple[int, ...]] = {}
        # A backward's own; torch's queue of what to call at its end keeps it, and lets it go if backward fails.
        self._running: WeakValueDictionary[int, Backward] = WeakValueDictionary()

    def read(self, value: Value, leaf: torch.Tensor) -> torch.Tensor:
        """Return a parameter as its readers have it, whose terms of the gradient come here."""
        if value not in self._summed or not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        found: torch.Tensor = _Read.apply(leaf, self, self._summed[value])  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def no_sync(self, dims: Sequence[str]) -> Iterator[None]:
        """Sum nothing over these mesh dimensions, over none if they are not named, in backward inside."""
        if not self._bucket_bytes:
            raise ValueError("no_sync with bucket_bytes=0, by which each gradient is summed where it stands: give more")
        before = self._suspended
        self._suspended = before | {self._mesh.dim(name) for name in dims or self._mesh.dim_names}
        try:
            yield
        finally:
            self._suspended = before

    def reduce(self, dims: Sequence[str]) -> None:
        """Sum what was held back over these mesh dimensions, or over all."""
        chosen = {self._mesh.dim(name) for name in dims or self._mesh.dim_names}
        found = []
        for one in self._summed.values():
            over = tuple(dim for dim in self._held(one, self._leaf(one)) if dim in chosen)
            if over:
                found.append(replace(one, dims=over))
        give_all([self._sum_held(bucket) for bucket in buckets(found, self._bucket_bytes)])

    def arrived(self, one: Summed, leaf: torch.Tensor, term: torch.Tensor) -> torch.Tensor | None:
        """Take a term of a gradient that backward brings; return what goes to the parameter at once."""
        if torch.is_grad_enabled():
            raise RuntimeError(f"{one.name}: a sharded model differentiates once, and not with create_graph=True")
        if _has_hooks(leaf):
            raise RuntimeError(
                f"{one.name} has a hook on its gradient, which is summed over ranks after hooks have run: give "
                "bucket_bytes=0"
            )
        now = tuple(dim for dim in one.dims if dim not in self._suspended)
        later = tuple(dim for dim in sorted((*one.dims, *one.whole)) if dim in self._suspended)
        if later:
            self._hold_back(one, leaf, later)
            if any(self._place[dim] for dim in later if dim in one.whole):
                term = torch.zeros_like(term)  # of what every rank has whole the first one's is taken
        if later or not _accumulates(leaf):
            return self._at_once(one, term, now)
        term = self._with_held_back(one, leaf, term)
        if not now:
            return term
        self._backward().add(self._bucket_of[one.value], Term(one.value, leaf, term.to(grad_dtype(leaf))))
        return None

    def _backward(self) -> Backward:
        """Return what the running backward has brought so far."""
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        if running is None:
            running = self._running[task] = Backward([self._slot(bucket) for bucket in self.buckets], self._started)
            torch.autograd.Variable._execution_engine.queue_callback(running.end)
        return running

    def _slot(self, bucket: Bucket) -> Slot:
        return Slot(tuple(one.value for one in bucket.members if self._leaf(one).requires_grad), bucket.dims)

    def _leaf(self, one: Summed) -> torch.nn.Parameter:
        return self._module.get_parameter(one.name)

    def _started(self, tensor: torch.Tensor, dim: int, value: Value) -> dist.Work:
        self._counts[CollectiveEvent(ALL_REDUCE, self._mesh.dim_names[dim], "", value, "gradients", "backward")] += 1
        note(ALL_REDUCE, dim, sent(ALL_REDUCE, tensor.nbytes, self._mesh.shape[dim]))
        work: dist.Work | None = dist.all_reduce(tensor, group=self._mesh.group(dim), async_op=True)
        assert work is not None, "this rank is not a member of the group"
        return work

    def _at_once(self, one: Summed, term: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        total = term.clone(memory_format=torch.contiguous_format) if dims else term
        for dim in dims:
            self._started(total, dim, one.value).wait()
        return total

    def _held(self, one: Summed, leaf: torch.Tensor) -> tuple[int, ...]:
        """Return the mesh dimensions over which a parameter's gradient is still to be summed."""
        if leaf.grad is None:  # taken away by the user
            self._held_back.pop(one.value, None)
        return self._held_back.get(one.value, ())

    def _hold_back(self, one: Summed, leaf: torch.Tensor, dims: tuple[int, ...]) -> None:
        held = self._held(one, leaf)
        if leaf.grad is not None and held != dims:
            before, now = (", ".join(self._mesh.dim_names[dim] for dim in some) for some in (held, dims))
            raise RuntimeError(
                f"{one.name} has a gradient that is {f'not summed over {before} yet' if before else 'summed'}, to "
                f"which no_sync would add one that is not summed over {now}: call "
                f"{'reduce_gradients()' if before else 'zero_grad(set_to_none=True)'} before"
            )
        self._held_back[one.value] = dims

    def _with_held_back(self, one: Summed, leaf: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """Return a term and what was held back before; if that is a part of another sum, sum it now."""
        held = self._held(one, leaf)
        if held and held == one.dims:
            assert leaf.grad is not None, "nothing is held back without a gradient"
            term = term + leaf.grad
            leaf.grad = None
            del self._held_back[one.value]
        elif held:
            give_all([self._sum_held(Bucket((replace(one, dims=held),)))])
        return term

    def _sum_held(self, bucket: Bucket) -> Sum:
        """Start to sum gradients in which something was held back, and take them from the parameters."""
        terms = []
        for one in bucket.members:
            leaf = self._leaf(one)
            assert leaf.grad is not None, "nothing is held back without a gradient"
            terms.append(Term(one.value, leaf, leaf.grad))
            leaf.grad = None
            left = tuple(dim for dim in self._held_back.pop(one.value) if dim not in bucket.dims)
            self._held_back |= {one.value: left} if left else {}
        return Sum(terms, bucket.dims, self._started)


class _Read(torch.autograd.Function):
    """A parameter as it is read; its gradient goes to `Gradients`."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, gradients: Gradients, one: Summed) -> torch.Tensor:
        ctx.gradients, ctx.one, ctx.leaf = gradients, one, leaf
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, term: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.gradients.arrived(ctx.one, ctx.leaf, term), None, None


def _has_hooks(leaf: torch.Tensor) -> bool:
    """Tell whether somebody hooks the gradient who does not know that it is a rank's term of it."""
    after = (leaf._post_accumulate_grad_hooks or {}).values()
    return bool(leaf._backward_hooks) or not all(getattr(hook, "takes_terms", False) for hook in after)


def _accumulates(leaf: torch.Tensor) -> bool:
    """Tell whether the running backward adds to the leaf's `.grad`; torch.autograd.grad returns the gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # how torch says that it is autograd.grad that runs
        return False
