"""A checkpoint read by one process, tensor by tensor, without process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ascend_parallel.sharding.layout import Shape
from ascend_parallel.training.checkpoint.dcp_files import read_metadata, read_values, read_whole
from ascend_parallel.training.checkpoint.dcp_planner import saved_kinds
from ascend_parallel.training.checkpoint.differences import Kind
from ascend_parallel.training.checkpoint.folder import of_step, read_manifest, verify
from ascend_parallel.training.checkpoint.saving import VALUES


@dataclass(frozen=True)
class CheckpointReader:
    """An open checkpoint of ours; its files have the size and checksum of the manifest.

    path
        The checkpoint itself.
    manifest
        Step, ranks, versions, files.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, step: int | None = None) -> CheckpointReader:
        """Open the latest checkpoint of a folder, or that of `step`, or a checkpoint itself.

        Raises `CheckpointError` when there is none or a file is missing or damaged.
        """
        checkpoint = of_step(path, step)
        manifest = read_manifest(checkpoint)
        verify(checkpoint, manifest, sorted(manifest["files"]))
        return cls(checkpoint, manifest)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Shape and dtype of every tensor, by name: ``model.<name>`` or ``optimizer.<name>``."""
        return saved_kinds(self._metadata)

    def shard_bounds(self, name: str) -> list[tuple[Shape, Shape]]:
        """Return offsets and sizes of the shards in which a tensor was written."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        return read_whole(self.path, self._metadata, name)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The `values` that were saved."""
        found: dict[str, Any] = read_values(self.path, self._metadata, [VALUES])[VALUES]
        return found

    @cached_property
    def _metadata(self) -> Metadata:
        return read_metadata(self.path)


def whole_state(path: str | Path, *, step: int | None = None, space: str = "model") -> dict[str, torch.Tensor]:
    """Return every whole tensor of a checkpoint, in one process and without process groups.

    path, step
        As for `load`.
    space
        "model" or "optimizer": whose tensors to return, under their own names.
    """
    if space not in ("model", "optimizer"):
        raise ValueError(f"space={space!r}: give 'model' or 'optimizer'")
    saved = CheckpointReader.open(path, step)
    prefix = f"{space}."
    return {name.removeprefix(prefix): saved.read(name) for name in saved.kinds if name.startswith(prefix)}
