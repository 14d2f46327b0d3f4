"""The pipeline part of a `Strategy`: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ascend_parallel.training.options import StrategyOptionError, check_count, check_mesh, check_one_of
from ascend_parallel.training.pipeline.picture import svg, text
from ascend_parallel.tuning.step_time.schedule import SCHEDULES, SEVERAL, check, closed_bubble
from ascend_parallel.tuning.step_time.timing import SimulatedStep, StageTimes, simulate


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
    meshes
        The mesh of each group of ranks, such as ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}), in place of the strategy's
        `mesh`. All name the same dimensions; sizes, and the number of ranks, may differ.
    virtual_stages
        Stages of each group of ranks; more than 1 with interleaved_1f1b, zero_bubble and zbv.
    """

    degree: int = 1
    stages: Mapping[str, int] = field(default_factory=dict)
    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1
    meshes: Sequence[Mapping[str, int]] = ()

    def __post_init__(self) -> None:
        """Check each option, and that they fit together."""
        for name in ("degree", "micro_batches", "virtual_stages"):
            check_count(f"pipeline.{name}", getattr(self, name))
        check_one_of("pipeline.schedule", self.schedule, tuple(SCHEDULES))
        if self.virtual_stages > 1 and self.schedule not in SEVERAL:
            raise StrategyOptionError(
                f"pipeline.virtual_stages={self.virtual_stages} with the schedule {self.schedule}: give 1, or one of "
                f"{', '.join(SEVERAL)}"
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

        self._check_meshes()

    def _check_meshes(self) -> None:
        if not isinstance(self.meshes, (tuple, list)):
            raise StrategyOptionError(
                f"pipeline.meshes={self.meshes!r}: give a list of meshes, such as "
                "[{'dp': 2, 'tp': 2}, {'dp': 4, 'tp': 1}]"
            )
        for place, mesh in enumerate(self.meshes):
            check_mesh(f"pipeline.meshes[{place}]", mesh)
            if list(mesh) != list(self.meshes[0]):
                raise StrategyOptionError(
                    f"pipeline.meshes[{place}]={dict(mesh)}: name the dimensions of the first, "
                    f"{', '.join(self.meshes[0])}, in the same order; of size 1 where this group of ranks has none"
                )
        if self.meshes and len(self.meshes) != self.degree:
            raise StrategyOptionError(
                f"pipeline.meshes has {len(self.meshes)} meshes, and pipeline.degree={self.degree}: give a mesh for "
                "each group of ranks"
            )
        if len(self.meshes) == 1:
            raise StrategyOptionError("pipeline.meshes with one mesh: give it as mesh")

    @property
    def count(self) -> int:
        """The number of stages, of all groups of ranks."""
        return self.degree * self.virtual_stages

    def simulated(self, times: StageTimes | None = None) -> SimulatedStep:
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
