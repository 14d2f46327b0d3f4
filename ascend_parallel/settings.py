"""The user's settings: a frozen, validated dataclass.

The published switches (MindSpeed, "Communication Over Computation") keep their names: the environment variables
COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and COC_MODE, and the keys of ``coc_cfgs``, which are keys of the TOML or JSON
file that COC_CONFIG names. environment.py reads both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar

from ascend_parallel.ops.arithmetic import ROWS_TOO, TP
from ascend_parallel.ops.settings import Bounds, ChunkPlan, OperatorSettings
from ascend_parallel.ops.shape_table import MAX_CHUNKS, SettingsError, ShapeTable, require, whole_number
from ascend_parallel_autoload import frameworks as known_frameworks

ORDERS = ("auto", "compute_first", "communicate_first")
MOST_PASSES = 1_000_000
RAREST = 999_999_999
COMPILED = ("auto", "original", "overlap")
FRAMEWORKS = tuple(framework.name for framework in known_frameworks.FRAMEWORKS)
LOG_LEVELS = ("debug", "info", "warning", "error")

# Field of Settings -> environment variable that sets it.
VARIABLES = {
    "num_chunks": "COC_PARALLEL_NUM",
    "fused": "USE_COC_FUSED_KERNEL",
    "mode": "COC_MODE",
    "deterministic": "COC_DETERMINISTIC",
    "strict": "COC_STRICT",
    "time_limit": "COC_TIME_LIMIT",
    "chunk_rows": "COC_CHUNK_ROWS",
    "plan": "COC_PLAN",
    "tune": "COC_TUNE",
    "timeline": "COC_TIMELINE",
    "digests": "COC_DIGESTS",
    "verify_every": "COC_VERIFY",
    "take_over": "COC_TAKE_OVER",
    "region": "COC_REGION",
    "compiled": "COC_COMPILE",
    "frameworks": "COC_FRAMEWORKS",
    "split_weight_gradient": "COC_SPLIT_WEIGHT_GRADIENT",
    "log_level": "COC_LOG_LEVEL",
    "hccl_buffsize": "HCCL_BUFFSIZE",
}
# Fields that affect no computation, so ranks may differ in them.
PER_RANK = ("log_level",)
CONFIG_VARIABLE = "COC_CONFIG"
KNOWN_VARIABLES = (*VARIABLES.values(), CONFIG_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class Settings(OperatorSettings):
    """All user settings: of the operators, of the layers, of timelines, checks and logs.

    The same on every rank of a group, except ``log_level``. Fields beyond those of `OperatorSettings`:

    enable_coc_in_column_backward
        Use fused operators in the column layer's backward too; no effect without ``fused``.
    recompute_all_gather
        Gather the column layer's input again in backward instead of keeping the gathered copy.
    order
        The first of two independent steps in the sequence-parallel backward of a column layer: the
        input gradient ("compute_first") or the gather of the input ("communicate_first"). "auto" is
        "communicate_first".
    split_weight_gradient
        Sum the row layer's weight gradient chunk by chunk under the gather of its sequence-parallel backward, in fp32:
        its bits depend on the chunks. COC_SPLIT_WEIGHT_GRADIENT.
    timeline
        Folder to which every rank writes the times of its matmuls and collectives. COC_TIMELINE.
    timeline_passes
        The number of last forwards and backwards of layers that each rank keeps for the timeline.
    digests
        Folder to which every rank writes digests of what its layers compute, for runs at several degrees. COC_DIGESTS.
    verify_every
        Check the first call of each patched layer, then every N-th call, against Megatron-core's
        own forward and backward; 0: no checks. COC_VERIFY.
    verify_limit
        Largest error of a check, relative to the largest magnitude; None: 2e-2 in 16 bits, else 1e-6.
    take_over
        Take the place of MindSpeed's CoC, with MindSpeed's arguments. COC_TAKE_OVER.
    region
        True: the rows of a layer's collectives stay on their way past the layer, until something reads them. "auto":
        where a training's first passes run faster so. None: in vLLM's prefill alone, which has no backward. COC_REGION.
    region_rows
        The least number of rows of a region's chunks, on average: splitting few rows costs more than it hides.
    compiled
        What runs in programs of torch.compile: "original": the framework's own layer, compiled; "overlap": the
        overlapped layer between two graphs. "auto": "overlap" where the framework's own layer breaks the graph too
        (Megatron-core), else "original". COC_COMPILE.
    frameworks
        The frameworks whose layers are patched; one that does not fit is an error. None: all that fit and are imported.
        COC_FRAMEWORKS.
    log_level
        Level of the logger "ascend_parallel"; None: unchanged, which shows warnings. COC_LOG_LEVEL.

    Source of names and meaning: MindSpeed, communication-over-computation.md.
    """

    NUMBERS: ClassVar[Mapping[str, Bounds]] = {
        **OperatorSettings.NUMBERS,
        "timeline_passes": (1, MOST_PASSES, f"1 to {MOST_PASSES}"),
        "verify_every": (0, RAREST, f"0 (off) or a whole number of calls from 1 to {RAREST}"),
        "region_rows": (1, inf, "a whole number of rows, 1 or more"),
    }

    enable_coc_in_column_backward: bool = False
    recompute_all_gather: bool = True
    order: str = "auto"
    split_weight_gradient: bool = False
    timeline: str | None = None
    timeline_passes: int = 4096
    digests: str | None = None
    verify_every: int = 0
    verify_limit: float | None = None
    take_over: bool = False
    region: bool | str | None = None
    region_rows: int = 64
    compiled: str = "auto"
    frameworks: tuple[str, ...] | None = None
    log_level: str | None = None

    def __post_init__(self) -> None:
        """Raise `SettingsError` for a value that is not allowed."""
        super().__post_init__()
        if self.split_weight_gradient and self.deterministic:
            raise SettingsError(
                f"COC_SPLIT_WEIGHT_GRADIENT=1 is not allowed with {self.arithmetic.asked}: the bits of a split "
                "weight gradient depend on the chunks; set one of the two to 0"
            )
        if self.arithmetic.forms_every_product and (self.region or self.mode == 0):
            other = "COC_MODE=0" if self.mode == 0 else f"COC_REGION={'1' if self.region is True else self.region}"
            raise SettingsError(
                f"{other} is not allowed with {self.arithmetic.asked}, whose bits only this package's own linear "
                "layers have, one by one: unset one of the two"
            )
        allowed = self.region is None or isinstance(self.region, bool) or self.region == "auto"
        require("region", self.region, allowed, 'true, false or "auto"')
        named = self.frameworks
        known = named is None or (isinstance(named, tuple) and named and all(name in FRAMEWORKS for name in named))
        require("frameworks", named, bool(known), f"one or more of {', '.join(FRAMEWORKS)}")
        require("compiled", self.compiled, self.compiled in COMPILED, "one of " + ", ".join(COMPILED))
        require("order", self.order, self.order in ORDERS, "one of " + ", ".join(ORDERS))
        error = self.verify_limit
        allowed = error is None or (type(error) in (int, float) and 0 <= error < 1)
        require("verify_limit", error, allowed, "a number from 0 to less than 1, such as 0.02")
        level = self.log_level
        require("log_level", level, level is None or level in LOG_LEVELS, "debug, info, warning or error")
        for name, folder in (("timeline", self.timeline), ("digests", self.digests)):
            require(name, folder, folder is None or (isinstance(folder, str) and folder.strip() != ""), "a folder")

    __hash__ = OperatorSettings.__hash__

    @property
    def tunes(self) -> bool:
        """Whether the chunks of matmuls are measured in the run: COC_TUNE or COC_PARALLEL_NUM=auto, in force."""
        return bool(self.tune or self.auto) and not self.fused and self.effective_mode == 2

    def compiles_original(self, *, breaks_graphs: bool) -> bool:
        """Tell whether torch.compile compiles a framework's own layers; breaks_graphs: these break its graph."""
        return self.compiled == "original" or (self.compiled == "auto" and not breaks_graphs)

    @cached_property
    def for_operators(self) -> OperatorSettings:
        """The fields of `OperatorSettings`."""
        names = [f.name for f in dataclasses.fields(OperatorSettings)]
        return OperatorSettings(**{name: getattr(self, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by the keys of a configuration file."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["customized_coc"] = {
            str(list(key)): cut if isinstance(cut, int) else list(cut) for key, cut in self.customized_coc.items()
        }
        values["frameworks"] = self.frameworks and list(self.frameworks)
        values["stream_limit"] = self.stream_limit and list(self.stream_limit)
        values["plan"] = self.plan and self.plan.digest
        return values

    def shared(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks of a group, by the user's names."""
        own = PER_RANK if self.fused else (*PER_RANK, "hccl_buffsize")  # which only fused operators depend on
        return {option_name(name): value for name, value in self.as_dict().items() if name not in own}


def option_name(field_name: str) -> str:
    """Return the user's name of an option: its environment variable, or else its key."""
    return VARIABLES.get(field_name, field_name)


class _Current:
    """The settings in force in this process: `patch_control` sets them."""

    settings = Settings()


def put_in_force(settings: Settings) -> None:
    """Make `settings` the default of this process."""
    _Current.settings = settings


def current_settings() -> Settings:
    """Return the settings in force: a public function reads them if its caller gives none, and passes them on."""
    return _Current.settings


__all__ = [
    "MAX_CHUNKS",
    "ROWS_TOO",
    "TP",
    "ChunkPlan",
    "Settings",
    "SettingsError",
    "ShapeTable",
    "option_name",
    "require",
    "whole_number",
]
