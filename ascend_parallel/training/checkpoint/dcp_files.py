"""Files of torch.distributed.checkpoint's format, read after what they say of each other was compared."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardLoadPlanner, saved_kinds
from ascend_parallel.training.checkpoint.differences import CheckpointError, in_words, refuse
from ascend_parallel.training.checkpoint.folder import METADATA
from ascend_parallel.training.checkpoint.unpickling import unpickle


class Reader(FileSystemReader):
    """torch's reader, which unpickles the metadata without limits, with ours of the metadata."""

    def __init__(self, checkpoint: Path) -> None:
        """Read from a directory."""
        super().__init__(checkpoint)
        self._checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; raise `CheckpointError` as `read_metadata` does."""
        metadata = read_metadata(self._checkpoint)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """Return torch.distributed.checkpoint's metadata.

    Raises `CheckpointError` when it is missing or damaged, names code, or says of the files what they do not have.
    """
    try:
        found = unpickle((checkpoint / METADATA).read_bytes())
        if not isinstance(found, Metadata):
            raise ValueError(f"it holds a {type(found).__name__}")
        wrong = [line for name, entry in found.state_dict_metadata.items() for line in _wrong(name, entry)]
        wrong += _misplaced(checkpoint, found)
    except Exception as error:  # of a pickle that is damaged, any
        raise CheckpointError(f"{checkpoint}: {METADATA} is missing or damaged: {error}") from error
    refuse(wrong, f"{checkpoint}: {METADATA} is damaged")
    return found


def read_whole(checkpoint: Path, metadata: Metadata, name: str) -> torch.Tensor:
    """Return a whole tensor."""
    shape, dtype = saved_kinds(metadata)[name]
    whole = torch.empty(shape, dtype=dtype)
    _read(checkpoint, metadata, TensorShardLoadPlanner({name: TensorShard(whole, shape, (0,) * len(shape))}))
    return whole


def read_values(checkpoint: Path, metadata: Metadata, names: Sequence[str]) -> dict[str, Any]:
    """Return what was saved beside tensors, on the CPU, by name: plain values alone are read."""
    planner = TensorShardLoadPlanner({}, names)
    _read(checkpoint, metadata, planner)
    try:
        return {name: _from_bytes(planner.blobs[name]) for name in names}
    except Exception as error:
        raise CheckpointError(f"{checkpoint}: {', '.join(names)} cannot be read: {in_words(error)}") from error


def _from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)


def _read(checkpoint: Path, metadata: Metadata, planner: TensorShardLoadPlanner) -> None:
    reader = Reader(checkpoint)
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # of a file that is damaged, any
        raise CheckpointError(f"{checkpoint} cannot be read: {in_words(error)}") from error


def _wrong(name: object, entry: object) -> list[str]:
    """Say what an entry has that no tensor can have."""
    if isinstance(name, str) and isinstance(entry, BytesStorageMetadata):
        return []
    if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
        return [f"{name!r}: {type(entry).__name__}"]
    shape, chunks = tuple(entry.size), entry.chunks
    if not isinstance(entry.properties.dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        return [f"{name}: shape {shape}, dtype {entry.properties.dtype}"]
    inside = all(isinstance(chunk, ChunkStorageMetadata) and _is_inside(chunk, shape) for chunk in chunks)
    if not inside or sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return [f"{name}: its boxes do not make up shape {list(shape)}"]
    return []


def _is_inside(chunk: ChunkStorageMetadata, shape: tuple[int, ...]) -> bool:
    spans = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(at >= 0 <= size and at + size <= whole for at, size, whole in spans)


def _misplaced(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Return a line for every box that is said to be where no file has it."""
    wrong, sizes = [], {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.is_file()}
    for name, entry in metadata.state_dict_metadata.items():
        at = [None] if isinstance(entry, BytesStorageMetadata) else [chunk.offsets for chunk in entry.chunks]
        for offsets in at:
            place = metadata.storage_data.get(MetadataIndex(name, offsets))
            if place is None:
                wrong.append(f"{name}: in no file")
            elif not 0 <= place.offset <= place.offset + place.length <= sizes.get(place.relative_path, -1):
                wrong.append(f"{name}: bytes {place.offset} to {place.offset + place.length} of {place.relative_path}")
    return wrong
