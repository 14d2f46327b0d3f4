"""shard_dataloader: the batches of a loader as DTensors, as in Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.marked.dtensors import dtensor_from_local, shard_tensor
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.reshard import Mesh


class ShardedLoader:
    """Yields the batches of `loader` with their tensors cut along `shard_dim`; see `shard_dataloader`."""

    def __init__(self, loader: Iterable[Any], mesh: ProcessMesh, shard_dim: str | None, is_split: bool) -> None:
        """Take the loader; see `shard_dataloader`."""
        self.loader, self.mesh, self.shard_dim, self._is_split = loader, mesh, shard_dim, is_split
        self._placements = [Shard(0) if name == shard_dim else Replicate() for name in mesh.dim_names]

    def __len__(self) -> int:
        """Return the number of batches, if the loader has one."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches in the nesting of the loader's."""
        for batch in self.loader:
            yield pytree.tree_map_only(torch.Tensor, self._sharded, batch)

    def _sharded(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            raise ValueError("a batch has a tensor without dimensions: the first dimension of each is the batch")
        if self._is_split:
            return dtensor_from_local(tensor, self.mesh, self._placements)
        ranks = 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)
        if tensor.shape[0] % ranks:
            raise ValueError(
                f"a batch of {tensor.shape[0]} rows on {ranks} ranks along {self.shard_dim}: give batches whose rows "
                "divide evenly (drop_last=True of a DataLoader)"
            )
        return shard_tensor(tensor, self.mesh, self._placements)


def shard_dataloader(
    loader: Iterable[Any], mesh: Mesh, shard_dim: str | None = None, *, is_split: bool = False
) -> ShardedLoader:
    """Return a loader whose tensors are DTensors on `mesh`, cut along their first dimension.

    loader
        Yields tensors in any nesting: the same whole batches on every rank, of which each keeps its part.
    shard_dim
        The mesh dimension along which data differ; None: every rank gets the whole batch.
    is_split
        Each rank's loader yields only the rank's own part, all parts of one shape (a DistributedSampler that counts
        the ranks along `shard_dim`).

    Raises `ValueError` for a name that is no mesh dimension, and when a batch's rows do not divide evenly.
    """
    process_mesh = ProcessMesh.of(mesh)
    if shard_dim is not None:
        process_mesh.dim(shard_dim)
    if is_split and shard_dim is None:
        raise ValueError("is_split=True without shard_dim: name the mesh dimension along which the parts differ")
    return ShardedLoader(loader, process_mesh, shard_dim, is_split)
