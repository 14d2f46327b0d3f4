"""The settings that choose a kernel and its chunks: one frozen value, checked as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ascend_parallel.ops.shape_table import Cut, SettingsError, Shape, ShapeTable, require, whole_number

MODES = (-1, 0, 1, 2)
COMM_MODES = ("ai_cpu", "aiv")
LONGEST = 86400


class ChunkPlan(Protocol):
    """Chunk sizes that were measured, as `ascend_parallel.tuning.measured.chunk_plan.Plan` holds them; hashable."""

    @property
    def digest(self) -> str:
        """A short text that is the same for equal plans."""

    def find(self, problem: Any) -> tuple[tuple[int, ...], str] | None:
        """Return the rows of each chunk for a problem, and why, or None."""

    def of(self, run: str) -> ChunkPlan:
        """Return the plan for "forward" or "backward"."""


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What `ops` chooses by; the same on every rank of a group.

    num_chunks
        How many chunks a matmul next to a collective is cut into, 1 (off) to 64. COC_PARALLEL_NUM.
    fused
        Prefer a fused operator; wins over ``num_chunks``. USE_COC_FUSED_KERNEL.
    mode
        0 the original layers, 1 our autograd functions without chunks (to debug), 2 overlapped,
        -1 chooses 2 if any setting asks for overlap, else 0. COC_MODE.
    matmul_soc_friendly, k_min, k_max
        Bring matmul operands to 512-byte rows on Ascend; ``k_min <= K <= k_max`` is the window, in
        elements of K, in which padding is worth its time.
    customized_coc
        For single matmul shapes ``(m, k, n)`` a chunk count, or the rows of each chunk; m is the gathered M
        where the layer gathers. Wins over ``plan``, which wins over ``num_chunks``.
    plan
        Chunk sizes that were measured before. COC_PLAN names their file.
    tune
        File in which to keep the measurements of this run. COC_TUNE.
    auto
        Chunk sizes from earlier measurements on this machine, else from a model. COC_PARALLEL_NUM=auto.
    deterministic
        Matmuls run in tiles of rows and sums over ranks are taken in rank order and in fp32, so that bits depend
        neither on the run nor on the number of chunks (one included) nor on the kernel. COC_DETERMINISTIC.
    strict
        A request that a call cannot have (a fused operator, chunks) is an error instead of a warning.
        COC_STRICT.
    time_limit
        Seconds that the shared-memory kernel waits for a rank. Collectives of a backend have the
        limit of their group instead. COC_TIME_LIMIT.
    comm_mode
        Which engine drives the communication of the fused operators on Ascend: "ai_cpu" or "aiv"; None leaves
        the choice to torch_npu.

    Source of names and meaning: MindSpeed, communication-over-computation.md.
    """

    num_chunks: int = 1
    fused: bool = False
    mode: int = -1
    matmul_soc_friendly: bool = True
    customized_coc: Mapping[Shape, Cut] = field(default_factory=ShapeTable)
    plan: ChunkPlan | None = None
    tune: str | None = None
    auto: bool = False
    k_min: int = 1024
    k_max: int = 4096
    deterministic: bool = False
    strict: bool = False
    time_limit: int = 300
    comm_mode: str | None = None

    def __post_init__(self) -> None:
        """Raise `SettingsError` for a value that is not allowed."""
        whole_number("num_chunks", self.num_chunks)
        for name in ("fused", "matmul_soc_friendly", "deterministic", "strict", "auto"):
            require_switch(name, getattr(self, name))
        require("mode", self.mode, type(self.mode) is int and self.mode in MODES, "-1, 0, 1 or 2")
        allowed = self.comm_mode is None or self.comm_mode in COMM_MODES
        require("comm_mode", self.comm_mode, allowed, " or ".join(COMM_MODES))
        limit = self.time_limit
        require("time_limit", limit, type(limit) is int and 1 <= limit <= LONGEST, f"whole seconds from 1 to {LONGEST}")
        for name in ("k_min", "k_max"):
            value = getattr(self, name)
            require(name, value, type(value) is int and value >= 1, "a whole number of elements, 1 or more")
        require("k_min", self.k_min, self.k_min <= self.k_max, f"at most k_max ({self.k_max})")
        path = self.tune
        require(
            "COC_TUNE", path, path is None or (isinstance(path, str) and path.endswith(".json")), "a path to a .json"
        )
        require("plan", self.plan, self.plan is None or hasattr(self.plan, "digest"), "the path of a plan, or a plan")
        if self.plan is not None and (self.tune or self.auto):
            raise SettingsError(
                "COC_PLAN cannot be set together with COC_TUNE or COC_PARALLEL_NUM=auto: give one of them"
            )
        if not isinstance(self.customized_coc, ShapeTable):
            object.__setattr__(self, "customized_coc", ShapeTable(self.customized_coc))

    def __hash__(self) -> int:
        """Hash the fields, once: the settings are looked up at every call of an operator."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hash, which differs from process to process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def for_operators(self) -> OperatorSettings:
        """These settings alone, without the fields that a derived class adds."""
        return self

    @property
    def effective_mode(self) -> int:
        """0, 1 or 2: the mode that -1 stands for."""
        if self.mode != -1:
            return self.mode
        asks = self.fused or self.num_chunks > 1 or self.plan or self.tune or self.auto or self.deterministic
        return 2 if asks else 0

    @property
    def enabled(self) -> bool:
        """Whether any layer is to be replaced."""
        return self.effective_mode != 0


def require_switch(name: str, value: object) -> None:
    """Raise `SettingsError` unless `value` is true or false."""
    require(name, value, isinstance(value, bool), "true or false")
