"""Check the arguments of `train_step`: alone, against the job, and between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.consistency import confirm_same
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.strategy import Strategy


def confirm_same_strategy(strategy: Strategy, batch: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise `DisagreementError` on every rank unless all have the same strategy, options and batch shapes.

    In mode "hybrid" shapes may differ.
    """
    mine = {field.name: repr(getattr(strategy, field.name)) for field in fields(strategy)}
    mine |= {name: repr(value) for name, value in options.items()}
    if strategy.mode != "hybrid":
        mine["batch"] = ", ".join(
            f"{list(item.shape)} of {item.dtype}" if isinstance(item, torch.Tensor) else repr(item) for item in batch
        )
    problem = "ranks call train_step differently"
    confirm_same(dist.group.WORLD, "train_step", mine, problem, "Give all ranks the same")


def check_arguments(model: nn.Module, batch: Sequence[Any], strategy: Strategy, options: Mapping[str, Any]) -> None:
    """Raise an error for arguments that `train_step` cannot take, on every rank if they differ between ranks."""
    if isinstance(batch, (torch.Tensor, Mapping)):
        raise TypeError(f"batch is a {type(batch).__name__}: give the loss's arguments as a tuple, such as (x,)")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise StrategyOptionError(
            "the model is on the meta device, without values: build it on every rank with the same seed, and load a "
            "checkpoint afterwards (plan_training takes it as it is)"
        )
    check_batches = options["check_batches"]
    if type(check_batches) is not int or check_batches < 0:
        raise StrategyOptionError(f"check_batches={check_batches!r}: give a whole number of batches, or 0 for never")
    confirm_same_strategy(strategy, batch, options)
    data = {mesh[strategy.data_dim] for mesh in strategy.stage_meshes if strategy.data_dim is not None}
    if options["local_batches"] and len(data) > 1:
        raise StrategyOptionError(
            f"local_batches=True with pipeline.meshes {strategy.sizes}: a batch is cut into {strategy.data_dim}="
            f"{' and '.join(map(str, sorted(data)))} parts, and samplers of different numbers of replicas draw other "
            "rows; give every rank the whole batch (local_batches=False), or all meshes one size of "
            f"{strategy.data_dim}"
        )
    if dist.get_world_size() != strategy.ranks:
        which = f"mesh {dict(strategy.mesh)}, pipeline.degree={strategy.pipeline.degree}"
        which = f"pipeline.meshes {strategy.sizes}" if strategy.pipeline.meshes else which
        raise StrategyOptionError(
            f"the strategy is for {strategy.ranks} ranks ({which}), and the job has {dist.get_world_size()}"
        )
