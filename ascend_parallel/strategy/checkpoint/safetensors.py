"""The safetensors format, written a tensor at a time and read a box at a time.

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, [start, end) in what
follows), and the tensors' bytes, row-major and little-endian, without holes. The library's ``save_file`` wants the
whole model in memory. Source of the format: the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from ascend_parallel.sharding.pieces import Piece
from ascend_parallel.strategy.checkpoint.differences import CheckpointError, Kind, differences, refuse
from ascend_parallel.strategy.checkpoint.planner import kinds
from ascend_parallel.strategy.checkpoint.storage import agree, everybody, names_of_all

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
_MOST_HEADER = 100_000_000  # bytes: what the library reads at most


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, Kind],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors, of which ``read(name)`` gives one at a time, on the CPU.

    The file has its name once it is whole. Raises `ValueError` for a dtype that the format has no name for.
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
    unfinished = path.with_name(f"{path.name}.saving")
    with unfinished.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, kind in tensors.items():
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == kind
            out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
    unfinished.rename(path)


class SafeTensors:
    """A file that is open for reading: `kinds`, and tensors that look into it."""

    def __init__(self, path: str | Path) -> None:
        """Read the header; raise `CheckpointError` if it does not fit the file."""
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > min(size - 8, _MOST_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
            self.kinds: dict[str, Kind] = {
                name: (tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{self.path} is missing or no safetensors file: {error!r}") from error
        self._start = 8 + length
        wrong = [name for name, (shape, dtype) in self.kinds.items() if not self._fits(name, shape, dtype)]
        end = max((stop for _, stop in self._spans.values()), default=0)
        if wrong or end != size - self._start:
            raise CheckpointError(
                f"{self.path} is damaged: {size} bytes, the header says {self._start + end} {wrong or ''}"
            )
        self._bytes = np.memmap(self.path, np.uint8, "c") if end else np.empty(0, np.uint8)

    def _fits(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        start, stop = self._spans[name]
        return bool(start >= 0 and stop - start == prod(shape) * dtype.itemsize)

    def view(self, name: str) -> torch.Tensor:
        """Return a tensor that reads the file when it is read; it must not be written."""
        shape, dtype = self.kinds[name]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        start, stop = self._spans[name]
        part = self._bytes[self._start + start : self._start + stop]
        return torch.from_numpy(part).view(dtype).view(shape)


def read_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, by name."""
    file = SafeTensors(path)
    return {name: file.view(name).clone() for name in file.kinds}


def load_safetensors(path: str | Path, model: Mapping[str, Piece]) -> None:
    """Fill the pieces of a model in place from a file of the full model; every rank of the default group calls it.

    Names, shapes and dtypes have to be those of the file, except that a rank may hold a part of the names. Raises
    `CheckpointError` on every rank, with what differs.
    """
    group, fault, file = everybody(), "", None
    try:
        file = SafeTensors(path)
        refuse(differences(kinds(model), {name: file.kinds[name] for name in model if name in file.kinds}), str(path))
    except CheckpointError as error:
        fault = str(error)
    agree(group, "load of a safetensors file", {"path": str(path)}, fault)
    assert file is not None
    missing = sorted(set(file.kinds) - names_of_all(group, model))
    refuse([f"{name}: in the file, not here" for name in missing], f"{path} is of another model")
    for name, piece in model.items():
        box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.local.shape, strict=True))
        piece.local.detach().copy_(file.view(name)[box])
