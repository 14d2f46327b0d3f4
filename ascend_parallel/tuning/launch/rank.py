"""Run one rank of `call_on_ranks`: join the group, call the function, deliver rank 0's result."""

from __future__ import annotations

import importlib
from datetime import timedelta

import torch
import torch.distributed as dist

from ascend_parallel.tuning.launch.devices import BACKENDS, own_device
from ascend_parallel.tuning.launch.ranks import begin_rank, deliver


def main() -> None:
    """Run the job of this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    own_device(job["device"])
    dist.init_process_group(BACKENDS[job["device"]], timeout=timedelta(seconds=job["limit"]))
    module, _, name = job["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(dist.group.WORLD, **job["arguments"])
    dist.barrier()  # no rank exits while another rank still communicates with it
    deliver(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
