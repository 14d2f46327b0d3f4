"""Ranks make sure that they were given one strategy before they plan by it: with another one they would not meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.agreement import DisagreementError
from ascend_parallel.exchange import exchange
from ascend_parallel.sharding.running.agreed import fingerprint
from ascend_parallel.strategy.strategy import Strategy


def confirm_strategy(strategy: Strategy, batch: Sequence[Any], more: Mapping[str, Any]) -> None:
    """Raise `DisagreementError` on every rank unless all have come with the same.

    batch
        The one that is planned for, whose shapes and dtypes count; in mode "hybrid" they may differ.
    more
        Other arguments by name.
    """
    everybody = dist.group.WORLD
    if everybody is None:
        raise RuntimeError("train_step needs torch.distributed.init_process_group, on every rank")
    mine = {one.name: repr(getattr(strategy, one.name)) for one in fields(strategy)}
    mine |= {name: repr(value) for name, value in more.items()}
    if strategy.mode != "hybrid":
        mine["batch"] = ", ".join(map(_told, batch))
    _compare(everybody, "train_step", mine, "Give all ranks the same")


def confirm_replicas(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Raise `DisagreementError` on every rank of `group` unless their models have the same values."""
    mine = {"the model's parameters": fingerprint(model)}
    _compare(group, "train_step", mine, "Seed replicas alike, or load one checkpoint")


def _compare(group: dist.ProcessGroup, what: str, mine: Mapping[str, str], cure: str) -> None:
    told = exchange(group, what, dict(mine), DisagreementError)
    for name in mine:
        if any(value.get(name) != mine[name] for value in told.values()):
            which = "; ".join(f"{value.get(name)} on rank {rank}" for rank, value in told.items())
            raise DisagreementError(f"ranks call {what} differently: {name} is {which}. {cure}")


def _told(one: Any) -> str:
    return f"{list(one.shape)} of {one.dtype}" if isinstance(one, torch.Tensor) else repr(one)
