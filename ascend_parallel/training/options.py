"""The parts of a `Strategy`: one frozen dataclass for each, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascend_parallel.training.optimizer.partition import PARTITIONS
from ascend_parallel.tuning.step_time.rank_bytes import ZERO_STAGES
from ascend_parallel.tuning.step_time.runtimes import BUCKET_BYTES

DTYPES = ("bfloat16", "float16")
LEVELS = ("O1", "O2")


class StrategyOptionError(ValueError):
    """An option of a strategy has a value that is not allowed; the message names it, its value and what to give."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Optimizer parallel (ZeRO, arXiv:1910.02054).

    zero_stage
        0: every replica holds all. 1: the optimizer's state is partitioned. 2: gradients too. 3: parameters too.
    dim
        The mesh dimension over whose ranks they are partitioned.
    partition_by
        "slices" of each parameter (weights sharding), or whole "parameters" (weights grouping; stages 1 and 2).
    """

    zero_stage: int = 0
    dim: str = "dp"
    partition_by: str = "slices"

    def __post_init__(self) -> None:
        """Check each option."""
        check_one_of("sharding.zero_stage", self.zero_stage, ZERO_STAGES)
        check_one_of("sharding.partition_by", self.partition_by, PARTITIONS)
        if self.zero_stage == 3 and self.partition_by == "parameters":
            raise StrategyOptionError(
                'sharding.partition_by="parameters" with zero_stage 3: give "slices", or zero_stage 1 or 2'
            )


@dataclass(frozen=True, kw_only=True)
class AmpOptions:
    """Mixed precision: the model computes in `dtype` (None: in its own dtype).

    level
        "O1": the model keeps its dtype; matmuls, convolutions and attention compute in `dtype`, norms and losses in
        fp32 (`autocast.py` lists them). "O2": a copy of the model computes in `dtype`.
    master_weights
        Level O2: the optimizer keeps separate fp32 weights, and its state in fp32.
    master_grad
        Whether 16-bit gradients accumulate, and are summed over ranks, in fp32. None: where several backwards come
        before a step of the optimizer.
    low_precision, keep_fp32
        More operators that compute in `dtype` (level O1), and in fp32: names of operators, such as "softmax", or
        "layers.*.norm:*" for those inside a module. They precede the lists of the level; `keep_fp32` comes first.
    """

    dtype: str | None = None
    level: str = "O2"
    master_weights: bool = True
    master_grad: bool | None = None
    low_precision: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check each option."""
        if self.dtype is not None:
            check_one_of("amp.dtype", self.dtype, DTYPES)
        check_one_of("amp.level", self.level, LEVELS)
        check_flag("amp.master_weights", self.master_weights)
        if self.master_grad is not None:
            check_flag("amp.master_grad", self.master_grad)
        for name in ("low_precision", "keep_fp32"):
            entries = getattr(self, name)
            if not isinstance(entries, (tuple, list)) or not all(isinstance(entry, str) for entry in entries):
                raise StrategyOptionError(f"amp.{name}={entries!r}: give a list of operators' names")
            if entries and self.dtype is None:
                raise StrategyOptionError(f"amp.{name} without amp.dtype: give dtype {' or '.join(DTYPES)}")
        if self.low_precision and self.level == "O2":
            raise StrategyOptionError(
                'amp.low_precision with amp.level="O2", whose whole model is cast: give level "O1"'
            )
        if self.level == "O1" and self.dtype is None:
            raise StrategyOptionError(f'amp.level="O1" without amp.dtype: give dtype {" or ".join(DTYPES)}')

    @property
    def casts_model(self) -> bool:
        """Whether a copy of the model computes in `dtype`."""
        return self.dtype is not None and self.level == "O2"

    @property
    def casts_operators(self) -> bool:
        """Whether operators are cast by name."""
        return self.dtype is not None and (self.level == "O1" or bool(self.keep_fp32))

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps fp32 weights of its own."""
        return self.casts_model and self.master_weights


@dataclass(frozen=True, kw_only=True)
class GradientMerge:
    """The optimizer steps once in `steps` batches, with the mean of their gradients (`average=False`: the sum)."""

    steps: int = 1
    average: bool = True

    def __post_init__(self) -> None:
        """Check each option."""
        check_count("gradient_merge.steps", self.steps)
        check_flag("gradient_merge.average", self.average)


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What overlaps with communication.

    operators
        Matmuls next to a collective run as overlapped operators.
    gradients
        Gradients of replicas are summed while backward runs.
    """

    operators: bool = True
    gradients: bool = True

    def __post_init__(self) -> None:
        """Check each option."""
        check_flag("overlap.operators", self.operators)
        check_flag("overlap.gradients", self.gradients)


@dataclass(frozen=True, kw_only=True)
class CommFusion:
    """Join small collectives: gradients are summed in buckets of `bucket_mb` megabytes (10^6 bytes); 0: each alone."""

    bucket_mb: float = BUCKET_BYTES / 1e6

    def __post_init__(self) -> None:
        """Check the size."""
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)) or self.bucket_mb < 0:
            raise StrategyOptionError(f"comm_fusion.bucket_mb={self.bucket_mb!r}: give megabytes, 0 or more")

    @property
    def bucket_bytes(self) -> int:
        """The bucket's size; 1 if each gradient is summed alone."""
        return max(1, int(self.bucket_mb * 1e6))


def check_mesh(name: str, mesh: object) -> None:
    """Raise `StrategyOptionError` unless `mesh` gives sizes of 1 or more by name."""
    sizes = dict(mesh) if isinstance(mesh, Mapping) else {}
    if not sizes or not all(isinstance(dim, str) and type(size) is int and size >= 1 for dim, size in sizes.items()):
        raise StrategyOptionError(f'{name}={mesh!r}: give sizes by name, such as {{"dp": 2, "tp": 2}}')


def check_count(name: str, value: object) -> None:
    """Raise unless `value` is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StrategyOptionError(f"{name}={value!r}: give a whole number of 1 or more")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise StrategyOptionError(f"{name}={value!r}: give true or false")


def check_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if isinstance(value, bool) or value not in allowed:
        raise StrategyOptionError(f"{name}={value!r}: give one of {', '.join(map(str, allowed))}")
