"""Tensor shards as items of torch.distributed.checkpoint: a rank's items to write and read, checks over all ranks.

torch's own planner derives a shard's bounds from the type of the tensor (DTensor). A `TensorShard` carries its bounds,
whatever cut the tensor, so the items are made here. Both global plans run on one rank; torch.distributed.checkpoint
raises their errors on all ranks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.differences import CheckpointError, Kind, differences, refuse


class TensorShardSavePlanner(DefaultSavePlanner):
    """Writes `TensorShard`s, and bytes by name, with torch.distributed.checkpoint.

    If several ranks hold the same shard, one of them writes it; these writes are spread over the ranks.
    """

    def __init__(self, shards: Mapping[str, TensorShard], blobs: Mapping[str, bytes]) -> None:
        """Take this rank's shards, and the bytes to write; bytes of a name that several ranks have are written once."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards
        self._blobs = blobs

    def create_local_plan(self) -> SavePlan:
        """List this rank's shards; report the shape and dtype of all its tensors, also where its shard is empty."""
        items = [_write_item(name, shard) for name, shard in self._shards.items() if _has_bytes(shard)]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._blobs]
        self.plan = SavePlan(items, planner_data=kinds(self._shards))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each shard to one rank; raise `CheckpointError` unless the shards cover every tensor exactly."""
        known: dict[str, Kind] = {}
        lines: list[str] = []
        for rank, plan in enumerate(all_plans):
            kinds_of_rank: dict[str, Kind] = plan.planner_data
            before = {name: kind for name, kind in known.items() if name in kinds_of_rank}
            mine = {name: kinds_of_rank[name] for name in before}
            lines += differences(mine, before, f"on rank {rank}", "on a rank before")
            known = {**kinds_of_rank, **known}
        refuse(lines, "ranks hold different tensors of one name")
        refuse(_conflicting_bounds(all_plans), "ranks hold shards that start alike and end differently")
        bare = [replace(plan, planner_data=None) for plan in all_plans]
        plans, metadata = super().create_global_plan(bare)
        missing = [f"{name}: no rank gives it" for name in known if name not in metadata.state_dict_metadata]
        refuse(missing, "missing")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item to write."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._blobs[name])
        return self._shards[name].local.detach()


class TensorShardLoadPlanner(DefaultLoadPlanner):
    """Fills shards in place, whatever the bounds of the checkpoint's shards; also reads bytes."""

    def __init__(
        self,
        shards: Mapping[str, TensorShard | Sequence[TensorShard]],
        blobs: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        """Take the shards to fill, the names of bytes to read, and name prefixes that the ranks must read completely.

        A name may have several shards, at different places of the whole tensor.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = {name: [held] if isinstance(held, TensorShard) else list(held) for name, held in shards.items()}
        self._names = list(blobs)
        self._whole = tuple(whole)
        self.blobs: dict[str, bytes] = {}

    def create_local_plan(self) -> LoadPlan:
        """List the items that this rank reads; report the names that it asked for."""
        if self.metadata is None:
            raise AssertionError("torch.distributed.checkpoint gives the metadata")
        asked = {name: _kind(held[0]) for name, held in self._shards.items() if held}
        saved = saved_kinds(self.metadata)
        here = {name: kind for name, kind in saved.items() if name in asked}
        refuse(differences(asked, here), "the checkpoint is of another model")
        items = [item for name, held in self._shards.items() for item in self._read(name, held)]
        for name in self._names:
            at = MetadataIndex(name)
            items.append(ReadItem(LoadItemType.BYTE_IO, at, torch.Size([0]), at, torch.Size([0]), torch.Size([0])))
        return LoadPlan(items, planner_data=(list(asked), saved, self._whole))

    def _read(self, name: str, held: Sequence[TensorShard]) -> list[ReadItem]:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        items: list[ReadItem] = []
        for number, shard in enumerate(held):
            found = create_read_items_for_chunk_list(name, saved, [_chunk(shard)]) if shard.local.numel() else []
            if sum(prod(item.lengths) for item in found) != shard.local.numel():
                raise CheckpointError(f"the checkpoint lacks a part of {name}: {_bounds(shard)} is not wholly in it")
            items += [replace(item, dest_index=MetadataIndex(name, shard.offsets, number)) for item in found]
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise `CheckpointError` if the checkpoint has a tensor, of a prefix in `whole`, that no rank reads."""
        asked = {name for plan in global_plan for name in plan.planner_data[0]}
        _, saved, whole = global_plan[0].planner_data
        more = [name for name in saved if name.startswith(whole) and name not in asked]
        refuse([f"{name}: in the checkpoint, not here" for name in more], "the checkpoint is of another model")
        return [replace(plan, planner_data=None) for plan in global_plan]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes of an item."""
        self.blobs[read_item.dest_index.fqn] = value.getvalue()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor to fill."""
        assert index.index is not None
        return self._shards[index.fqn][index.index].local.detach()


def kinds(shards: Mapping[str, TensorShard]) -> dict[str, Kind]:
    """Return each whole tensor's shape and dtype; raise `CheckpointError` for shards outside of their tensors."""
    for name, shard in shards.items():
        ends = [start + size for start, size in zip(shard.offsets, shard.local.shape, strict=False)]
        same_rank = len(shard.offsets) == shard.local.dim() == len(shard.shape)
        if (
            not same_rank
            or any(end > size for end, size in zip(ends, shard.shape, strict=True))
            or min((0, *shard.offsets)) < 0
        ):
            raise CheckpointError(f"{name}: {_bounds(shard)} is no shard of a tensor of shape {tuple(shard.shape)}")
    return {name: _kind(shard) for name, shard in shards.items()}


def saved_kinds(metadata: Metadata) -> dict[str, Kind]:
    """Return the shape and dtype of every tensor of a checkpoint."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _kind(shard: TensorShard) -> Kind:
    return tuple(shard.shape), shard.local.dtype


def _has_bytes(shard: TensorShard) -> bool:
    # A tensor without elements is written as a whole; an empty shard of a larger tensor is not.
    return shard.local.numel() > 0 or prod(shard.shape) == 0


def _chunk(shard: TensorShard) -> ChunkStorageMetadata:
    if prod(shard.shape) == 0:
        return ChunkStorageMetadata(torch.Size([0] * len(shard.shape)), torch.Size(shard.shape))
    return ChunkStorageMetadata(torch.Size(shard.offsets), shard.local.shape)


def _write_item(name: str, shard: TensorShard) -> WriteItem:
    chunk = _chunk(shard)
    properties = TensorProperties(dtype=shard.local.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(shard.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _conflicting_bounds(plans: Sequence[SavePlan]) -> list[str]:
    sizes: dict[MetadataIndex, torch.Size] = {}
    lines = []
    for item in (item for plan in plans for item in plan.items if item.tensor_data is not None):
        assert item.tensor_data is not None
        mine = item.tensor_data.chunk.sizes
        if sizes.setdefault(item.index, mine) != mine:
            lines.append(
                f"{item.index.fqn}: {list(sizes[item.index])} and {list(mine)} from {list(item.index.offset or ())}"
            )
    return lines


def _bounds(shard: TensorShard) -> str:
    starts = zip(shard.offsets, shard.local.shape, strict=False)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in starts) + "]"
