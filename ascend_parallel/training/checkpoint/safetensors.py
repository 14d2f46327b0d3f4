"""The safetensors format, written tensor by tensor and read shard by shard.

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, [start, end) after the
header), and the tensors' bytes, row-major and little-endian, without holes. The library's ``save_file`` needs the whole
model in memory, and its reader accepts a name that stands twice. Source of the format: the README of
huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_planner import kinds
from ascend_parallel.training.checkpoint.differences import (
    MOST_SHOWN,
    CheckpointError,
    Kind,
    differences,
    in_words,
    refuse,
)
from ascend_parallel.training.checkpoint.folder import whole_file
from ascend_parallel.training.checkpoint.storage import agree, everybody, names_of_all

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNED = 8
_MOST_HEADER = 100_000_000  # bytes: the library's limit


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, Kind],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors; ``read(name)`` returns a tensor on the CPU, and is called once for each name.

    The file gets its name once it is complete. Raises `ValueError` for a dtype that the format lacks, and
    `CheckpointError` when the file cannot be written.
    """
    path = Path(path)
    alien = [f"{name}: {dtype}" for name, (_, dtype) in tensors.items() if dtype not in _NAMES]
    if alien:
        raise ValueError(f"safetensors has no such dtype: {', '.join(alien)}; there are {', '.join(_NAMES.values())}")
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (shape, dtype) in tensors.items():
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with whole_file(path) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, kind in tensors.items():
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == kind
            out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class SafeTensors:
    """A file open for reading: the `kinds` of its tensors, and views of them."""

    def __init__(self, path: str | Path) -> None:
        """Read the header; raise `CheckpointError` if the header and the file contradict each other."""
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(size - 8, _MOST_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(file.read(length), object_pairs_hook=_without_doubles)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            entries = {name: _entry(name, entry) for name, entry in header.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise CheckpointError(f"{self.path} is missing or no safetensors file: {error!r}") from error
        self._start = 8 + length
        self.kinds: dict[str, Kind] = {name: kind for name, (kind, _) in entries.items()}
        self._spans = {name: span for name, (_, span) in entries.items()}
        end = 0
        for name, (start, stop) in sorted(self._spans.items(), key=lambda entry: entry[1]):
            if start != end:
                what = "bytes that no tensor has before" if start > end else "bytes of the tensor before it in"
                raise CheckpointError(f"{self.path} is damaged: {what} {name}, which begins at {start}, not {end}")
            end = stop
        if end != size - self._start:
            raise CheckpointError(f"{self.path} is damaged: {size} bytes, the header says {self._start + end}")
        self._bytes = np.memmap(self.path, np.uint8, "c") if end else np.empty(0, np.uint8)

    def view(self, name: str) -> torch.Tensor:
        """Return a tensor backed by the file; do not write to it."""
        shape, dtype = self.kinds[name]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        start, stop = self._spans[name]
        part = self._bytes[self._start + start : self._start + stop]
        return torch.from_numpy(part).view(dtype).view(shape)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise `ValueError` for a repeated name, of which `json` would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        doubled = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"names that stand twice: {', '.join(doubled[:MOST_SHOWN])}")
    return found


def _entry(name: str, entry: dict[str, Any]) -> tuple[Kind, tuple[int, int]]:
    """Return a tensor's shape, dtype and byte range; raise `ValueError` if they contradict each other."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: give dtype, shape and data_offsets")
    shape, span, dtype = entry["shape"], entry["data_offsets"], _DTYPES.get(str(entry["dtype"]))
    for numbers in (shape, span):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name}: {numbers!r} are no whole numbers of 0 or more")
    if dtype is None:
        raise ValueError(f"{name}: dtype {entry['dtype']!r}; read are {', '.join(_DTYPES)}")
    if len(span) != 2 or span[1] - span[0] != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: data_offsets {span} do not hold shape {shape} of {entry['dtype']}")
    return (tuple(shape), dtype), (span[0], span[1])


def read_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, by name."""
    file = SafeTensors(path)
    return {name: file.view(name).clone() for name in file.kinds}


def load_safetensors(path: str | Path, model: Mapping[str, TensorShard]) -> None:
    """Fill a model's shards in place from a file of the full model; every rank of the default group calls it.

    Names, shapes and dtypes must be the file's; each rank may hold a part of the names. Raises `CheckpointError` on
    every rank, listing the differences.
    """
    group, fault, file = everybody(), "", None
    try:
        file = SafeTensors(path)
        refuse(differences(kinds(model), {name: file.kinds[name] for name in model if name in file.kinds}), str(path))
    except Exception as error:  # noqa: BLE001  raised on all ranks by agree()
        fault = in_words(error)
    agree(group, "load of a safetensors file", {"path": str(path)}, fault)
    assert file is not None
    missing = sorted(set(file.kinds) - names_of_all(group, model))
    refuse([f"{name}: in the file, not here" for name in missing], f"{path} is of another model")
    for name, shard in model.items():
        bounds = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))
        shard.local.detach().copy_(file.view(name)[bounds])
