"""One rank of `call_on_ranks`: joins the group, calls the function, hands over what rank 0 returns."""

from __future__ import annotations

import importlib
from datetime import timedelta

import torch
import torch.distributed as dist

from ascend_parallel.tuning.launch.ranks import begin_rank, deliver


def main() -> None:
    """Run the job of this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["limit"]))
    module, _, name = job["target"].partition(":")
    result = getattr(importlib.import_module(module), name)(dist.group.WORLD, **job["arguments"])
    dist.barrier()  # no rank leaves while another still talks to it
    deliver(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
