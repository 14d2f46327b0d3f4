"""How a call runs, decided once: its kernel and sizes, and the reasons, each with a code and a sentence.

Operators take a `Decision` and nothing else that says how to cut. The user's settings, what is `Known` beside them, and
the call itself decide (ops/registry.py); then, if need be, the bits on the ranks' machines (ops/bits.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ascend_parallel.ops.arithmetic import Arithmetic, arithmetic_of
from ascend_parallel.ops.call import Call
from ascend_parallel.ops.rows import ROW_TILE, Sizes

# Code of a reason -> its sentence. Programs and tests read the code, people the sentence.
SENTENCES = {
    # What decided the sizes first.
    "one_rank": "one rank: nothing to communicate",
    "mode": "COC_MODE={mode}: no chunks",
    "fused": "USE_COC_FUSED_KERNEL=1",
    "experts_not_fused": "USE_COC_FUSED_KERNEL=1, but {refused}: the framework's own experts run",
    "experts_few_bytes": "a rank sends or gets fewer than {least} bytes or more than {most} rows: the framework's own "
    "experts run",
    "fused_projection": "USE_COC_FUSED_KERNEL=1: one operator runs the way back of all heads and their projection "
    "(COC_PARALLEL_NUM=2 or more hides more, where ranks have several heads of keys)",
    "fused_forward": "forward alone, because {refusal}",
    "groups_hide_more": "USE_COC_FUSED_KERNEL=1, but {groups} groups hide more than one operator around the projection",
    "not_fused": "USE_COC_FUSED_KERNEL=1, but {refused}: {chunks} chunks instead",
    "sizes_of_shape": "customized_coc: {sizes} rows for {shape}",
    "count_of_shape": "customized_coc: {chunks} chunks for {shape}",
    "number": "COC_PARALLEL_NUM={chunks}",
    "count": "{chunks} {pieces}",
    "unmeasured": "one chunk, until a layer's first call is measured (COC_TUNE, COC_PARALLEL_NUM=auto)",
    "unplanned": "the plan (COC_PLAN, or measured so far) has no entry for this call: COC_PARALLEL_NUM={chunks}",
    "plan_whole": "plan: kept whole (one chunk of {rows} rows), because no cut of it won",
    "plan_one_group": "plan: one group, because {in_turn} was as fast",
    "plan_one_gather": "plan: one gather, under the product of a rank's own rows, {gain:.0f}% faster",
    "plan_chunks": "plan: {chunks} chunks, {gain:.0f}% faster than one",
    "plan_groups": "plan: {chunks} groups, {gain:.0f}% faster than {in_turn}",
    "module": "the module multiplies, in chunks of its own",
    "embedding": "the sum behind an embedding",
    # What is known beside the user's settings.
    "measured": "measured",
    "in_steps": "timed in whole steps",
    "as_fast": "the framework's own layer is as fast",
    "tried": "tried",
    "planned": "the plan",
    "unlike_slices": "ranks with unlike slices measure nothing",
    "in_request": "nothing is measured inside a request",
    "column_backward": "a column layer's backward is fused with enable_coc_in_column_backward alone",
    "rows_left": "its rows stay unfinished, so they are cut although the plan keeps them whole",
    # What then changed the sizes, or the kernel.
    "narrow": "1, because a collective of {features} features is too narrow to gain (customized_coc cuts it)",
    "unfilled": "{chunks}, because the matmuls of smaller chunks do not fill the device (customized_coc cuts them)",
    "few_rows": "{cut} {unit} allow {chunks} (multiples of {tile} {unit}{asked})",
    "few_parts": "{parts} {what} allow {groups} groups",
    "int8_sum": "1, because communication in int8 is not cut",
    "int8_columns": "1, because {asked} and chunks of columns could change bits",
    "tiles": "cut at multiples of {tile} rows, because {asked}",
    "own_rows": "one gather, under the product of a rank's own rows: half of all",
    "arithmetic": "{asked}, and {kernel}: {refusal}",
    "bits_fewer": "{chunks} chunks, because smaller ones change the matmul's bits on this machine",
    "bits_change": "{what} the matmul's bits on this machine",
}


class Reason(NamedTuple):
    """A reason: its code, a key of `SENTENCES`, and its sentence."""

    code: str
    text: str


def because(code: str, **facts: Any) -> Reason:
    """Return the reason of a code, with the facts that its sentence names."""
    return Reason(code, SENTENCES[code].format(**facts))


class SizesOf(Protocol):
    """Knows sizes of calls: a plan, or a trial; hashable."""

    def find(self, call: Any) -> tuple[Sizes, Reason] | None:
        """Return the sizes of a call, and the reason; None: they are not known."""

    def of(self, run: str) -> SizesOf:
        """Return the same of the pass "forward" or "backward"."""


class Known(NamedTuple):
    """What decides how calls are cut beside what the user said; the same on every rank.

    plan
        Sizes by call: of a file, or as measured in the run. Overrides the user's number of chunks, not customized_coc.
    number
        A number of chunks, or of groups, for every call: in place of COC_PARALLEL_NUM; 0: none.
    because
        Why something else than the user's settings decides; None: nothing does.
    original
        Whether the framework's own layer runs: it was measured to be as fast.
    alone
        Whether nothing of the user's counts: neither customized_coc, nor fused kernels, nor COC_MODE.
    deterministic
        In place of the setting of this name; None: that counts.
    equal
        Whether a list of sizes in customized_coc stands for as many equal chunks: calls are priced that may never come.
    """

    plan: SizesOf | None = None
    number: int = 0
    because: Reason | None = None
    original: bool = False
    alone: bool = False
    deterministic: bool | str | None = None
    equal: bool = False

    def arithmetic(self, settings: Any) -> Arithmetic:
        """Return how products are formed and sums taken, for settings whose `deterministic` may not count."""
        asked: Arithmetic = settings.arithmetic
        return asked if self.deterministic is None else arithmetic_of(self.deterministic)


NOTHING = Known()


@dataclass
class OfGroup:
    """What is decided on a process group: once for each call, and kept for later ones.

    decisions
        By the operands and all else that a decision depends on.
    bits
        By what the ranks' machines were asked (ops/bits.py): the agreed answer.
    """

    decisions: dict[Hashable, Decision] = field(default_factory=dict)
    bits: dict[Any, int] = field(default_factory=dict)


OF_GROUPS: WeakKeyDictionary[dist.ProcessGroup, OfGroup] = WeakKeyDictionary()
# A group's decisions to keep: shapes can vary without end.
MOST_DECIDED = 4096


def of_group(group: dist.ProcessGroup) -> OfGroup:
    """Return the decisions on a group."""
    found = OF_GROUPS.get(group)
    if found is None:
        found = OF_GROUPS[group] = OfGroup()
    return found


@dataclass(frozen=True)
class Decision:
    """How a call runs.

    sizes
        Rows of each chunk; columns for an int8 weight; the parts of each group for an exchange.
    exact
        Whether the result has the bits of the plain layer (a whole matmul and a single collective); None if the first
        call has to probe the machines (ops/bits.py).
    reasons
        Why: what decided the sizes, then what changed them.
    unmet
        Why the user's request is not met; empty if it is.
    given
        Whether the user or a plan gave the sizes; given sizes never change.
    options
        Keyword arguments for the kernel.
    step
        Sizes that are not given are multiples of it, but for the last.
    alignment
        How the operands are aligned to rows of 512 bytes (ops/multiply.py); empty: they are taken as they are.
    original
        Whether the framework's own layer runs.
    """

    call: Call
    kernel: str
    sizes: Sizes
    exact: bool | None
    reasons: tuple[Reason, ...]
    unmet: str = ""
    given: bool = False
    options: tuple[tuple[str, object], ...] = ()
    step: int = ROW_TILE
    alignment: str = ""
    original: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all reasons."""
        return tuple(reason.code for reason in self.reasons)

    @property
    def code(self) -> str:
        """The code of the last reason: what settled the sizes."""
        return self.reasons[-1].code

    @property
    def reason(self) -> str:
        """The reasons in words."""
        return "; ".join(reason.text for reason in self.reasons)
