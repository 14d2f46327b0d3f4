"""What the user asked for: one frozen value, checked as a whole.

The published switches (MindSpeed, "Communication Over Computation") keep their names: the
environment variables COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and COC_MODE, and the keys of
``coc_cfgs``, which here stand in a TOML or JSON file named by COC_CONFIG (environment.py reads both).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ascend_parallel.shape_table import MAX_CHUNKS, Cut, SettingsError, Shape, ShapeTable, require, whole_number

__all__ = ["MAX_CHUNKS", "Settings", "SettingsError", "ShapeTable", "option_name", "require", "whole_number"]

ORDERS = ("auto", "compute_first", "communicate_first")
MODES = (-1, 0, 1, 2)
COMM_MODES = ("ai_cpu", "aiv")
LONGEST = 86400
MOST_PASSES = 1_000_000
RAREST = 999_999_999
LOG_LEVELS = ("debug", "info", "warning", "error")
CALLS = f"0 (off) or a whole number of calls from 1 to {RAREST}"

# Fields that are true or false.
SWITCHES = (
    "fused",
    "matmul_soc_friendly",
    "enable_coc_in_column_backward",
    "recompute_all_gather",
    "deterministic",
    "strict",
    "auto",
)

# Field of Settings -> environment variable that sets it.
VARIABLES = {
    "num_chunks": "COC_PARALLEL_NUM",
    "fused": "USE_COC_FUSED_KERNEL",
    "mode": "COC_MODE",
    "deterministic": "COC_DETERMINISTIC",
    "strict": "COC_STRICT",
    "time_limit": "COC_TIME_LIMIT",
    "plan": "COC_PLAN",
    "tune": "COC_TUNE",
    "timeline": "COC_TIMELINE",
    "verify_every": "COC_VERIFY",
    "log_level": "COC_LOG_LEVEL",
}
# Fields that decide nothing of what is computed, so that ranks may differ in them.
PER_RANK = ("log_level",)
CONFIG_VARIABLE = "COC_CONFIG"
KNOWN_VARIABLES = (*VARIABLES.values(), CONFIG_VARIABLE)


class ChunkPlan(Protocol):
    """Chunk sizes that were measured, as `ascend_parallel.planning.plan.Plan` holds them; hashable."""

    @property
    def digest(self) -> str:
        """A short text that is the same for equal plans."""

    def find(self, problem: Any) -> tuple[tuple[int, ...], str] | None:
        """Return the rows of each chunk for a problem, and why, or None."""

    def of(self, run: str) -> ChunkPlan:
        """Return the plan for "forward" or "backward"."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides how a linear layer runs; the same on every rank of a group.

    num_chunks
        How many chunks a matmul next to a collective is cut into, 1 (off) to 64. COC_PARALLEL_NUM.
    fused
        Prefer a fused operator; wins over ``num_chunks``. USE_COC_FUSED_KERNEL.
    mode
        0 the original layers, 1 our autograd functions without chunks (to debug), 2 overlapped,
        -1 chooses 2 if anything here asks for overlap, else 0. COC_MODE.
    matmul_soc_friendly, k_min, k_max
        Bring matmul operands to 512-byte rows on Ascend; ``k_min <= K <= k_max`` is the window, in
        elements of K, in which padding is worth it.
    customized_coc
        For single matmul shapes ``(m, k, n)`` a chunk count, or the rows of each chunk; m is the gathered M
        where the layer gathers. Wins over ``plan``, which wins over ``num_chunks``.
    plan
        Chunk sizes that were measured before. COC_PLAN names their file.
    tune
        File in which to keep what this run measures of the shapes that it meets. COC_TUNE.
    auto
        Chunk sizes from what was measured on this machine before, else from a model. COC_PARALLEL_NUM=auto.
    enable_coc_in_column_backward
        Fused operators also in the column layer's backward; of no effect without ``fused``.
    recompute_all_gather
        Gather the column layer's input again in backward instead of keeping the gathered copy.
    deterministic
        Matmuls run in tiles of rows and sums over ranks are taken in rank order and in fp32, so that bits depend
        neither on the run nor on the number of chunks, one included, nor on the kernel. COC_DETERMINISTIC.
    strict
        A request that a call cannot have (a fused operator, chunks) is an error instead of a warning.
        COC_STRICT.
    time_limit
        Seconds that the shared-memory kernel waits for a rank. Collectives of a backend have the
        limit of their group instead. COC_TIME_LIMIT.
    timeline
        Folder to which every rank writes when its matmuls and collectives ran. COC_TIMELINE.
    timeline_passes
        How many forwards and backwards of layers each rank keeps for that, the last ones.
    comm_mode
        Who drives the communication of the fused operators on Ascend: "ai_cpu" or "aiv"; None leaves
        it to torch_npu.
    verify_every
        Check the first call of each patched layer, and from then on every so manieth, against Megatron-core's
        own forward and backward; 0: none. COC_VERIFY.
    verify_limit
        Error that such a check allows, relative to the largest magnitude; None: 2e-2 in 16 bits, else 1e-6.
    order
        Which of two independent steps a path starts first where it allows either (the column layer's
        sequence-parallel backward): the input gradient, or the gather. "auto" is "communicate_first".
    log_level
        Level of the logger "ascend_parallel"; None leaves it alone, which shows warnings. COC_LOG_LEVEL.

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
    enable_coc_in_column_backward: bool = False
    recompute_all_gather: bool = True
    k_min: int = 1024
    k_max: int = 4096
    deterministic: bool = False
    strict: bool = False
    time_limit: int = 300
    timeline: str | None = None
    timeline_passes: int = 4096
    comm_mode: str | None = None
    order: str = "auto"
    verify_every: int = 0
    verify_limit: float | None = None
    log_level: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is not allowed with a `SettingsError`."""
        whole_number("num_chunks", self.num_chunks)
        for name in SWITCHES:
            require(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        require("mode", self.mode, type(self.mode) is int and self.mode in MODES, "-1, 0, 1 or 2")
        require("order", self.order, self.order in ORDERS, "one of " + ", ".join(ORDERS))
        allowed = self.comm_mode is None or self.comm_mode in COMM_MODES
        require("comm_mode", self.comm_mode, allowed, " or ".join(COMM_MODES))
        limit = self.time_limit
        require("time_limit", limit, type(limit) is int and 1 <= limit <= LONGEST, f"whole seconds from 1 to {LONGEST}")
        for name in ("k_min", "k_max"):
            value = getattr(self, name)
            require(name, value, type(value) is int and value >= 1, "a whole number of elements, 1 or more")
        require("k_min", self.k_min, self.k_min <= self.k_max, f"at most k_max ({self.k_max})")
        every, error = self.verify_every, self.verify_limit
        require("verify_every", every, type(every) is int and 0 <= every <= RAREST, CALLS)
        allowed = error is None or (type(error) in (int, float) and 0 <= error < 1)
        require("verify_limit", error, allowed, "a number from 0 to less than 1, such as 0.02")
        level = self.log_level
        require("log_level", level, level is None or level in LOG_LEVELS, "debug, info, warning or error")
        _require_path(option_name("tune"), self.tune)
        folder = self.timeline
        require("timeline", folder, folder is None or (isinstance(folder, str) and folder.strip() != ""), "a folder")
        kept = self.timeline_passes
        require("timeline_passes", kept, type(kept) is int and 1 <= kept <= MOST_PASSES, f"1 to {MOST_PASSES}")
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
    def effective_mode(self) -> int:
        """0, 1 or 2: what -1 comes to."""
        if self.mode != -1:
            return self.mode
        asks = self.fused or self.num_chunks > 1 or self.plan or self.tune or self.auto or self.deterministic
        return 2 if asks else 0

    @property
    def enabled(self) -> bool:
        """Whether any layer is to be replaced."""
        return self.effective_mode != 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values under the names a configuration file uses."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["customized_coc"] = {
            str(list(key)): cut if isinstance(cut, int) else list(cut) for key, cut in self.customized_coc.items()
        }
        values["plan"] = self.plan and self.plan.digest
        return values


def option_name(field_name: str) -> str:
    """Name an option as the user would set it: the variable where there is one, else the key."""
    return VARIABLES.get(field_name, field_name)


def _require_path(option: str, value: object) -> None:
    require(option, value, value is None or (isinstance(value, str) and value.endswith(".json")), "a path to a .json")
