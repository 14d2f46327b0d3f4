"""`Strategy`: the configuration of a training on many ranks, beside the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ascend_parallel.sharding.grad_dtype import WIDE
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.annotate import strategies_of_tables
from ascend_parallel.sharding.planner.batch_norms import CHOICES
from ascend_parallel.sharding.planner.shared_sequences import check_exchange
from ascend_parallel.text import nearest
from ascend_parallel.training.degrees.search import search_degrees
from ascend_parallel.training.graph_passes import PASSES
from ascend_parallel.training.options import (
    AmpOptions,
    CommFusion,
    GradientMerge,
    OverlapOptions,
    ShardingOptions,
    StrategyOptionError,
    check_mesh,
    check_one_of,
)
from ascend_parallel.training.pipeline.options import PipelineOptions
from ascend_parallel.training.recompute import Recompute
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE
from ascend_parallel.tuning.cost_model.mindformers import read_mindformers
from ascend_parallel.tuning.cost_model.tables import PlanningError, parse_toml, read_text

log = logging.getLogger("ascend_parallel")

MODES = ("data", "semi_auto", "auto", "hybrid")
# MindSpore's parallel modes and search modes, in the words of this package (docs/vocabulary.md).
MINDSPORE_MODES = {
    "data_parallel": "data",
    "semi_auto_parallel": "semi_auto",
    "auto_parallel": "auto",
    "sharding_propagation": "auto",
    "recursive_programming": "auto",
    "dynamic_programming": "auto",
    "hybrid_parallel": "hybrid",
}
# Options that a hybrid model, which is not traced, cannot have.
OF_PLANS = ("operators", "pipeline", "recompute", "fused_passes", "batch_norm")


def _default_mesh() -> dict[str, int]:
    return {"dp": 1}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is trained on many ranks.

    mode
        "data": every rank holds the whole model and gets a part of the batch. "semi_auto": `operators` have
        strategies, the rest is data parallel. "auto": the strategies in `operators` (possibly none) are kept, the rest
        is searched. "hybrid": the model runs as written, with its own collectives and overlapped operators; gradients
        are summed over `data_dim`.
    mesh
        Sizes by name of the mesh of one pipeline stage, such as {"dp": 2, "tp": 2}. With `pipeline.meshes` it is the
        first of those: leave it out.
    data_dim
        The mesh dimension along which data differ; None if there is none (modes auto and hybrid).
    sequence_dim
        The mesh dimension of context parallelism (mode "auto"): it shards the batch's second dimension, the sequence.
    sequence_exchange, sequence_groups
        With `sequence_dim`, as for `propagate`: how attention brings a sequence together, and in how many groups.
    expert_dim
        The mesh dimension of expert parallelism (mode "auto"): as for `propagate`; it may be `data_dim`.
    operators
        Strategies by pattern, as for `propagate`.
    fused_passes
        Names of PASSES, which fuse operators of the graph.
    batch_norm
        As for `propagate`: "sync" or "local" statistics of sharded batches.
    max_norm
        Gradients are clipped to this global norm.
    memory_limit, hardware
        As for `propagate`: the bytes that a rank may hold, and the hardware whose costs count: its
        name, or a TOML file of your own numbers (docs/predict.md), by a path from the working directory.

    Raises `StrategyOptionError` for options that are not allowed, alone or together.
    """

    mode: str = "auto"
    mesh: Mapping[str, int] = field(default_factory=_default_mesh)
    data_dim: str | None = "dp"
    sequence_dim: str | None = None
    sequence_exchange: str | None = None
    sequence_groups: int | None = None
    expert_dim: str | None = None
    operators: Mapping[str, Any] = field(default_factory=dict)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    recompute: Recompute = field(default_factory=Recompute)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    amp: AmpOptions = field(default_factory=AmpOptions)
    gradient_merge: GradientMerge = field(default_factory=GradientMerge)
    overlap: OverlapOptions = field(default_factory=OverlapOptions)
    comm_fusion: CommFusion = field(default_factory=CommFusion)
    fused_passes: tuple[str, ...] = ()
    batch_norm: str = "sync"
    max_norm: float | None = None
    memory_limit: float | None = None
    hardware: str = DEFAULT_HARDWARE

    def __post_init__(self) -> None:
        """Check that the options fit together."""
        if isinstance(self.mode, str) and self.mode in MINDSPORE_MODES:
            raise StrategyOptionError(
                f"mode={self.mode!r}: what MindSpore calls so is mode {MINDSPORE_MODES[self.mode]!r} here; give one of "
                f"{', '.join(MODES)}"
            )
        check_one_of("mode", self.mode, MODES)
        check_one_of("batch_norm", self.batch_norm, CHOICES)
        self._check_types()
        self._check_mesh()
        self._check_mode()
        for name in self.fused_passes:
            check_one_of("fused_passes", name, tuple(PASSES))

    @classmethod
    def from_toml(cls, path: str | Path) -> Strategy:
        """Read a TOML file: the fields' names, a table for each part; `operators` as for `read_strategies`."""
        file = Path(path)
        try:
            return cls.from_dict(parse_toml(read_text(file, str(file)), str(file)), str(file))
        except PlanningError as error:
            raise StrategyOptionError(str(error)) from error

    @classmethod
    def from_mindformers(
        cls,
        path: str | Path,
        *,
        operators: Mapping[str, Any] | None = None,
        layers: str = "layers",
        ranks: int | None = None,
        hardware: str = DEFAULT_HARDWARE,
    ) -> Strategy:
        """Read the YAML file of a MindFormers training, for its static graph or for PyNative; needs PyYAML.

        operators
            Strategies by pattern, as for `propagate`; MindFormers has its own in the code of its layers. Without them
            the mode is "auto" where the file has "semi_auto".
        layers
            The path of the model's list of layers, such as "model.layers", for offsets and for recompute.
        ranks
            The number of ranks, for a file that leaves the replicas to the launch (PyNative).

        Rank 0 logs what differs here and what has no counterpart; `read_mindformers(path).report()` has every key.
        Raises `StrategyOptionError` with the key, its value and what is allowed.
        """
        try:
            run = read_mindformers(path, ranks)
        except PlanningError as error:
            raise StrategyOptionError(str(error)) from error
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            log.warning("%s", run.report(used=False))
        tables = run.tables(layers, named=bool(operators)) | {"hardware": hardware, "operators": dict(operators or {})}
        return cls.from_dict(tables, str(path))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], place: str = "the strategy") -> Strategy:
        """Make a strategy from nested tables; errors name `place`."""
        values = dict(_known(cls, tables, place))
        for name, kind in PARTS.items():
            if name in values:
                table = values[name]
                if not isinstance(table, Mapping):
                    raise StrategyOptionError(f"{place}, {name}={table!r}: give a table [{name}]")
                values[name] = _part(kind, table, f"{place}, [{name}]")
        if "operators" in values:
            values["operators"] = strategies_of_tables(values["operators"], f"{place}, [operators]")
        if isinstance(values.get("fused_passes"), list):
            values["fused_passes"] = tuple(values["fused_passes"])
        return cls(**values)

    @classmethod
    def search(cls, model: nn.Module, batch: Sequence[Any], **options: Any) -> Strategy:
        """Return the strategy of the fastest predicted step on a number of ranks within a memory.

        options
            Those of `search_degrees`, which also returns the ten best with times and reasons: `ranks`, `memory`,
            `hardware`, `loss`, `amp`, `progress`.

        Raises as `search_degrees`.
        """
        return cls.from_dict(search_degrees(model, batch, **options).tables(), "the strategy that was found")

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return sum(prod(mesh.values()) for mesh in self.stage_meshes)

    @property
    def stage_meshes(self) -> tuple[Mapping[str, int], ...]:
        """The sizes by name of the mesh of each pipeline stage's group of ranks."""
        return tuple(self.pipeline.meshes) or (self.mesh,) * self.pipeline.degree

    @property
    def sizes(self) -> str:
        """The sizes of the mesh, or of the meshes of `pipeline.meshes`, in words."""
        meshes = self.pipeline.meshes or (self.mesh,)
        return "; ".join(", ".join(f"{name}={size}" for name, size in mesh.items()) for mesh in meshes)

    @property
    def backwards(self) -> int:
        """The number of backwards before a step of the optimizer: micro-batches times merged batches."""
        return self.pipeline.micro_batches * self.gradient_merge.steps

    @property
    def wide_gradients(self) -> bool:
        """Whether 16-bit gradients accumulate in fp32."""
        return self.backwards > 1 if self.amp.master_grad is None else self.amp.master_grad

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` add up."""
        return WIDE if self.wide_gradients and dtype.is_floating_point and dtype.itemsize == 2 else dtype

    def meshes(self) -> tuple[ProcessMesh, ...]:
        """Return the mesh of each pipeline stage's group of ranks; ranks in ascending order, stage by stage."""
        made, first = [], 0
        for sizes in self.stage_meshes:
            ranks = np.arange(first, first + prod(sizes.values()))
            made.append(ProcessMesh(ranks.reshape(tuple(sizes.values())), list(sizes)))
            first += len(ranks)
        return tuple(made)

    def mesh_of(self, rank: int) -> ProcessMesh:
        """Return the mesh of a global rank. Raises `ValueError` for a rank that the job does not have."""
        for mesh in self.meshes():
            if mesh.coordinate(rank) is not None:
                return mesh
        raise ValueError(f"rank={rank!r}: the strategy is for {self.ranks} ranks, 0 to {self.ranks - 1}")

    def data_rank(self, rank: int) -> int:
        """Return a global rank's place along `data_dim` (0 without it), for a sampler of local batches.

        Raises `ValueError` for a rank that the job does not have.
        """
        mesh = self.mesh_of(rank)
        place = mesh.coordinate(rank)
        assert place is not None
        return 0 if self.data_dim is None else place[mesh.dim(self.data_dim)]

    def _check_types(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise StrategyOptionError(f"{name}={getattr(self, name)!r}: give a {kind.__name__}")
        if not isinstance(self.fused_passes, (tuple, list)):
            raise StrategyOptionError(f"fused_passes={self.fused_passes!r}: give a list of {', '.join(PASSES)}")
        if not isinstance(self.hardware, str):
            raise StrategyOptionError(
                f"hardware={self.hardware!r}: give a name, such as '910b', or a file such as 'cluster.toml'"
            )
        for name in ("max_norm", "memory_limit"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise StrategyOptionError(f"{name}={value!r}: give a number above 0")

    def _check_mesh(self) -> None:
        check_mesh("mesh", self.mesh)
        if self.pipeline.meshes:
            first = dict(self.pipeline.meshes[0])
            if dict(self.mesh) not in (_default_mesh(), first):
                raise StrategyOptionError(
                    f"mesh={dict(self.mesh)} with pipeline.meshes, whose first is {first}: leave mesh out"
                )
            object.__setattr__(self, "mesh", first)
        names = ", ".join(self.mesh)
        if self.data_dim is not None and self.data_dim not in self.mesh:
            raise StrategyOptionError(
                f"data_dim={self.data_dim!r}: the mesh has {names}; name one of those, or add a "
                f"dimension of size 1 to the mesh, such as dp = 1 (in mode auto also None, if data do not differ)"
            )
        if self.sequence_dim is not None and (
            self.mode != "auto" or self.sequence_dim not in self.mesh or self.sequence_dim == self.data_dim
        ):
            raise StrategyOptionError(
                f"sequence_dim={self.sequence_dim!r}: the mesh has {names}; name one of those, another than data_dim, "
                'with mode "auto"'
            )
        try:
            check_exchange(self.sequence_exchange, self.sequence_groups, shared=self.sequence_dim is not None)
        except ValueError as error:
            raise StrategyOptionError(str(error)) from error
        if self.expert_dim is not None and (
            self.mode != "auto" or self.expert_dim not in self.mesh or self.expert_dim == self.sequence_dim
        ):
            raise StrategyOptionError(
                f"expert_dim={self.expert_dim!r}: the mesh has {names}; name one of those, another than sequence_dim, "
                'with mode "auto"'
            )
        if self.sharding.zero_stage and self.sharding.dim not in self.mesh:
            raise StrategyOptionError(f"sharding.dim={self.sharding.dim!r}: the mesh has {names}")

    def _check_mode(self) -> None:
        if self.mode in ("data", "semi_auto") and self.data_dim is None:
            raise StrategyOptionError(f"mode={self.mode!r} needs data_dim: the mesh dimension along which data differ")
        if self.mode == "data":
            sizes = [item for mesh in self.stage_meshes for item in mesh.items()]
            others = [name for name, size in sizes if size > 1 and name != self.data_dim]
            if others:
                raise StrategyOptionError(
                    f'mode="data" with the mesh dimension {others[0]}: data parallelism has {self.data_dim} alone; '
                    'give mode "semi_auto" or "auto"'
                )
            if self.operators:
                raise StrategyOptionError('mode="data" with strategies of operators: give mode "semi_auto" or "auto"')
        if self.mode == "hybrid":
            default = Strategy()
            for name in OF_PLANS:
                if getattr(self, name) != getattr(default, name):
                    raise StrategyOptionError(
                        f'mode="hybrid" with {name}: the model runs as it is written and is not planned; leave {name} '
                        'out, or give mode "semi_auto" or "auto"'
                    )
            if self.amp.keep_fp32 or self.amp.low_precision:
                raise StrategyOptionError(
                    'mode="hybrid" with amp.low_precision or amp.keep_fp32: the model is not traced, and level "O1" is '
                    "torch.autocast; leave them out"
                )
            if self.sharding.zero_stage == 3:
                raise StrategyOptionError(
                    'mode="hybrid" with sharding.zero_stage=3, which needs a plan: give 0, 1 or 2'
                )


PARTS: dict[str, type[Any]] = {
    "pipeline": PipelineOptions,
    "recompute": Recompute,
    "sharding": ShardingOptions,
    "amp": AmpOptions,
    "gradient_merge": GradientMerge,
    "overlap": OverlapOptions,
    "comm_fusion": CommFusion,
}


def _part(kind: type[Any], table: Mapping[str, Any], place: str) -> Any:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return kind(**_known(kind, values, place))


def _known(kind: type[Any], table: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return the table; refuse names that `kind` does not have."""
    names = [option.name for option in fields(kind)]
    for name in table:
        if name not in names:
            raise StrategyOptionError(
                f"{place}: there is no {name!r}{nearest(name, names)} There are {', '.join(names)}"
            )
    return table
