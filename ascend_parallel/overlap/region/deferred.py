"""Operators of a region in chunks of rows, with the autograd graph that they have without chunks.

Autograd records an operator as usual; below autograd the operator only reserves its results. A chunk of them is
computed when a reader asks for it. Autograd saves the reserved tensors, which are finished when backward begins.
`deferred_linear` does the same for layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel.ops.operators import rows_of, shaped
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.record import BESIDE, compute
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.overlap.region.exchange import chunk_bounds
from ascend_parallel.overlap.region.rows import LazyRows

# Operators below autograd that work row by row, besides elementwise operators.
ALONG_FEATURES = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default", "aten.mean.dim")
# Elementwise operators that torch does not tag so.
CASTS = ("aten._to_copy.default", "aten.clone.default")
# Operators that work row by row along the first dimension, of one or more tensors.
ALONG_FIRST = ("aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.cat.default")
# Autograd saves the result of an operator, such as that of rsqrt, as an alias.
ALIASES = ("aten.detach.default", "aten.alias.default")


@dataclass(frozen=True)
class _Tracked:
    """A tensor that is kept, or another would get its id; what finishes its rows; and its blocks of rows."""

    tensor: torch.Tensor
    rows: LazyRows
    blocks: int


class Deferred:
    """The tensors of a region's forward whose rows are not finished.

    A tensor has one block of rows, or with sequence parallelism, where the rows are gathered, a block of each rank:
    chunk i is then the i-th slice of every block.

    Use it as a context manager: on exit all rows are finished, chunk by chunk; after an exception only the collectives.
    """

    def __init__(
        self, sizes: Sizes, row_dim: int, length: int, group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        """Cut tensors into chunks of `sizes` rows: dimension `row_dim`, of `length` in a block, times all but the last.

        Without sequence parallelism the dimensions before `row_dim` have size 1. The last dimension has no rows.
        """
        self.sizes, self.group, self.sequence_parallel = sizes, group, sequence_parallel
        self.bounds = chunk_bounds(sizes)
        self._dim, self._length, self._step = row_dim, length, sum(sizes) // length
        self._tracked: dict[int, _Tracked] = {}
        self._pending: list[Pending] = []
        self._shared: set[int] = set()  # tensors that a deferred operator reads, or that have an alias

    def __enter__(self) -> Deferred:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finish the rows, and wait for the collectives also after an exception."""
        try:
            if kind is None:
                with torch.no_grad():
                    for _, stop in self.bounds:
                        for tracked in self._tracked.values():
                            tracked.rows.up_to(stop)
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            for pending in self._pending:
                pending.__exit__(kind, *rest)
            self._tracked.clear()

    def guard(self, pending: Pending) -> None:
        """Wait for these collectives on exit."""
        self._pending.append(pending)

    def track(self, tensors: Iterable[torch.Tensor], rows: LazyRows, blocks: int = 1) -> None:
        """Note the tensors whose rows `rows` finishes, and how many blocks of rows they have."""
        self._tracked |= {id(tensor): _Tracked(tensor, rows, blocks) for tensor in tensors}

    def rows(self, tensor: object) -> LazyRows | None:
        """Return what finishes the rows of a tensor; None: they are finished."""
        found = self._tracked.get(id(tensor))
        return None if found is None else found.rows

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its row dimension as the first, as a view."""
        if self._dim == 0:
            return tensor
        moved, tracked = tensor.movedim(self._dim, 0), self._tracked.get(id(tensor))
        self._shared.add(id(tensor))
        if tracked is not None:
            self.track([moved], tracked.rows, tracked.blocks)
        return moved

    def rows_back(self, tensor: torch.Tensor, rows: LazyRows, blocks: int = 1) -> torch.Tensor:
        """Return a tensor whose first dimension has the rows with this dimension in its place; `rows` finishes them."""
        back = tensor.movedim(0, self._dim) if self._dim else tensor
        self.track([back], rows, blocks)
        return back

    def matrix(self, x: torch.Tensor) -> tuple[torch.Tensor, LazyRows | None]:
        """Return x [..., K] as [m, K] and what finishes its rows; rows that have to be copied are finished first."""
        source = self.rows(x)
        self._shared.add(id(x))
        if source is not None and not x.is_contiguous():
            source.finish()
        return rows_of(x), source

    def operators(self) -> TorchDispatchMode:
        """Return the mode under which operators that work row by row are deferred; others finish what they read."""
        return _Operators(self)

    def operator(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator below autograd: reserve its results if it works row by row, else run it on finished rows."""
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if self.rows(leaf) is not None]
        if not read:
            return function(*args, **kwargs)
        first = self._of(read[0])
        if str(function) in ALIASES:
            alias = function(*args, **kwargs)
            self.track([alias], first.rows, first.blocks)
            self._shared |= {id(alias), id(read[0])}
            return alias
        if _views(function):
            return self._viewed(function, args, kwargs, read[0])
        like = self._reserved(function, args, kwargs, read)
        if like is None:
            self._finish_for(function, read)
            return function(*args, **kwargs)
        results, spec = pytree.tree_flatten(like)
        # Not views of the buffers: filling these must not count as a change of saved tensors.
        if function._schema.is_mutable:
            given, buffers = [read[0]], [shaped(read[0], read[0].shape)]
            self.track(buffers, first.rows, first.blocks)
            args = (*buffers, *args[1:])
        else:
            buffers = [self._buffer(result, read[0].device) for result in results]
            given = [shaped(buffer, buffer.shape) for buffer in buffers]
            self._shared |= {id(leaf) for leaf in read}
        sources = [self._of(leaf).rows for leaf in read]
        fill = partial(self._fill, function, args, kwargs, sources, buffers, first.blocks)
        self.track(given, LazyRows(self.sizes, fill), first.blocks)
        return pytree.tree_unflatten(given, spec)

    def _viewed(self, function: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> Any:
        """Return views of a tensor, unfinished too if each of their rows lies in the same row; else finish the rows."""
        results = function(*args, **kwargs)
        views, tracked = pytree.tree_leaves(results), self._of(tensor)
        if self._dim == 0 and all(_same_rows(tensor, view) for view in views):
            self.track(views, tracked.rows, tracked.blocks)
            self._shared |= {id(tensor), *map(id, views)}
        else:
            tracked.rows.finish()
        return results

    def _fill(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        sources: list[LazyRows],
        buffers: list[torch.Tensor],
        blocks: int,
        index: int,
    ) -> None:
        """Compute a chunk of an operator's results, once the rows that it reads are finished."""
        for source in sources:
            source.up_to(self.bounds[index][1])
        dims = max(buffer.dim() for buffer in buffers)
        # Block by block: all blocks at once would be strided, and strided rows may have other bits (oneDNN's gelu).
        for block in range(blocks):
            chunk = partial(self._chunk, dims=dims, index=index, block=block, blocks=blocks)
            chunk_args, chunk_kwargs = pytree.tree_map(chunk, (args, kwargs))
            with torch.no_grad():
                found = compute(BESIDE, function.name(), function, *chunk_args, **chunk_kwargs)
                for buffer, result in zip(buffers, pytree.tree_leaves(found), strict=True):
                    if not function._schema.is_mutable:
                        self._narrowed(buffer, self._dim, index, block).copy_(result)

    def _finish_for(self, function: Any, read: list[torch.Tensor]) -> None:
        """Finish what an operator reads; before a change in place, also the rows of all who read it before."""
        tracked = list(self._tracked.values()) if function._schema.is_mutable else map(self._of, read)
        for each in tracked:
            each.rows.finish()

    def _of(self, tensor: torch.Tensor) -> _Tracked:
        return self._tracked[id(tensor)]

    def _buffer(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an unfinished tensor whose chunks are contiguous in memory: the row dimension is the outermost.

        A tensor without features is contiguous itself: the backward of norms reads statistics as if they were.
        """
        if self._dim == 0 and like.stride(0) * like.shape[0] == like.numel():
            return torch.empty_like(like, device=device)  # with the strides that the operator gives
        dim = self._dim if like.shape[-1] > 1 else 0
        first = like.movedim(dim, 0)
        return torch.empty_like(first, device=device, memory_format=torch.contiguous_format).movedim(0, dim)

    def _reserved(self, function: Any, args: Any, kwargs: Any, read: list[torch.Tensor]) -> Any:
        """Return the results on the meta device if the operator works row by row; else None."""
        elementwise = torch.Tag.pointwise in function.tags or str(function) in CASTS
        along_first = self._dim == 0 and str(function) in ALONG_FIRST
        if not (elementwise or along_first or str(function) in ALONG_FEATURES) or kwargs.get("device") is not None:
            return None
        # Only a tensor that no other reader waits for is changed in place.
        if function._schema.is_mutable and (
            "out" in kwargs or read[0] is not args[0] or id(read[0]) in self._shared or len(read) > 1
        ):
            return None
        all_blocks = {self._of(leaf).blocks for leaf in read}
        if len(all_blocks) > 1 or len({leaf.dim() for leaf in read}) > 1:
            return None
        (blocks,) = all_blocks
        if not (elementwise or along_first) and (len(read) != 1 or read[0] is not args[0]):
            return None
        like = pytree.tree_map(_on_meta, (args, kwargs))
        results = function(*like[0], **like[1])
        # Elementwise operators align dimensions from the right: the row dimension has to stay in its place.
        fits = all(
            isinstance(leaf, torch.Tensor)
            and leaf.dim() > self._dim
            and leaf.shape[self._dim] == self._length * blocks
            and (not elementwise or leaf.dim() == read[0].dim())
            for leaf in pytree.tree_leaves(results)
        )
        return results if fits else None

    def _chunk(self, leaf: Any, dims: int, index: int, block: int, blocks: int) -> Any:
        """Return a block's chunk of a tensor that has the row dimension, where tensors of `dims` dimensions have it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dim = self._dim if self.rows(leaf) is not None else self._dim - dims + leaf.dim()
        has = 0 <= dim < leaf.dim() and leaf.shape[dim] == self._length * blocks
        return self._narrowed(leaf, dim, index, block) if has else leaf

    def _narrowed(self, tensor: torch.Tensor, dim: int, index: int, block: int) -> torch.Tensor:
        start, stop = (bound // self._step for bound in self.bounds[index])
        return tensor.narrow(dim, block * self._length + start, stop - start)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._deferred.operator(func, args, kwargs or {})


def _views(function: Any) -> bool:
    """Tell whether an operator returns views of its first argument."""
    schema = function._schema
    aliases = any(result.alias_info is not None for result in schema.returns)
    return schema.name == "aten::_unsafe_view" or (aliases and not schema.is_mutable)


def _same_rows(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Tell whether every row of a view, along the first dimension, lies in the same row of the tensor."""
    if view.dim() == 0 or view.numel() == 0 or (view.shape[0], view.stride(0)) != (tensor.shape[0], tensor.stride(0)):
        return False
    first = view.storage_offset() - tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True))
    return 0 <= first <= last < tensor.stride(0)


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf
