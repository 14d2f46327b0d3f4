"""Run one rank of `call_on_ranks`: join the group, call the function, hand over rank 0's result."""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.devices import DEVICES
from ascend_parallel.text import replace_text
from ascend_parallel.tuning.launch.devices import own_device
from ascend_parallel.tuning.launch.ranks import PACKAGE, file_of_job


def main() -> None:
    """Run the job of this rank."""
    if (theirs := os.environ["PARENT_PACKAGE"]) != PACKAGE:
        sys.exit(f"this rank has imported {PACKAGE}, and the program that started it {theirs}")
    job: dict[str, Any] = json.loads(file_of_job("job.json").read_text())
    torch.set_num_threads(1)
    own_device(job["device"])
    # The ranks meet in a file: another program may take a port that was free a moment ago.
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(str(file_of_job("store")), ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=job["limit"])
    dist.init_process_group(DEVICES[job["device"]].backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    module, _, name = job["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(dist.group.WORLD, **job["arguments"])
    dist.barrier()  # no rank exits while another rank still communicates with it
    if rank == 0:
        replace_text(file_of_job("results.json"), json.dumps(result))
    dist.destroy_process_group()
