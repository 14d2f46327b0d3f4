"""Ranks make sure that they run the same plan before they run it: with another one collectives would not meet."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from ascend_parallel.agreement import DisagreementError
from ascend_parallel.exchange import exchange
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.planner.plan import ShardingPlan
from ascend_parallel.sharding.running.marked import Recompute


def confirm_alike(
    plan: ShardingPlan,
    model: torch.nn.Module,
    overlap: bool,
    settings: Settings,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 0,
    recompute: Recompute | None = None,
) -> int:
    """Return a seed that is the same on all ranks of the group, by default all: that of the first one's generator.

    Raises `DisagreementError` on every rank unless all have come with the same.

    Of the model's parameters and buffers sums are compared: ranks seeded differently would hold parts of different
    models.
    """
    everybody = group or dist.group.WORLD
    if everybody is None:
        raise RuntimeError("parallelize needs torch.distributed.init_process_group, on every rank")
    mine = {"the sharding plan": plan.digest, "overlap": str(overlap), "the model's parameters": fingerprint(model)}
    mine |= {"bucket_bytes": str(bucket_bytes), "recompute": repr(recompute or Recompute())}
    mine |= {name: str(value) for name, value in settings.as_dict().items()}
    told = exchange(everybody, "parallelize", mine | {"seed": torch.initial_seed()}, DisagreementError)
    for name in mine:
        if any(value[name] != mine[name] for value in told.values()):
            which = ", ".join(f"{value[name]} on rank {rank}" for rank, value in told.items())
            raise DisagreementError(
                f"ranks call parallelize with different plans, settings or models: {name} is {which}. Give all ranks "
                "the same, and seed them alike or load one checkpoint"
            )
    return int(told[min(told)]["seed"])


def fingerprint(model: torch.nn.Module) -> str:
    """Return what tells a model's values from others: names, shapes and sums of all tensors."""
    found = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wide = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        found.update(f"{name} {tuple(tensor.shape)} {wide.sum().item()} {wide.abs().sum().item()}".encode())
    return found.hexdigest()[:16]
