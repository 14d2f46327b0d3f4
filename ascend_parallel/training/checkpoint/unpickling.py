"""Unpickle the metadata of a distributed checkpoint without running the functions that the pickle names.

``.metadata`` is a pickle, which may name any function to be called when it is read. The classes that make up
torch.distributed.checkpoint's metadata are listed here; any other name is refused before it is imported.
Read from torch 2.6 to 2.13 and megatron-core 0.10 to 0.16.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

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


def _allowed() -> dict[tuple[str, str], Any]:
    """Return the names that a pickle may contain, and the object for each."""
    listed = ((metadata, _METADATA), (planner, _PLANNER), (filesystem, _STORAGE))
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
        # Subclasses of torch's classes in Megatron-core before 0.16; their additions are not read.
        (_MEGATRON, "MCoreMetadata"): metadata.Metadata,
        (_MEGATRON, "MCoreSavePlan"): planner.SavePlan,
    }


_ALLOWED = _allowed()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs; it is not loaded")
        return _ALLOWED[module, name]


def unpickle(data: bytes) -> Any:
    """Return the object of a metadata pickle; raise `pickle.UnpicklingError` for a name that metadata does not need."""
    return _Unpickler(io.BytesIO(data)).load()
