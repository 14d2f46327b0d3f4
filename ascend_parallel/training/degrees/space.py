"""The degrees that a search may choose, and the tables of a strategy that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ascend_parallel.sharding.planner.shared_sequences import check_exchange
from ascend_parallel.training.degrees.work import NONE, RECOMPUTE, TENSOR, recompute_of
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.tuning.step_time.rank_bytes import ZERO_STAGES
from ascend_parallel.tuning.step_time.schedule import SPLIT, check

DATA = "dp"
EXPERTS = "ep"
SEQUENCE = "cp"
# Sequences of so many tokens are cut by ranks of their own, in so many parts, if a search is not told otherwise. The
# plan of the tp ranks may cut shorter ones, too.
LONG, PARTS = 32768, (1, 2, 4, 8, 16)
# Schedules with their stages on each group of ranks.
SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """One choice of degrees.

    ep
        Ranks of a replica that share each layer's experts; they share the batch, too. 1: a rank holds all experts.
    cp
        Ranks of a replica that share each sequence (`Strategy.sequence_dim`).
    cp_exchange, cp_groups
        How attention brings a sequence together, "heads" or "gather", and in how many groups; "" and 0: the search of
        layouts chooses by price.
    rows
        Rows of the batch (sequences) of one replica's micro-batch.
    recompute
        "none", "layers" (results of collectives are kept) or "layers+collectives".
    recompute_layers
        For each rank of the pipeline, the layers that are recomputed of each of its stages, the first ones; (): all.
    """

    dp: int
    tp: int
    pp: int
    rows: int
    micro_batches: int
    ep: int = 1
    cp: int = 1
    cp_exchange: str = ""
    cp_groups: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = NONE
    zero_stage: int = 0
    recompute_layers: tuple[int, ...] = ()

    @property
    def replica(self) -> int:
        """The ranks of a stage of one replica."""
        return self.ep * self.cp * self.tp

    @property
    def stages(self) -> int:
        """The number of pipeline stages, on all groups of ranks."""
        return self.pp * self.virtual_stages

    def tables(self, layers: Sequence[str], hardware: str, amp: str | None) -> dict[str, Any]:
        """Return the tables of a strategy (`Strategy.from_dict`); `layers`: patterns of the layers to recompute."""
        mesh = {DATA: self.dp, TENSOR: self.tp}
        tables: dict[str, Any] = {"mode": "auto", "hardware": hardware, "mesh": mesh}
        if self.ep > 1:
            tables |= {"mesh": {DATA: self.dp, EXPERTS: self.ep, TENSOR: self.tp}, "expert_dim": EXPERTS}
        if self.cp > 1:
            tables |= {"mesh": {DATA: self.dp, SEQUENCE: self.cp, TENSOR: self.tp}, "sequence_dim": SEQUENCE}
            tables |= {"sequence_exchange": self.cp_exchange} if self.cp_exchange else {}
            tables |= {"sequence_groups": self.cp_groups} if self.cp_groups else {}
        pipeline: dict[str, Any] = {"micro_batches": self.micro_batches}
        if self.pp > 1:
            pipeline |= {"degree": self.pp, "schedule": self.schedule, "virtual_stages": self.virtual_stages}
        tables["pipeline"] = pipeline
        if self.recompute != NONE:
            option = recompute_of(self.recompute, layers)
            tables["recompute"] = {"modules": list(option.modules), "collectives": option.collectives}
        if self.zero_stage:
            tables["sharding"] = {"zero_stage": self.zero_stage, "dim": DATA}
        if amp is not None:
            tables["amp"] = {"dtype": amp}
        if self.overlap_refused:
            tables["overlap"] = {"operators": False}
        return tables

    @property
    def overlap_refused(self) -> bool:
        """Whether the schedule refuses overlapped operators (docs/pipeline.md)."""
        return self.pp > 1 and self.schedule in SPLIT

    @property
    def sums_under_backward(self) -> bool:
        """Whether gradients are summed under the last backward (runners/graph_runner.py): not in a pipeline."""
        return self.pp == 1 and self.zero_stage <= 1

    def __str__(self) -> str:
        """Return the degrees in words."""
        pipeline = f", {self.schedule_words}" if self.pp > 1 else ""
        experts = "".join(f" x {name} {size}" for name, size in (("ep", self.ep), ("cp", self.cp)) if size > 1)
        experts += f" ({self.exchange_words})" if self.exchange_words else ""
        batches = "micro-batches" if self.micro_batches > 1 else "micro-batch"
        return (
            f"dp {self.dp}{experts} x tp {self.tp} x pp {self.pp}, {self.micro_batches} {batches} of {self.rows}"
            f"{pipeline}, recompute {self.recompute_words}, ZeRO {self.zero_stage}"
        )

    @property
    def exchange_words(self) -> str:
        """How ranks share sequences, if it is chosen: "heads, 4 groups"."""
        groups = f", {self.cp_groups} groups" if self.cp_groups > 1 else ""
        return f"{self.cp_exchange}{groups}" if self.cp > 1 and self.cp_exchange else ""

    @property
    def schedule_words(self) -> str:
        """The schedule, with the stages of each rank if there are several."""
        return self.schedule + (f" x{self.virtual_stages}" if self.virtual_stages > 1 else "")

    @property
    def recompute_words(self) -> str:
        """What is recomputed, with the number of layers if not all."""
        if not self.recompute_layers:
            return self.recompute
        fewest, most = min(self.recompute_layers), max(self.recompute_layers)
        if most == 0:
            return f"{self.recompute}: those that two stages share"
        counts = f"{fewest}-{most}" if fewest < most else f"{most}"
        return f"{self.recompute}: {counts} a stage"


Mesh = tuple[int, int, int, int, int]
"""dp, ep, cp, tp, pp."""


def meshes(
    ranks: int, rows: int, most_stages: int, experts: Sequence[int] = (1,), parts: Sequence[int] = (1,)
) -> list[Mesh]:
    """Return all (dp, ep, cp, tp, pp) of `ranks` ranks whose dp x ep divides the batch's rows.

    experts, parts: the values of ep and cp, of which one is 1; at most `most_stages` stages.
    """
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    found = []
    for dp, ep, cp, tp in product(divisors, experts, parts, divisors):
        pp, rest = divmod(ranks, dp * ep * cp * tp)
        if not rest and rows % (dp * ep) == 0 and pp <= most_stages and 1 in (ep, cp):
            found.append((dp, ep, cp, tp, pp))
    return found


def expert_degrees(ranks: int, experts: int, given: int | None) -> tuple[int, ...]:
    """Return the values of ep to try: the divisors of the ranks and of the experts, or the given one.

    Raises `StrategyOptionError` for a given degree that does not divide both. `experts` is 0 for a model without any.
    """
    allowed = tuple(number for number in range(1, max(ranks, 1) + 1) if ranks % number == experts % number == 0)
    if not experts:
        allowed = (1,)
    if given is not None and given not in allowed:
        raise StrategyOptionError(
            f"ep={given}: {ranks} ranks, and layers with {experts} experts (mixture_of_experts); give one of "
            f"{', '.join(map(str, allowed))}"
        )
    return allowed if given is None else (given,)


def sequence_degrees(ranks: int, length: int, given: int | None) -> tuple[int, ...]:
    """Return the values of cp to try for sequences of `length` tokens: several for long ones, or the given one.

    Raises `StrategyOptionError` for a given degree that does not divide the ranks and the length.
    """
    if given is not None and (ranks % given or length % given):
        raise StrategyOptionError(f"cp={given}: give a number that divides the {ranks} ranks and {length} tokens")
    if given is not None:
        return (given,)
    return tuple(cp for cp in PARTS if ranks % cp == length % cp == 0) if length >= LONG else (1,)


def sharing_given(cp: int | None, exchange: str | None, groups: int | None) -> tuple[str, int]:
    """Return `Degrees.cp_exchange` and `cp_groups` as they are given.

    Raises `StrategyOptionError` for values that are not allowed, and for either with a `cp` of 1.
    """
    try:
        check_exchange(exchange, groups, shared=cp != 1, option="cp")
    except ValueError as error:
        raise StrategyOptionError(str(error)) from error
    return exchange or "", groups or 0


def sizes(rows: int) -> list[int]:
    """Return the micro-batches' rows to try, ascending: powers of two that divide `rows`, and `rows` itself."""
    powers = [1 << power for power in range(rows.bit_length())]
    return sorted({size for size in powers if rows % size == 0} | {rows})


