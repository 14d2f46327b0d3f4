"""Load a checkpoint into this rank's shards, after all files have been verified, or read it in one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ascend_parallel.sharding.layout import Shape
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_files import Reader, read_metadata, read_values, read_whole
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardLoadPlanner, kinds, saved_kinds
from ascend_parallel.training.checkpoint.differences import Kind, in_words
from ascend_parallel.training.checkpoint.folder import of_step, read_manifest, verify
from ascend_parallel.training.checkpoint.saving import RANDOM, VALUES, fault_of_last, named, set_random_state
from ascend_parallel.training.checkpoint.storage import agree, everybody, same_error_on_all_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadResult:
    """The result of a load beside the tensors.

    path
        The checkpoint that was loaded.
    step
        The checkpoint's step.
    values
        The values saved with it.
    """

    path: Path
    step: int
    values: dict[str, Any]


def load(
    path: str | Path,
    *,
    model: Mapping[str, TensorShard],
    optimizer: Mapping[str, TensorShard] | None = None,
    step: int | None = None,
    random: bool = True,
) -> LoadResult:
    """Fill the shards in place from the latest checkpoint of a folder, the checkpoint of `step`, or a checkpoint.

    Every rank of the default process group calls it; without a group, this process alone. The mesh and the number of
    ranks may differ from the save's.

    model, optimizer
        This rank's shards. The ranks' names together must be the checkpoint's, with the same shapes and dtypes. Without
        `optimizer` only the model is loaded.
    random
        Also set the random states: each rank's own if as many ranks saved, else rank 0's on all ranks, since ranks that
        hold copies must draw the same numbers.

    Before anything is filled, sizes and checksums of all files are verified, the work spread over the ranks, and values
    are read: so a damaged checkpoint changes nothing. Raises `CheckpointError` on every rank, saying what differs or is
    damaged, whichever rank found it.
    """
    fault = fault_of_last()
    group = everybody()
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    mine = {"path": str(path), "optimizer": str(optimizer is not None), "random": str(random)}
    try:
        shards = named(model, optimizer)
        kinds(shards)
        checkpoint = of_step(path, step)
        manifest = read_manifest(checkpoint)
        verify(checkpoint, manifest, sorted(manifest["files"])[rank::ranks])
        random_name = f"{RANDOM}.{rank if ranks == manifest['ranks'] else 0}"
        plain = read_values(checkpoint, read_metadata(checkpoint), [VALUES, *([random_name] if random else [])])
        mine |= {"step": str(manifest["step"]), "manifest": manifest["digest"][:16]}
    except Exception as error:  # noqa: BLE001  raised on all ranks by agree()
        fault = in_words(error)
    agree(group, "load of a checkpoint", mine, fault)
    planner = TensorShardLoadPlanner(shards, whole=["model.", *(["optimizer."] if optimizer is not None else [])])
    with same_error_on_all_ranks(group):
        dcp.load({}, storage_reader=Reader(checkpoint), planner=planner, process_group=group, no_dist=group is None)
    if random:
        set_random_state(plain[random_name])
        if ranks != manifest["ranks"] and rank == 0:
            log.warning("saved by %s ranks, loaded by %s: all take rank 0's random state", manifest["ranks"], ranks)
    return LoadResult(checkpoint, manifest["step"], plain[VALUES])


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
