"""What a `ParallelOptimizer` refuses, before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.consistency import DisagreementError, confirm_same, exchange
from ascend_parallel.training.optimizer.factory import Recipe
from ascend_parallel.training.optimizer.partition import BY
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.targets import Target

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Options:
    """What was chosen; see `ParallelOptimizer`."""

    level: int
    by: str
    max_norm: float | None
    norm_type: float
    master_dtype: torch.dtype | None
    unreduced: bool
    bucket_bytes: int

    def __post_init__(self) -> None:
        """Check each option, and that they fit together."""
        if self.level not in LEVELS or isinstance(self.level, bool):
            raise ValueError(f"level={self.level!r}: give {', '.join(map(str, LEVELS))}")
        if self.by not in BY:
            raise ValueError(f"by={self.by!r}: give {' or '.join(BY)}")
        if self.level == 3 and self.by == "parameters":
            raise ValueError('by="parameters" with level=3, which cuts parameters: give by="slices", or level 1 or 2')
        for name in ("max_norm", "norm_type"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: give a number above 0")
        if self.master_dtype is not None and not self.master_dtype.is_floating_point:
            raise ValueError(f"master_dtype={self.master_dtype}: give torch.float32, or None")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes!r}: give 1 or more bytes")


def check_everywhere(
    targets: Sequence[Target], recipe: Recipe, options: Options, everybody: dist.ProcessGroup | None
) -> None:
    """Raise `ValueError` on every rank for one's targets that are not as they say, or that cannot be divided so."""
    mine: ValueError | None = None
    try:
        _check(targets, recipe, options)
    except ValueError as error:
        mine = error
    refused = {"refused": "" if mine is None else str(mine)}
    told = {} if everybody is None else exchange(everybody, "ParallelOptimizer", refused, DisagreementError)
    if mine is not None:
        raise mine
    for rank, one in told.items():
        if one["refused"]:
            raise ValueError(f"rank {rank}: {one['refused']}")


def _check(targets: Sequence[Target], recipe: Recipe, options: Options) -> None:
    names = [target.name for target in targets]
    double = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if double:
        raise ValueError(f"{', '.join(sorted(double))} stands twice among the targets: give each parameter once")
    shared = [target for target in targets if target.group is not None]
    if options.level == 2 and shared and not options.unreduced:
        raise ValueError(
            "level=2 sums gradients itself: give unreduced=True and leave them unsummed (ShardedModule.no_sync), or "
            "level=1"
        )
    for target in targets:
        recipe.group_of(target.name)
        _check_place(target)
        if not recipe.elementwise:
            _check_whole(target, recipe, options)


def _check_place(target: Target) -> None:
    held, shape = tuple(target.parameter.shape), target.piece.shape
    if held != tuple(target.piece.local.shape) or len(shape) != len(held):
        raise ValueError(f"{target.name} is {list(held)}; its piece is {list(target.piece.local.shape)}")
    ranks = target.group.size() if target.group is not None else 1
    if target.copies < 1 or target.copies % ranks:
        raise ValueError(f"{target.name}: copies={target.copies} on groups of {ranks} replicas: give a multiple of it")


def _check_whole(target: Target, recipe: Recipe, options: Options) -> None:
    name = recipe.kind.__name__
    if tuple(target.parameter.shape) != target.piece.shape:
        raise ValueError(
            f"{name} looks at whole parameters, and {target.name} is cut: {list(target.parameter.shape)} of "
            f"{list(target.piece.shape)}; take an elementwise optimizer, such as AdamW"
        )
    if target.group is not None and options.level and options.by == "slices":
        raise ValueError(f'{name} looks at whole parameters: give by="parameters", or level=0')


def confirm_alike(
    targets: Sequence[Target],
    recipe: Recipe,
    options: Options,
    loss_scale: LossScale | None,
    everybody: dist.ProcessGroup | None,
) -> None:
    """Raise `DisagreementError` on every rank unless options are alike on all, and targets on their replicas."""
    if everybody is None:
        return
    mine = {"options": repr(options), "loss_scale": repr(loss_scale), "optimizer": _told(recipe)}
    confirm_same(everybody, "ParallelOptimizer", mine, "ranks make different optimizers", "Give all ranks the same")
    groups = {target.group: None for target in targets if target.group is not None}
    for group in groups:
        mine = {"targets": _digest([target for target in targets if target.group is group])}
        confirm_same(group, "ParallelOptimizer", mine, "ranks make different optimizers", "Give all ranks the same")


def _told(recipe: Recipe) -> str:
    return f"{recipe.kind.__name__} {[sorted(settings.items(), key=repr) for _, settings in recipe.groups]!r}"


def _digest(targets: Sequence[Target]) -> str:
    told = [
        (one.name, tuple(one.parameter.shape), one.parameter.dtype, one.piece.shape, one.piece.offsets)
        for one in targets
    ]
    return f"{len(targets)} of digest {hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"
