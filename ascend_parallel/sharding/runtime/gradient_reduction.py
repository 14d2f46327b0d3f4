"""Sums parameter gradients over ranks: in buckets while backward runs, or later.

Autograd delivers this rank's term of the gradient to a parameter that is read as R*. The terms of a bucket are
all-reduced as one tensor, which starts when the last term arrives; backward runs on, and its end waits. Buckets start
in their own order, the same on all ranks: all ranks run the same graph, and torch runs backward in the reverse order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from ascend_parallel.ops.clocks import Work
from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.process_groups.collectives import ALL_REDUCE
from ascend_parallel.sharding.grad_dtype import grad_dtype
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.collectives import note
from ascend_parallel.sharding.redistribute.costs import sent
from ascend_parallel.sharding.runtime.collective_event import CollectiveEvent
from ascend_parallel.sharding.runtime.gradient_buckets import BackwardBuckets, BucketSum, Term, finish_all
from ascend_parallel.sharding.runtime.gradient_plan import Bucket, SummedGradient, buckets
from ascend_parallel.sharding.runtime.local_parameters import tensor_at

_Deferred = tuple[frozenset[int], tuple[tuple[int, ...], ...]]
"""The mesh dimensions to sum over, and for each parameter the dimensions over which its gradient is deferred."""


class GradientReducer:
    """Sums the gradients of a rank's parameters over ranks.

    leaves
        In `no_sync_of_step`, the replicated parameters by name; else empty.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: ProcessMesh,
        summed: Sequence[SummedGradient],
        bucket_bytes: int,
        counts: Counter[CollectiveEvent],
    ) -> None:
        """Take the module with the parameters, its replicated parameters, and the size of a bucket."""
        coordinate = mesh.coordinate(dist.get_rank())
        assert coordinate is not None
        self._module, self._mesh, self._coordinate, self._counts = module, mesh, coordinate, counts
        self._summed, self._bucket_bytes = tuple(summed), bucket_bytes
        self.buckets = buckets(summed, bucket_bytes)
        self._suspended: frozenset[int] = frozenset()
        self._deferred: dict[str, tuple[int, ...]] = {}  # by the parameter's name
        self._known_dims: dict[tuple[str, frozenset[int]], tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
        self._paths = {param.name: param.name.split(".") for param in summed}
        self.leaves: dict[str, torch.nn.Parameter] = {}
        self._last_reduced: tuple[_Deferred, tuple[Bucket, ...]] | None = None
        # By backward. torch's queue of end-of-backward callbacks owns the buckets, and drops them if backward fails.
        self._running: WeakValueDictionary[int, BackwardBuckets] = WeakValueDictionary()

    def read(self, param: SummedGradient, leaf: torch.Tensor) -> torch.Tensor:
        """Return the parameter for its readers; its gradient terms go to `take_term`."""
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        found: torch.Tensor = _Read.apply(leaf, self, param)  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def no_sync(self, dims: Sequence[str]) -> Iterator[None]:
        """Defer the sums over these mesh dimensions, or over all if none is named, in every backward inside."""
        if not self._bucket_bytes:
            raise ValueError(
                "no_sync needs buckets, and bucket_bytes=0 sums each gradient at once: give bucket_bytes>0"
            )
        before = self._suspended
        self._suspended = before | {self._mesh.dim(name) for name in dims or self._mesh.dim_names}
        try:
            yield
        finally:
            self._suspended = before

    @contextmanager
    def no_sync_of_step(self) -> Iterator[None]:
        """Defer all sums, as `no_sync`, of forwards whose backward also runs inside.

        Readers then get the parameters in `leaves`, and no autograd function runs for a parameter. What `take_term`
        does for each term runs here once: the checks before the first forward, the zeros after the last backward.
        """
        with self.no_sync(()):
            self.leaves = {param.name: self._leaf(param) for param in self._summed}
            try:
                elsewhere = self._defer_all() if torch.is_grad_enabled() else []
                yield
            finally:
                self.leaves = {}
            for leaf in elsewhere:
                if leaf.grad is not None:
                    leaf.grad = torch.zeros_like(leaf.grad)

    def _defer_all(self) -> list[torch.nn.Parameter]:
        """Defer the gradients to come; return the parameters whose full gradient another rank adds."""
        elsewhere = []
        for param in self._summed:
            leaf = self.leaves[param.name]
            if leaf.requires_grad:
                _refuse_hooks(param, leaf)
                _, later, is_first = self._dims(param)
                self._defer(param, leaf, later)
                if not is_first:
                    elsewhere.append(leaf)
        return elsewhere

    def reduce(self, dims: Sequence[str]) -> None:
        """Sum the deferred gradients over these mesh dimensions, or over all."""
        chosen = frozenset([self._mesh.dim(name) for name in dims or self._mesh.dim_names])
        leaves = {param.name: self._leaf(param) for param in self._summed}
        deferred = chosen, tuple([self._deferred_dims(name, leaf) for name, leaf in leaves.items()])
        if self._last_reduced is None or self._last_reduced[0] != deferred:
            self._last_reduced = deferred, self._deferred_buckets(*deferred)
        finish_all([self._sum_deferred(bucket, leaves) for bucket in self._last_reduced[1]])

    def _deferred_buckets(self, chosen: frozenset[int], deferred: Sequence[tuple[int, ...]]) -> tuple[Bucket, ...]:
        """Return the buckets of the deferred gradients; `deferred` are the dimensions of each in `self._summed`."""
        overs = [tuple(dim for dim in held if dim in chosen) for held in deferred]
        found = [replace(param, dims=over) for param, over in zip(self._summed, overs, strict=True) if over]
        return buckets(found, self._bucket_bytes)

    def take_term(self, param: SummedGradient, leaf: torch.Tensor, term: torch.Tensor) -> torch.Tensor | None:
        """Take a gradient term from backward; return the parameter's gradient, or None if a bucket takes the term."""
        if torch.is_grad_enabled():
            raise RuntimeError(f"{param.name}: a sharded model differentiates once: call backward without create_graph")
        _refuse_hooks(param, leaf)
        now, later, is_first = self._dims(param)
        if later:
            self._defer(param, leaf, later)
            if not is_first:
                term = torch.zeros_like(term)  # every rank has the full gradient: only the first rank adds its own
        if later or not _accumulates(leaf):
            return self._sum_now(param, term, now)
        term = self._with_deferred(param, leaf, term)
        if not now:
            return term
        self._backward().add(Term(param.value, leaf, term.to(grad_dtype(leaf))))
        return None

    def _dims(self, param: SummedGradient) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return the dimensions of sums now, of deferred sums, and if this rank is first on those with full gradients.

        The result is kept for the following backwards.
        """
        key = param.name, self._suspended
        if key not in self._known_dims:
            now = tuple(dim for dim in param.dims if dim not in self._suspended)
            later = tuple(dim for dim in sorted((*param.dims, *param.full_dims)) if dim in self._suspended)
            is_first = not any(self._coordinate[dim] for dim in later if dim in param.full_dims)
            self._known_dims[key] = now, later, is_first
        return self._known_dims[key]

    def _backward(self) -> BackwardBuckets:
        """Return the buckets of the running backward."""
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        if running is None:
            waits_for = [
                [param.value for param in bucket.members if self._leaf(param).requires_grad] for bucket in self.buckets
            ]
            running = BackwardBuckets(self.buckets, waits_for, self._start_sum, self._bucket_bytes)
            self._running[task] = running
            # Dies with torch's queue of callbacks. The buckets may live on in the frames of the error that is caught.
            task_alive = _TaskAlive()
            failed = finalize(task_alive, _give_back, running.taken, self._deferred)
            failed.atexit = False

            def end(running: BackwardBuckets = running, _alive: _TaskAlive = task_alive) -> None:
                running.end()
                failed.detach()

            torch.autograd.Variable._execution_engine.queue_callback(end)
        return running

    def _leaf(self, param: SummedGradient) -> torch.nn.Parameter:
        leaf = tensor_at(self._module, self._paths[param.name])
        assert isinstance(leaf, torch.nn.Parameter)
        return leaf

    def _start_sum(self, tensor: torch.Tensor, dim: int, value: Value) -> Work:
        self._counts[CollectiveEvent(ALL_REDUCE, self._mesh.dim_names[dim], "", value, "gradients", "backward")] += 1
        note(ALL_REDUCE, dim, sent(ALL_REDUCE, tensor.nbytes, self._mesh.shape[dim]))
        group = self._mesh.group(dim)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return NamedWork("the sum of gradients", work, group, tensor.device)

    def _sum_now(self, param: SummedGradient, term: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        total = term.clone(memory_format=torch.contiguous_format) if dims else term
        for dim in dims:
            self._start_sum(total, dim, param.value).wait()
        return total

    def _deferred_dims(self, name: str, leaf: torch.Tensor) -> tuple[int, ...]:
        """Return the mesh dimensions over which a parameter's gradient must still be summed."""
        if name not in self._deferred:
            return ()
        if leaf.grad is None:  # the user has cleared it
            del self._deferred[name]
            return ()
        return self._deferred[name]

    def _defer(self, param: SummedGradient, leaf: torch.Tensor, dims: tuple[int, ...]) -> None:
        held = self._deferred_dims(param.name, leaf)
        if leaf.grad is not None and held != dims:
            before, now = (", ".join(self._mesh.dim_names[dim] for dim in some) for some in (held, dims))
            raise RuntimeError(
                f"{param.name} has a gradient that is {f'not summed over {before} yet' if before else 'summed'}, and "
                f"no_sync would add a gradient that is not summed over {now}: call "
                f"{'reduce_gradients()' if before else 'zero_grad(set_to_none=True)'} before"
            )
        self._deferred[param.name] = dims

    def _with_deferred(self, param: SummedGradient, leaf: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """Return the term plus the deferred gradient, unless that is deferred over other mesh dimensions.

        The end of this backward sums such gradients, of several parameters as one tensor.
        """
        held = self._deferred_dims(param.name, leaf)
        if not held:
            return term
        assert leaf.grad is not None, "a deferred sum without a gradient"
        self._backward().taken.append((param.name, leaf, leaf.grad, held))
        if held == param.dims:
            term = term + leaf.grad
        else:
            self._backward().add_left(replace(param, dims=held), Term(param.value, leaf, leaf.grad))
        leaf.grad = None
        del self._deferred[param.name]
        return term

    def _sum_deferred(self, bucket: Bucket, leaves: Mapping[str, torch.Tensor]) -> BucketSum:
        """Take the deferred gradients from the parameters and start their sum."""
        terms, dims = [], bucket.dims
        for param in bucket.members:
            leaf, held = leaves[param.name], self._deferred.pop(param.name)
            assert leaf.grad is not None, "a deferred sum without a gradient"
            terms.append(Term(param.value, leaf, leaf.grad))
            leaf.grad = None
            if held != dims:
                self._deferred[param.name] = tuple(dim for dim in held if dim not in dims)
        return BucketSum(terms, dims, self._start_sum)


class _TaskAlive:
    """Is held by a backward's callback alone."""


def _give_back(
    taken: Sequence[tuple[str, torch.Tensor, torch.Tensor, tuple[int, ...]]], deferred: dict[str, tuple[int, ...]]
) -> None:
    """Give the parameters back what a backward that failed has taken of them: gradients that `no_sync` deferred."""
    for name, leaf, gradient, dims in taken:
        if leaf.grad is None:
            leaf.grad, deferred[name] = gradient, dims


class _Read(torch.autograd.Function):
    """The identity in forward; backward hands the gradient term to the `GradientReducer`."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, gradients: GradientReducer, param: SummedGradient) -> torch.Tensor:
        ctx.gradients, ctx.param, ctx.leaf = gradients, param, leaf
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, term: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.gradients.take_term(ctx.param, ctx.leaf, term), None, None


def _refuse_hooks(param: SummedGradient, leaf: torch.Tensor) -> None:
    """Raise `RuntimeError` for a hook on the gradient, unless it declares `takes_terms`: it would see a rank's term."""
    if not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks:
        return
    after = (leaf._post_accumulate_grad_hooks or {}).values()
    if leaf._backward_hooks or not all(getattr(hook, "takes_terms", False) for hook in after):
        raise RuntimeError(
            f"{param.name} has a hook on its gradient, and the gradient is summed over ranks after hooks have run: "
            "give bucket_bytes=0"
        )


def _accumulates(leaf: torch.Tensor) -> bool:
    """Tell whether the running backward accumulates into `.grad`; torch.autograd.grad does not."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch raises if autograd.grad runs
        return False
