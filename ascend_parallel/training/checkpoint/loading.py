"""Loading: the shards that this rank holds now, whatever shards were saved, after everything was found whole."""

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
from ascend_parallel.training.checkpoint.random_state import set_random_state
from ascend_parallel.training.checkpoint.saving import RANDOM, VALUES, fault_of_last, named
from ascend_parallel.training.checkpoint.storage import agree, everybody, same_error_on_all_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside tensors.

    path
        Which checkpoint it was.
    step
        Its step.
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
    """Fill the shards in place from the latest checkpoint of a folder, or that of `step`, or a checkpoint itself.

    Every rank of the default process group calls it; without one, this process alone. Neither the mesh nor the number
    of ranks has to be that of the save.

    model, optimizer
        This rank's boxes. The ranks' names together have to be the checkpoint's, in shape and dtype too. Without an
        optimizer the model alone is loaded.
    random
        Also set the random states: each rank's own when there are as many ranks as saved; else rank 0's on all,
        since ranks that hold copies have to draw alike.

    Sizes and checksums of all files are compared first, the work spread over the ranks, and what is no tensor is read,
    so that nothing is filled from a damaged checkpoint. Raises `CheckpointError` on every rank, with what differs or
    is damaged, whatever a rank meets.
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
        drawn = f"{RANDOM}.{rank if ranks == manifest['ranks'] else 0}"
        beside = read_values(checkpoint, read_metadata(checkpoint), [VALUES, *([drawn] if random else [])])
        mine |= {"step": str(manifest["step"]), "manifest": manifest["digest"][:16]}
    except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it
        fault = in_words(error)
    agree(group, "load of a checkpoint", mine, fault)
    planner = TensorShardLoadPlanner(shards, whole=["model.", *(["optimizer."] if optimizer is not None else [])])
    with same_error_on_all_ranks(group):
        dcp.load({}, storage_reader=Reader(checkpoint), planner=planner, process_group=group, no_dist=group is None)
    if random:
        set_random_state(beside[drawn])
        if ranks != manifest["ranks"] and rank == 0:
            log.warning("saved by %s ranks, loaded by %s: all take rank 0's random state", manifest["ranks"], ranks)
    return Loaded(checkpoint, manifest["step"], beside[VALUES])
