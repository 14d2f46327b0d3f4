"""Operators and layers of a region in chunks of rows, with the autograd graph that they have without chunks.

Autograd records an operator as usual; below autograd the operator only reserves its results. A chunk of them is
computed when a reader asks for it. Autograd saves the reserved tensors, which are finished when backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel.ops.operators import rows_of, shaped
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import BESIDE, MATMUL, compute
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.forward_wrapper import Products
from ascend_parallel.overlap.region.exchange import Reduced, chunk_bounds, multiply_rows
from ascend_parallel.overlap.region.rows import LazyRows

# Operators below autograd that work row by row, besides elementwise operators.
ALONG_FEATURES = ("aten.native_layer_norm.default", "aten.mean.dim")


class Deferred:
    """The tensors of a region's forward whose rows are not finished.

    Use it as a context manager: on exit all rows are finished, chunk by chunk; after an exception only the collectives.
    """

    def __init__(self, sizes: Sizes, row_dim: int, length: int, group: dist.ProcessGroup) -> None:
        """Cut tensors into chunks of `sizes` rows: dimension `row_dim`, of `length`, times the dimensions behind it.

        The dimensions before `row_dim` have size 1, and the last dimension is no row dimension.
        """
        self._sizes, self._dim, self._length, self._group = sizes, row_dim, length, group
        self._bounds, self._step = chunk_bounds(sizes), sum(sizes) // length
        self._rows: dict[int, tuple[torch.Tensor, LazyRows]] = {}  # the tensor is kept: another would get its id
        self._pending: list[Pending] = []

    def __enter__(self) -> Deferred:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finish the rows, and wait for the collectives also after an exception."""
        try:
            if kind is None:
                with torch.no_grad():
                    for _, stop in self._bounds:
                        for _, rows in self._rows.values():
                            rows.up_to(stop)
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            for pending in self._pending:
                pending.__exit__(kind, *rest)
            self._rows.clear()

    def track(self, tensors: Iterable[torch.Tensor], rows: LazyRows) -> None:
        """Note the tensors whose rows `rows` finishes."""
        self._rows |= {id(tensor): (tensor, rows) for tensor in tensors}

    def rows(self, tensor: object) -> LazyRows | None:
        """Return what finishes the rows of a tensor; None: they are finished."""
        found = self._rows.get(id(tensor))
        return None if found is None else found[1]

    def operators(self) -> TorchDispatchMode:
        """Return the mode under which operators that work row by row are deferred; others finish what they read."""
        return _Operators(self)

    def row(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Callable[[object], Products], Callable[[], LazyRows]]:
        """Return the `forward_wrapper` of a row-parallel layer in chunks, and a function for its result's rows.

        x [..., K], weight [N, K].
        """
        found: list[LazyRows] = []

        def forward(_: object) -> Products:
            x_m, source = self._matrix(x)
            y_m = x_m.new_empty(x_m.shape[0], weight.shape[0])
            reduced = Reduced(y_m, self._sizes, self._group, sequence_parallel=False)
            self._pending.append(reduced.pending)
            for index, (start, stop) in enumerate(self._bounds):
                if source is not None:
                    source.up_to(stop)
                x_r = x_m[None, start:stop]
                reduced.send(index, compute(MATMUL, "matmul", reduced.multiply, index, x_r, weight.t()))
            found.append(LazyRows(self._sizes, reduced.pending.wait_for))
            return shaped(y_m, (*x.shape[:-1], weight.shape[0])), None

        return forward, found.pop

    def column(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Callable[[object], Products], Callable[[], LazyRows]]:
        """Return the same of a column-parallel layer: x [..., K], weight [N, K], bias [N]."""
        found: list[LazyRows] = []

        def forward(_: object) -> Products:
            x_m, source = self._matrix(x)
            y_m = x_m.new_empty(x_m.shape[0], weight.shape[0])

            def fill(index: int) -> None:
                start, stop = self._bounds[index]
                if source is not None:
                    source.up_to(stop)
                y_c = y_m[start:stop]
                with torch.no_grad():
                    compute(MATMUL, "matmul", multiply_rows, x_m[None, start:stop], weight.t(), y_c[None])
                    if bias is not None:
                        y_c.add_(bias)

            found.append(LazyRows(self._sizes, fill))
            return shaped(y_m, (*x.shape[:-1], weight.shape[0])), None

        return forward, found.pop

    def operator(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator below autograd: reserve its results if it works row by row, else run it on finished rows."""
        sources = [rows for leaf in pytree.tree_leaves((args, kwargs)) if (rows := self.rows(leaf)) is not None]
        if not sources:
            return function(*args, **kwargs)
        like = self._reserved(function, args, kwargs)
        if like is None:
            for source in sources:
                source.finish()
            return function(*args, **kwargs)
        (device,) = {leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if self.rows(leaf) is not None}
        leaves, spec = pytree.tree_flatten(like)
        buffers = [torch.empty_like(leaf, device=device, memory_format=torch.contiguous_format) for leaf in leaves]
        dims = max(leaf.dim() for leaf in leaves)

        def fill(index: int) -> None:
            _, stop = self._bounds[index]
            for source in sources:
                source.up_to(stop)
            chunk_args, chunk_kwargs = pytree.tree_map(lambda leaf: self._chunk(leaf, dims, index), (args, kwargs))
            with torch.no_grad():
                results = compute(BESIDE, function.name(), function, *chunk_args, **chunk_kwargs)
                for buffer, result in zip(buffers, pytree.tree_leaves(results), strict=True):
                    self._narrowed(buffer, index, self._dim).copy_(result)

        # Not views of the buffers: filling these must not count as a change of saved tensors.
        given = [shaped(buffer, buffer.shape) for buffer in buffers]
        self.track(given, LazyRows(self._sizes, fill))
        return pytree.tree_unflatten(given, spec)

    def _matrix(self, x: torch.Tensor) -> tuple[torch.Tensor, LazyRows | None]:
        """Return x [m, K] and what finishes its rows; rows that have to be copied are finished first."""
        source = self.rows(x)
        if source is not None and not x.is_contiguous():
            source.finish()
        return rows_of(x), source

    def _reserved(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the results on the meta device if the operator works row by row; else None."""
        elementwise = torch.Tag.pointwise in function.tags
        if function._schema.is_mutable or not (elementwise or str(function) in ALONG_FEATURES):
            return None
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if self.rows(leaf) is not None]
        if not elementwise and (len(read) != 1 or read[0] is not args[0]):
            return None
        like = pytree.tree_map(_on_meta, (args, kwargs))
        results = function(*like[0], **like[1])
        given = pytree.tree_leaves(results)
        # Elementwise operators align dimensions from the right: the row dimension has to stay in its place.
        fits = all(
            isinstance(leaf, torch.Tensor)
            and leaf.dim() > self._dim
            and leaf.shape[self._dim] == self._length
            and (not elementwise or leaf.dim() == max(each.dim() for each in read))
            for leaf in given
        )
        same = len({each.dim() for each in read}) == 1
        return results if fits and same else None

    def _chunk(self, leaf: Any, dims: int, index: int) -> Any:
        """Return a chunk of a tensor that has the row dimension, where tensors of `dims` dimensions have it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = self._dim if self.rows(leaf) is not None else self._dim - dims + leaf.dim()
        has = 0 <= dim < leaf.dim() and leaf.shape[dim] == self._length
        return self._narrowed(leaf, index, dim) if has else leaf

    def _narrowed(self, tensor: torch.Tensor, index: int, dim: int) -> torch.Tensor:
        start, stop = self._bounds[index]
        return tensor.narrow(dim, start // self._step, (stop - start) // self._step)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._deferred.operator(func, args, kwargs or {})


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf
