"""Read files of torch.distributed.checkpoint's format, after checking that the metadata and the files agree.

The metadata is unpickled without running the functions that the pickle names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum, EnumMeta
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
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
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardLoadPlanner
from ascend_parallel.training.checkpoint.differences import CheckpointError, in_words, refuse
from ascend_parallel.training.checkpoint.folder import METADATA

# ``.metadata`` is a pickle, which may name any function to be called when it is read. The classes that make up
# torch.distributed.checkpoint's metadata are listed here; any other name is refused before it is imported.
# Read from torch 2.6 to 2.13 and megatron-core 0.10 to 0.16.
_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_STORAGE = ("_StorageInfo", "_StoragePrefix")
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


def _member(owner: object, name: str) -> Enum:
    """Return a member of an enumeration; Python 3.11.0 to 3.11.3 pickle members as ``getattr(owner, name)``."""
    if not isinstance(owner, EnumMeta) or not isinstance(name, str) or name not in owner.__members__:
        raise pickle.UnpicklingError(
            f"it names an attribute {name!r} of {owner!r}, which no metadata needs; it is not loaded"
        )
    member: Enum = owner.__members__[name]
    return member


def _allowed() -> dict[tuple[str, str], Any]:
    """Return the names that a pickle may contain, and the object for each."""
    listed = ((dcp.metadata, _METADATA), (dcp.planner, _PLANNER), (dcp.filesystem, _STORAGE))
    found: dict[tuple[str, str], Any] = {
        (module.__name__, name): getattr(module, name)
        for module, names in listed
        for name in names
        if hasattr(module, name)
    }
    for module in ("pathlib", "pathlib._local"):  # the checkpoint's path; a pure path opens nothing
        for name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            found[module, name] = PurePosixPath
    for name, value in vars(torch).items():
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            found["torch", name] = value
    return found | {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "getattr"): _member,
        # Subclasses of torch's classes in Megatron-core before 0.16; their additions are not read.
        (_MEGATRON, "MCoreMetadata"): Metadata,
        (_MEGATRON, "MCoreSavePlan"): dcp.planner.SavePlan,
    }


_ALLOWED = _allowed()


class Reader(FileSystemReader):
    """torch's reader with our `read_metadata`: torch's own unpickles the metadata without limits."""

    def __init__(self, checkpoint: Path) -> None:
        """Read from the directory `checkpoint`."""
        super().__init__(checkpoint)
        self._checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; raise `CheckpointError` as `read_metadata` does."""
        metadata = read_metadata(self._checkpoint)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """Return torch.distributed.checkpoint's metadata.

    Raises `CheckpointError` when the metadata is missing or damaged, names code, or lists bytes that the files lack.
    """
    try:
        metadata = unpickle((checkpoint / METADATA).read_bytes())
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        wrong = [line for name, entry in metadata.state_dict_metadata.items() for line in _wrong(name, entry)]
        wrong += _misplaced(checkpoint, metadata)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{checkpoint}: {METADATA} is missing or damaged: {error}") from error
    refuse(wrong, f"{checkpoint}: {METADATA} is damaged")
    return metadata


def read_whole(checkpoint: Path, metadata: Metadata, name: str) -> torch.Tensor:
    """Return a whole tensor."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read(checkpoint, metadata, TensorShardLoadPlanner({name: TensorShard.whole(whole)}))
    return whole


def read_values(checkpoint: Path, metadata: Metadata, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of `names`, on the CPU; only plain values are read, no code."""
    planner = TensorShardLoadPlanner({}, names)
    _read(checkpoint, metadata, planner)
    try:
        files = {name: io.BytesIO(planner.blobs[name]) for name in names}
        return {name: torch.load(file, map_location="cpu", weights_only=True) for name, file in files.items()}
    except Exception as error:
        raise CheckpointError(f"{checkpoint}: {', '.join(names)} cannot be read: {in_words(error)}") from error


def _read(checkpoint: Path, metadata: Metadata, planner: TensorShardLoadPlanner) -> None:
    reader = Reader(checkpoint)
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(f"{checkpoint} cannot be read: {in_words(error)}") from error


def _wrong(name: object, entry: object) -> list[str]:
    """Return a line if an entry describes no possible tensor, else []."""
    if isinstance(name, str) and isinstance(entry, BytesStorageMetadata):
        return []
    if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
        return [f"{name!r}: {type(entry).__name__}"]
    shape, chunks = tuple(entry.size), entry.chunks
    if not isinstance(entry.properties.dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        return [f"{name}: shape {shape}, dtype {entry.properties.dtype}"]
    inside = all(isinstance(chunk, ChunkStorageMetadata) and _is_inside(chunk, shape) for chunk in chunks)
    if not inside or sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return [f"{name}: its shards do not make up shape {list(shape)}"]
    return []


def _is_inside(chunk: ChunkStorageMetadata, shape: tuple[int, ...]) -> bool:
    ranges = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(start >= 0 <= size and start + size <= full for start, size, full in ranges)


def _misplaced(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Return a line for every shard whose recorded place is in no file."""
    wrong, sizes = [], {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.is_file()}
    for name, entry in metadata.state_dict_metadata.items():
        starts = [None] if isinstance(entry, BytesStorageMetadata) else [chunk.offsets for chunk in entry.chunks]
        for offsets in starts:
            place = metadata.storage_data.get(MetadataIndex(name, offsets))
            if place is None:
                wrong.append(f"{name}: in no file")
            elif not 0 <= place.offset <= place.offset + place.length <= sizes.get(place.relative_path, -1):
                wrong.append(f"{name}: bytes {place.offset} to {place.offset + place.length} of {place.relative_path}")
    return wrong


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs; it is not loaded")
        return _ALLOWED[module, name]


def unpickle(data: bytes) -> Any:
    """Return the object of a metadata pickle; raise `pickle.UnpicklingError` for a name that metadata does not need."""
    return _Unpickler(io.BytesIO(data)).load()