def choices(
    mesh: Mesh,
    rows: int,
    micro_batches: int,
    layers: Sequence[str],
    most_stages: int,
    sharing: tuple[str, int] = ("", 0),
) -> Iterator[Degrees]:
    """Yield the degrees of a mesh and micro-batch: schedules, recompute and ZeRO stages that go together.

    Left out: what the package refuses (recompute with schedules that split backward), what docs/optimizer-parallel.md
    advises against (stage 2 with a pipeline, which accumulates whole gradients; stage 3, whose gathers would run for
    each micro-batch of each stage), and stages of ZeRO without replicas. sharing: `Degrees.cp_exchange`, `cp_groups`.
    """
    dp, ep, cp, tp, pp = mesh
    schedules = SCHEDULES if pp > 1 else SCHEDULES[:1]
    for schedule, several in schedules:
        if pp > 1 and not _runs(schedule, pp, several, micro_batches, most_stages):
            continue
        kinds = RECOMPUTE if layers and not (pp > 1 and schedule in SPLIT) else (NONE,)
        for kind in kinds:
            for stage in ZERO_STAGES:
                if (stage and dp == 1) or (stage >= 2 and pp > 1):
                    continue
                yield Degrees(
                    dp=dp,
                    ep=ep,
                    cp=cp,
                    cp_exchange=sharing[0] if cp > 1 else "",
                    cp_groups=sharing[1] if cp > 1 else 0,
                    tp=tp,
                    pp=pp,
                    rows=rows,
                    micro_batches=micro_batches,
                    schedule=schedule,
                    virtual_stages=several,
                    recompute=kind,
                    zero_stage=stage,
                )


def _runs(schedule: str, pp: int, several: int, micro_batches: int, most_stages: int) -> bool:
    if pp * several > most_stages:
        return False
    try:
        check(schedule, pp, pp * several, micro_batches)
    except ValueError:
        return False
    return True
