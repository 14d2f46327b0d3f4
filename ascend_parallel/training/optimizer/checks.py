"""Check the arguments of a `ParallelOptimizer` before its first collective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ascend_parallel.process_groups.consistency import DisagreementError, confirm_same, store_all_gather
from ascend_parallel.training.optimizer.factory import OptimizerFactory
from ascend_parallel.training.optimizer.partition import PARTITIONS
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.targets import OwnedParameter
from ascend_parallel.tuning.step_time.rank_bytes import ZERO_STAGES


@dataclass(frozen=True)
class Options:
    """The options of a `ParallelOptimizer`, described there."""

    zero_stage: int
    partition_by: str
    max_norm: float | None
    norm_type: float
    master_dtype: torch.dtype | None
    unreduced: bool
    bucket_bytes: int

    def __post_init__(self) -> None:
        """Check each option, and that they fit together."""
        if self.zero_stage not in ZERO_STAGES or isinstance(self.zero_stage, bool):
            raise ValueError(f"zero_stage={self.zero_stage!r}: give {', '.join(map(str, ZERO_STAGES))}")
        if self.partition_by not in PARTITIONS:
            raise ValueError(f"partition_by={self.partition_by!r}: give {' or '.join(PARTITIONS)}")
        if self.zero_stage == 3 and self.partition_by == "parameters":
            raise ValueError(
                'partition_by="parameters" with zero_stage=3, which cuts parameters: give partition_by="slices", or '
                "zero_stage 1 or 2"
            )
        for name in ("max_norm", "norm_type"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: give a number above 0")
        if self.master_dtype is not None and not self.master_dtype.is_floating_point:
            raise ValueError(f"master_dtype={self.master_dtype}: give torch.float32, or None")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes!r}: give 1 or more bytes")


def check_on_all_ranks(
    targets: Sequence[OwnedParameter], factory: OptimizerFactory, options: Options, everybody: dist.ProcessGroup | None
) -> None:
    """Raise `ValueError` on every rank if any rank's targets contradict themselves or cannot be partitioned."""
    my_error: ValueError | None = None
    try:
        _check(targets, factory, options)
    except ValueError as error:
        my_error = error
    mine = {"refused": "" if my_error is None else str(my_error)}
    values_by_rank = (
        {} if everybody is None else store_all_gather(everybody, "ParallelOptimizer", mine, DisagreementError)
    )
    if my_error is not None:
        raise my_error
    for rank, values in values_by_rank.items():
        if values["refused"]:
            raise ValueError(f"rank {rank}: {values['refused']}")


def _check(targets: Sequence[OwnedParameter], factory: OptimizerFactory, options: Options) -> None:
    names = [target.name for target in targets]
    double = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if double:
        raise ValueError(f"{', '.join(sorted(double))} stands twice among the targets: give each parameter once")
    replicated = [target for target in targets if target.group is not None]
    if options.zero_stage == 2 and replicated and not options.unreduced:
        raise ValueError(
            "zero_stage=2 sums gradients itself: give unreduced=True and leave them unsummed (ShardedModule.no_sync), "
            "or zero_stage=1"
        )
    for target in targets:
        factory.group_of(target.name)
        _check_bounds(target)
        if not factory.elementwise:
            _check_whole(target, factory, options)


def _check_bounds(target: OwnedParameter) -> None:
    held, shape = tuple(target.parameter.shape), target.shard.shape
    if held != tuple(target.shard.local.shape) or len(shape) != len(held):
        raise ValueError(f"{target.name} is {list(held)}; its shard is {list(target.shard.local.shape)}")
    ranks = target.group.size() if target.group is not None else 1
    if target.copies < 1 or target.copies % ranks:
        raise ValueError(f"{target.name}: copies={target.copies} on groups of {ranks} replicas: give a multiple of it")


def _check_whole(target: OwnedParameter, factory: OptimizerFactory, options: Options) -> None:
    name = factory.kind.__name__
    if tuple(target.parameter.shape) != target.shard.shape:
        raise ValueError(
            f"{name} looks at whole parameters, and {target.name} is cut: {list(target.parameter.shape)} of "
            f"{list(target.shard.shape)}; take an elementwise optimizer, such as AdamW"
        )
    if target.group is not None and options.zero_stage and options.partition_by == "slices":
        raise ValueError(f'{name} looks at whole parameters: give partition_by="parameters", or zero_stage=0')


def confirm_same_arguments(
    targets: Sequence[OwnedParameter],
    factory: OptimizerFactory,
    options: Options,
    loss_scale: LossScale | None,
    everybody: dist.ProcessGroup | None,
) -> None:
    """Raise `DisagreementError` on every rank if ranks have different options, or replicas have different targets."""
    if everybody is None:
        return
    mine = {"options": repr(options), "loss_scale": repr(loss_scale), "optimizer": _description(factory)}
    confirm_same(everybody, "ParallelOptimizer", mine, "ranks make different optimizers", "Give all ranks the same")
    groups = {target.group: None for target in targets if target.group is not None}
    for group in groups:
        mine = {"targets": _digest([target for target in targets if target.group is group])}
        confirm_same(group, "ParallelOptimizer", mine, "ranks make different optimizers", "Give all ranks the same")


def _description(factory: OptimizerFactory) -> str:
    return f"{factory.kind.__name__} {[sorted(settings.items(), key=repr) for _, settings in factory.groups]!r}"


def _digest(targets: Sequence[OwnedParameter]) -> str:
    described = [
        (target.name, tuple(target.parameter.shape), target.parameter.dtype, target.shard.shape, target.shard.offsets)
        for target in targets
    ]
    return f"{len(targets)} of digest {hashlib.sha256(repr(described).encode()).hexdigest()[:16]}"
