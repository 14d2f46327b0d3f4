"""The settings that choose a kernel and its chunks: a frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Protocol

from ascend_parallel.ops.arithmetic import ROWS_TOO, TP, Arithmetic, arithmetic_of
from ascend_parallel.ops.call import FUSED_RANKS, HCCL_BUFFSIZE
from ascend_parallel.ops.decision import SizesOf
from ascend_parallel.ops.rows import ROW_TILE
from ascend_parallel.ops.shape_table import Cut, SettingsError, Shape, ShapeTable, require, whole_number
from ascend_parallel.ops.soc import AIV_BUFFER

COMM_MODES = ("ai_cpu", "aiv", "ccu")

StreamLimit = tuple[int, int]
"""Cube and vector cores that a stream may take; `ALL_CORES`: as many of a kind as there are."""
ALL_CORES = -1

Bounds = tuple[float, float, str]
"""The smallest and the largest allowed value of a whole number, and what to give."""


class ChunkPlan(SizesOf, Protocol):
    """Measured chunk sizes; `ascend_parallel.tuning.measured.chunk_plan.Plan` implements it."""

    @property
    def digest(self) -> str:
        """A short text, equal for equal plans."""

    def of(self, run: str) -> ChunkPlan:
        """Return the plan for "forward" or "backward"."""


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """The settings that choose an operator's kernel and chunks; the same on every rank of a group.

    num_chunks
        Number of chunks of a matmul next to a collective, 1 (off) to 64. COC_PARALLEL_NUM.
    fused
        Prefer a fused operator; overrides ``num_chunks``. USE_COC_FUSED_KERNEL.
    mode
        0: the original layers, and operators cut nothing. 1: this package's autograd functions without chunks, for
        debugging. 2: overlapped.
        -1: 2 if any setting requests overlap, else 0. COC_MODE.
    matmul_soc_friendly, k_min, k_max
        Align matmul operands to 512-byte rows on Ascend; padding pays where ``k_min <= K <= k_max``, in elements.
    customized_coc
        For a matmul shape ``(m, k, n)`` the number of chunks, or the rows of each chunk; m is the gathered M
        if the layer gathers. Overrides ``plan``, which overrides ``num_chunks``.
    plan
        Measured chunk sizes. COC_PLAN names their file.
    tune
        File for the measurements of this run. COC_TUNE.
    auto
        Take chunk sizes from earlier measurements on this machine, else from a model. COC_PARALLEL_NUM=auto.
    chunk_rows
        Without other sizes every cut is at a multiple of this many rows, so only a last chunk has fewer. Under 16 rows
        chunks may change bits; the probe then takes fewer chunks. COC_CHUNK_ROWS.
    deterministic
        True: multiply in tiles of rows, and sum over ranks in rank order and in fp32. The bits then depend neither on
        the run, nor on the number of chunks (1 included), nor on the kernel. "tp": multiply in blocks, and sum in one
        tree; the bits do not depend on the tensor-parallel degree either. "invariant": the same, and a row's bits do
        not depend on the rows beside it. COC_DETERMINISTIC.
    strict
        Raise an error instead of a warning if a call cannot meet a request (a fused operator, chunks). COC_STRICT.
    time_limit
        Seconds for which the shared-memory kernel waits for a rank. Collectives of a backend have their group's
        time limit instead. COC_TIME_LIMIT.
    comm_mode
        Engine that drives the communication of Ascend's fused operators: "ai_cpu", "aiv" (A2 and A3), "ccu" (950),
        or None for torch_npu's default. A call whose chip or torch_npu does not know the engine is not fused.
    fused_ranks
        Largest group on which Ascend's fused operators run: 8, or on request 16, on Ascend 950 also 32 and 64
        (docs/npu.md).
    hccl_buffsize
        Megabytes of HCCL's communication buffer, which "aiv" needs 200 of. HCCL_BUFFSIZE, a variable of HCCL.
    stream_limit
        The cube and vector cores that the stream of matmuls may take on Ascend A2 and A3, -1 for all of a kind, so that
        collectives on vector cores have the others; None: no limit, but measured chunks try some.

    Source of names and meaning: MindSpeed, communication-over-computation.md.
    """

    NUMBERS: ClassVar[Mapping[str, Bounds]] = {
        "mode": (-1, 2, "-1 (the other settings decide), 0 (original), 1 (no chunks) or 2 (overlapped)"),
        "k_min": (1, inf, "a whole number of elements, 1 or more"),
        "k_max": (1, inf, "a whole number of elements, 1 or more"),
        "chunk_rows": (1, 1_000_000, "whole rows from 1 to 1000000"),
        "time_limit": (1, 86400, "whole seconds from 1 to 86400"),
        "hccl_buffsize": (1, inf, "whole megabytes, 1 or more"),
    }

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
    chunk_rows: int = ROW_TILE
    deterministic: bool | str = False
    strict: bool = False
    time_limit: int = 300
    comm_mode: str | None = None
    fused_ranks: int = FUSED_RANKS[0]
    hccl_buffsize: int = HCCL_BUFFSIZE
    stream_limit: StreamLimit | None = None

    def __post_init__(self) -> None:
        """Raise `SettingsError` for a value that is not allowed."""
        whole_number("num_chunks", self.num_chunks)
        for name, value in ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self)):
            if name in self.switches():
                require(name, value, isinstance(value, bool), "true or false")
            elif name in self.NUMBERS:
                least, most, what = self.NUMBERS[name]
                require(name, value, type(value) is int and least <= value <= most, what)
        orders = isinstance(self.deterministic, bool) or self.deterministic in (TP, ROWS_TOO)
        require("deterministic", self.deterministic, orders, 'true, false, "tp" or "invariant"')
        allowed = self.comm_mode is None or self.comm_mode in COMM_MODES
        require("comm_mode", self.comm_mode, allowed, " or ".join(COMM_MODES))
        allowed = type(self.fused_ranks) is int and self.fused_ranks in FUSED_RANKS
        require("fused_ranks", self.fused_ranks, allowed, " or ".join(map(str, FUSED_RANKS)))
        limit = self.stream_limit
        allowed = limit is None or (
            isinstance(limit, tuple)
            and len(limit) == 2
            and all(type(cores) is int and (cores >= 1 or cores == ALL_CORES) for cores in limit)
            and limit != (ALL_CORES, ALL_CORES)
        )
        require("stream_limit", limit, allowed, "[cube cores, vector cores], each 1 or more, or one of them -1 (all)")
        if self.fused and self.comm_mode == "aiv" and self.hccl_buffsize < AIV_BUFFER:
            raise SettingsError(
                f"comm_mode='aiv' with HCCL_BUFFSIZE={self.hccl_buffsize} is not allowed: fused operators whose "
                f"communication runs on vector cores need a buffer of {AIV_BUFFER} MB; set HCCL_BUFFSIZE to "
                f"{AIV_BUFFER} or more, or unset one of the two"
            )
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

    @classmethod
    def switches(cls) -> tuple[str, ...]:
        """Return the fields that are true or false."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.type == "bool")

    def __hash__(self) -> int:
        """Return the hash of the fields, cached: every call of an operator looks it up."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the cached hash, which differs between processes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def for_operators(self) -> OperatorSettings:
        """The settings of the operators, without the fields of a derived class."""
        return self

    @cached_property
    def effective_mode(self) -> int:
        """The mode 0, 1 or 2; -1 is resolved."""
        if self.mode != -1:
            return self.mode
        overlap = self.fused or self.num_chunks > 1 or self.plan or self.tune or self.auto or self.deterministic
        return 2 if overlap else 0

    @property
    def cuts(self) -> bool:
        """Whether a matmul may be cut, or fused with its collective: COC_MODE=0 and 1 leave every one whole."""
        return self.mode not in (0, 1)

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """How products are formed and sums over ranks are taken, as `deterministic` asks for."""
        return arithmetic_of(self.deterministic)

    @property
    def insists(self) -> str:
        """The setting that makes an error of a layer that is left as it is, with its value; "": it runs as it is."""
        asked = self.arithmetic.asked
        return self.arithmetic.forbids(asked) or ("COC_STRICT=1" if self.strict else "")

    @cached_property
    def enabled(self) -> bool:
        """Whether layers are replaced."""
        return self.effective_mode != 0
