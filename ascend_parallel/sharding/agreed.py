"""Ranks make sure that they run the same plan before they run it: with another one collectives would not meet."""

from __future__ import annotations

import torch.distributed as dist

from ascend_parallel.agreement import DisagreementError
from ascend_parallel.exchange import exchange
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.plan import ShardingPlan


def confirm_alike(plan: ShardingPlan, overlap: bool, settings: Settings) -> None:
    """Raise `DisagreementError` on every rank unless all of the default group have come with the same."""
    everybody = dist.group.WORLD
    if everybody is None:
        raise RuntimeError("parallelize needs torch.distributed.init_process_group, on every rank")
    mine = {"the sharding plan": plan.digest, "overlap": str(overlap)}
    mine |= {name: str(value) for name, value in settings.as_dict().items()}
    told = exchange(everybody, "parallelize", mine, DisagreementError)
    for name in mine:
        if any(value[name] != mine[name] for value in told.values()):
            which = ", ".join(f"{value[name]} on rank {rank}" for rank, value in told.items())
            raise DisagreementError(f"ranks call parallelize with different plans or settings: {name} is {which}")
