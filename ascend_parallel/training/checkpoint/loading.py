"""Load a checkpoint into this rank's shards, whatever shards were saved, after all files have been verified."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader as dcp

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_files import Reader, read_metadata, read_values
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardLoadPlanner, kinds
from ascend_parallel.training.checkpoint.differences import in_words
from ascend_parallel.training.checkpoint.folder import of_step, read_manifest, verify
from ascend_parallel.training.checkpoint.saving import RANDOM, VALUES, fault_of_last, named, set_random_state
from ascend_parallel.training.checkpoint.storage import agree, everybody, same_error_on_all_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
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
) -> Loaded:
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
    return Loaded(checkpoint, manifest["step"], plain[VALUES])
