"""The devices of ranks on one machine: an accelerator that torch finds (an NPU by torch_npu, or CUDA), or the CPU.

torch is imported by the functions: the command line reads this module, and shows its help without torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ascend_parallel.devices import DEVICES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

CPU = "cpu"


def device_for(ranks: int) -> str:
    """Return the type of device on which `ranks` processes of this machine can run, each on a device of its own.

    "cpu" if torch finds no accelerator of a known backend, or fewer devices than ranks.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in DEVICES or torch.accelerator.device_count() < ranks:
        return CPU
    return accelerator.type


def device_of(group: dist.ProcessGroup) -> str:
    """Return the type of device that a group's backend is for."""
    import torch.distributed as dist

    return next(kind for kind, row in DEVICES.items() if row.backend == dist.get_backend(group))


def own_device(kind: str) -> torch.device:
    """Return this rank's device of a type, and make it the current one: its index is LOCAL_RANK."""
    import torch

    if kind == CPU:
        return torch.device(CPU)
    index = int(os.environ["LOCAL_RANK"])
    getattr(torch, kind).set_device(index)
    return torch.device(kind, index)
