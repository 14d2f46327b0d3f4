"""The parts of a `Strategy`: one frozen dataclass for each, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ascend_parallel.training.pipeline.picture import svg, text
from ascend_parallel.training.pipeline.schedule import SCHEDULES, Simulated, Times, check, closed_bubble, simulate

WITH_VIRTUAL_STAGES = ("interleaved_1f1b", "zero_bubble", "zbv")
DTYPES = ("bfloat16", "float16")
PARTITIONS = ("slices", "parameters")


class StrategyOptionError(ValueError):
    """An option of a strategy has a value that is not allowed; the message names it, its value and what to give."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Pipeline parallelism.

    degree
        Groups of ranks, each with a mesh of its own; 1: no pipeline.
    stages
        Stages of modules by path pattern, such as {"layers.[01]": 0, "layers.*": 1}; ``pipeline_stage`` on the model's
        modules counts too. Without both: stages of about the same work.
    schedule
        "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble" or "zbv".
    micro_batches
        The number of parts that a batch is cut into; without a pipeline their gradients are accumulated.
    virtual_stages
        Stages of each group of ranks; more than 1 with interleaved_1f1b, zero_bubble and zbv.
    """

    degree: int = 1
    stages: Mapping[str, int] = field(default_factory=dict)
    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Check each option, and that they fit together."""
        for name in ("degree", "micro_batches", "virtual_stages"):
            check_count(f"pipeline.{name}", getattr(self, name))
        check_one_of("pipeline.schedule", self.schedule, tuple(SCHEDULES))
        if self.virtual_stages > 1 and self.schedule not in WITH_VIRTUAL_STAGES:
            raise StrategyOptionError(
                f"pipeline.virtual_stages={self.virtual_stages} with the schedule {self.schedule}: give 1, or one of "
                f"{', '.join(WITH_VIRTUAL_STAGES)}"
            )
        if self.schedule == "zbv" and self.degree > 1 and self.virtual_stages != 2:
            raise StrategyOptionError(
                f"pipeline.virtual_stages={self.virtual_stages}: zbv has 2 stages on each group of ranks"
            )
        if self.degree == 1 and (self.stages or self.virtual_stages > 1):
            raise StrategyOptionError("pipeline.stages and pipeline.virtual_stages need pipeline.degree of 2 or more")
        if not isinstance(self.stages, Mapping):
            raise StrategyOptionError(
                f"pipeline.stages={self.stages!r}: give stages by pattern, such as {{'layers.[01]': 0, 'layers.*': 1}}"
            )
        if self.degree > 1:
            try:
                check(self.schedule, self.degree, self.count, self.micro_batches)
            except ValueError as error:
                raise StrategyOptionError(f"pipeline.{error}") from error
        for pattern, stage in self.stages.items():
            if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < self.count:
                raise StrategyOptionError(f"pipeline.stages, {pattern!r}: {stage!r}; give 0 to {self.count - 1}")

    @property
    def count(self) -> int:
        """The number of stages, of all groups of ranks."""
        return self.degree * self.virtual_stages

    def simulated(self, times: Times | None = None) -> Simulated:
        """Return the simulated schedule; by default a backward takes twice a forward."""
        return simulate(self.schedule, self.degree, self.count, self.micro_batches, times)

    def headline(self) -> str:
        """Return the bubble's predicted share of a step, and the published formula's."""
        closed = closed_bubble(self.schedule, self.degree, self.count, self.micro_batches)
        by_formula = "" if closed is None else f" ({100 * closed:.1f} % by the formula)"
        bubble = 100 * self.simulated().bubble
        return f"{self.schedule}, {self.micro_batches} micro-batches: bubble {bubble:.1f} % of a step{by_formula}"

    def __str__(self) -> str:
        """Draw the schedule as text: a row for each group of ranks."""
        if self.degree == 1:
            return "no pipeline"
        return text(self.simulated())

    def svg(self) -> str:
        """Draw the schedule as a picture, with shaded bubbles."""
        return svg(self.simulated())


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
        check_one_of("sharding.zero_stage", self.zero_stage, (0, 1, 2, 3))
        check_one_of("sharding.partition_by", self.partition_by, PARTITIONS)
        if self.zero_stage == 3 and self.partition_by == "parameters":
            raise StrategyOptionError(
                'sharding.partition_by="parameters" with zero_stage 3: give "slices", or zero_stage 1 or 2'
            )


@dataclass(frozen=True, kw_only=True)
class AmpOptions:
    """Mixed precision: the model computes in `dtype` (None: in its own dtype).

    master_weights
        The optimizer keeps separate fp32 weights, and its state in fp32.
    """

    dtype: str | None = None
    master_weights: bool = True

    def __post_init__(self) -> None:
        """Check each option."""
        if self.dtype is not None:
            check_one_of("amp.dtype", self.dtype, DTYPES)
        check_flag("amp.master_weights", self.master_weights)


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

    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Check the size."""
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)) or self.bucket_mb < 0:
            raise StrategyOptionError(f"comm_fusion.bucket_mb={self.bucket_mb!r}: give megabytes, 0 or more")

    @property
    def bucket_bytes(self) -> int:
        """The bucket's size; 1 if each gradient is summed alone."""
        return max(1, int(self.bucket_mb * 1e6))


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
