"""shard_dataloader: the batches of a loader as DTensors, as in Paddle."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.marked.dtensors import dtensor_from_local, shard_tensor
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.reshard import Mesh


@dataclass(frozen=True)
class _InputLayout:
    """The mesh of an input, and the mesh dimension that cuts the input's first dimension; None for none."""

    mesh: ProcessMesh
    shard_dim: str | None

    @property
    def placements(self) -> list[Placement]:
        return [Shard(0) if name == self.shard_dim else Replicate() for name in self.mesh.dim_names]

    def sharded(self, tensor: torch.Tensor, is_split: bool) -> torch.Tensor:
        """Return a tensor of a batch, or with `is_split` this rank's part of it, as a DTensor."""
        if tensor.ndim == 0:
            raise ValueError("a batch has a tensor without dimensions: the first dimension of each is the batch")
        if is_split:
            return dtensor_from_local(tensor, self.mesh, self.placements)
        ranks = 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)
        if tensor.shape[0] % ranks:
            raise ValueError(
                f"a batch of {tensor.shape[0]} rows on {ranks} ranks along {self.shard_dim}: give batches whose rows "
                "divide evenly (drop_last=True of a DataLoader)"
            )
        return shard_tensor(tensor, self.mesh, self.placements)


class ShardedLoader:
    """Yields the batches of `loader` as DTensors; made by `shard_dataloader`.

    mesh, shard_dim
        Those of the first input; of all inputs if `has_one_mesh`.
    """

    def __init__(
        self, loader: Iterable[Any], layouts: Sequence[_InputLayout], keys: Sequence[Hashable] | None, is_split: bool
    ) -> None:
        """Take the loader, and the layout of all inputs, or of each."""
        self.loader, self._layouts, self._keys, self._is_split = loader, layouts, keys, is_split
        self.mesh, self.shard_dim = layouts[0].mesh, layouts[0].shard_dim
        self.has_one_mesh = all(layout == layouts[0] for layout in layouts)

    def __len__(self) -> int:
        """Return the number of batches, if the loader has one."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches in the nesting of the loader's."""
        for batch in self.loader:
            if len(self._layouts) == 1:
                yield self._sharded(batch, self._layouts[0])
            elif isinstance(batch, Mapping):
                yield {**batch, **{key: self._sharded(batch[key], layout) for key, layout in self._inputs_of(batch)}}
            else:
                inputs = [self._sharded(batch[index], layout) for index, layout in self._inputs_of(batch)]
                yield inputs if isinstance(batch, list) else tuple(inputs)

    def _sharded(self, values: Any, layout: _InputLayout) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: layout.sharded(tensor, self._is_split), values)

    def _inputs_of(self, batch: Any) -> Iterator[tuple[Any, _InputLayout]]:
        """Yield the key or index of each input, with its layout."""
        keys = range(len(batch)) if self._keys is None else self._keys
        if isinstance(batch, Mapping) != (self._keys is not None) or set(keys) != set(
            batch if isinstance(batch, Mapping) else keys
        ):
            raise ValueError(
                f"a batch is a {type(batch).__name__} of {', '.join(map(str, batch)) if self._keys else len(batch)}, "
                f"and input_keys={self._keys}: give input_keys for batches that are dicts, with all their keys"
            )
        if len(keys) != len(self._layouts):
            raise ValueError(
                f"a batch has {len(keys)} inputs, and {len(self._layouts)} meshes are given: give one each"
            )
        yield from zip(keys, self._layouts, strict=True)


def shard_dataloader(
    loader: Iterable[Any],
    meshes: Mesh | Sequence[Mesh],
    shard_dims: str | int | Sequence[str | int | None] | None = None,
    *,
    input_keys: Sequence[Hashable] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardedLoader:
    """Return a loader whose tensors are DTensors, cut along their first dimension.

    loader
        Yields tensors in any nesting: the same whole batches on every rank, of which each keeps its part.
    meshes
        The mesh of all inputs; or a list with the mesh of each input of a batch, as a pipeline's first and last stage
        need.
    shard_dims
        The mesh dimension along which data differ, by name or index, or a list with one for each mesh; None: every
        rank gets the whole batch.
    input_keys
        With several meshes and batches that are dicts: the key of each mesh's input.
    is_dataset_splitted
        Each rank's loader yields only the rank's own part, all parts of one shape (a DistributedSampler that counts
        the ranks along the mesh dimension of `shard_dims`). With one mesh.

    Raises `ValueError` for a name that is no mesh dimension, and when a batch's rows do not divide evenly.
    """
    given = [meshes] if isinstance(meshes, (ProcessMesh, DeviceMesh)) else list(meshes)
    dims = (
        shard_dims
        if isinstance(shard_dims, Sequence) and not isinstance(shard_dims, str)
        else [shard_dims] * len(given)
    )
    if len(dims) != len(given) or not given:
        raise ValueError(f"shard_dims={shard_dims!r} with {len(given)} meshes: give one for all, or one for each mesh")
    layouts = [_input_layout(ProcessMesh.of(mesh), dim) for mesh, dim in zip(given, dims, strict=True)]
    if input_keys is not None and len(input_keys) != len(layouts):
        raise ValueError(
            f"input_keys={list(input_keys)!r} with {len(layouts)} meshes: give the key of each mesh's input"
        )
    if is_dataset_splitted and (len(layouts) > 1 or layouts[0].shard_dim is None):
        raise ValueError(
            f"is_dataset_splitted=True with {len(layouts)} meshes and shard_dims={shard_dims!r}: give one mesh, and "
            "its dimension along which the parts differ"
        )
    return ShardedLoader(loader, layouts, input_keys, is_dataset_splitted)


def _input_layout(mesh: ProcessMesh, dim: str | int | None) -> _InputLayout:
    if isinstance(dim, int):
        if not 0 <= dim < mesh.ndim:
            raise ValueError(f"shard_dims={dim}: the mesh has {mesh.ndim} dimensions, {', '.join(mesh.dim_names)}")
        return _InputLayout(mesh, mesh.dim_names[dim])
    if dim is not None:
        mesh.dim(dim)
    return _InputLayout(mesh, dim)
