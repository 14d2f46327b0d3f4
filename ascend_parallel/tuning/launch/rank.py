"""Run one rank of `call_on_ranks`: join the group, call the function, deliver rank 0's result."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ascend_parallel.tuning.launch.devices import BACKENDS, own_device
from ascend_parallel.tuning.launch.ranks import begin_rank, deliver, store_file


def join_group(backend: str, timeout: timedelta) -> None:
    """Join the ranks of the job. They meet in a file: another program may take a port that was free a moment ago."""
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(str(store_file()), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def main() -> None:
    """Run the job of this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    own_device(job["device"])
    join_group(BACKENDS[job["device"]], timedelta(seconds=job["limit"]))
    module, _, name = job["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(dist.group.WORLD, **job["arguments"])
    dist.barrier()  # no rank exits while another rank still communicates with it
    deliver(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
