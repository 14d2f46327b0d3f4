"""A plan file: the fastest measured chunk sizes of each matmul.

A plan belongs to one kind of machine, one version of torch and one number of ranks. Reading refuses the whole file if
it is unreadable, has another schema or has one bad entry. A group's first use refuses a plan of another machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, EXPERT_EXCHANGE, OPERATORS, PART_NAMES, Call
from ascend_parallel.ops.decision import Reason, because
from ascend_parallel.ops.rows import ROW_TILE, Sizes, is_one_gather
from ascend_parallel.settings import MAX_CHUNKS, SettingsError
from ascend_parallel.text import dtype_name, file_text, replace_text, shown

SCHEMA = 1
PASSES = ("forward", "backward")

Key = tuple[str, str, int, int, int, str]


class PlanError(SettingsError):
    """A refused plan; the message names the file, the problem and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a plan was measured on; equal on every rank."""

    hardware: str
    torch: str
    backend: str
    threads: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fastest measured chunk sizes of one operator in one pass of a layer, or groups of an exchange around parts.

    m, k, n
        The `shape` of a `Matmul`, or of an `Exchange`.
    sizes
        Rows of each chunk; a single size means that one chunk was fastest, 0 and all rows (`one_gather`) that a gather
        under the product of a rank's own rows was. Of an expert_exchange: experts of each group; a single size means
        that the framework's own layer was fastest. Of a head_exchange or a key_gather: heads of each group.
    serial, chosen
        Median seconds of the pass on the slowest rank, with one chunk and with `sizes`. Of an exchange, whose
        run is "forward": of forward and backward. In vLLM of a whole step, in which all row layers are cut alike.
    """

    run: str
    operator: str
    m: int
    k: int
    n: int
    dtype: str
    sizes: Sizes
    serial: float
    chosen: float

    @classmethod
    def of(cls, run: str, call: Call, sizes: Sizes, serial: float, chosen: float) -> Entry:
        """Make the entry of a call in the pass `run`; that of an exchange is "forward"."""
        shape, dtype = dict(zip("mkn", call.shape, strict=True)), dtype_name(call.dtype)
        return cls(run=run, operator=call.operator, **shape, dtype=dtype, sizes=sizes, serial=serial, chosen=chosen)

    @property
    def key(self) -> Key:
        """The key of `Plan.find`: pass, operator, matmul and dtype."""
        return self.run, self.operator, self.m, self.k, self.n, self.dtype

    @property
    def reason(self) -> Reason:
        """Why a call runs in these sizes."""
        count, gain = len(self.sizes), 100 * (1 - self.chosen / self.serial)
        if self.operator in PART_NAMES:
            in_turn = in_turn_of(self.operator)
            if count == 1:
                return because("plan_one_group", in_turn=in_turn)
            return because("plan_groups", chunks=count, gain=gain, in_turn=in_turn)
        if count == 1:
            return because("plan_whole", rows=self.sizes[0])
        if is_one_gather(self.sizes):
            return because("plan_one_gather", gain=gain)
        return because("plan_chunks", chunks=count, gain=gain)


@dataclass(frozen=True)
class Plan:
    """Entries measured on one kind of machine; a hashable value.

    run: the pass that `find` looks up, "forward" or "backward".
    """

    machine: Machine
    entries: tuple[Entry, ...] = ()
    run: str = field(default="forward", compare=True)

    def find(self, call: Call) -> tuple[Sizes, Reason] | None:
        """Return the chunk sizes for `call` and the reason, or None if it was not measured.

        Raises `PlanError` if the group has another number of ranks than the plan.
        """
        if call.ranks != self.machine.ranks:
            raise PlanError(
                f"the plan was measured on {self.machine.ranks} ranks and does not fit a group of {call.ranks}: "
                "measure a plan for this group with COC_TUNE, or unset COC_PLAN"
            )
        entry = self.entry_of(self.run, call)
        if entry is None or sum(entry.sizes) != call.cut:
            return None
        return entry.sizes, entry.reason

    def entry_of(self, run: str, call: Call) -> Entry | None:
        """Return the entry of a call in a pass, or None."""
        return self._by_key.get((run, call.operator, *call.shape, dtype_name(call.dtype)))

    def __hash__(self) -> int:
        """Return the cached hash: every call of a layer looks up settings that hold a plan."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.machine, self.entries, self.run))

    def __getstate__(self) -> dict[str, Any]:
        """Leave cached values out: hashes of strings differ between processes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def of(self, run: str) -> Plan:
        """Return the same plan for the pass "forward" or "backward"."""
        return self if run == self.run else self._other

    @cached_property
    def _other(self) -> Plan:
        """The same plan for the other pass: each backward asks."""
        (other,) = (run for run in PASSES if run != self.run)
        return Plan(self.machine, self.entries, other)

    def with_entries(self, entries: tuple[Entry, ...]) -> Plan:
        """Return a plan with `entries` added; each replaces an older entry of the same key."""
        merged = {entry.key: entry for entry in (*self.entries, *entries)}
        return Plan(self.machine, tuple(merged.values()), self.run)

    @cached_property
    def _by_key(self) -> dict[Key, Entry]:
        return {entry.key: entry for entry in self.entries}

    @cached_property
    def digest(self) -> str:
        """Return a short text that is equal on two ranks if their plans are equal."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of a plan file."""
        entries = [{**asdict(entry), "sizes": list(entry.sizes)} for entry in self.entries]
        return {"schema": SCHEMA, "machine": asdict(self.machine), "entries": entries}

    def save(self, path: Path) -> None:
        """Write the file atomically: a reader sees the old file or the new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(self.as_dict(), indent=1), durable=True)


@dataclass(frozen=True)
class UnreadPlan:
    """In place of a plan that this rank could not read: ranks compare `digest`, and then every one of them raises.

    A rank that raised alone, where it reads its settings, would leave the others to a lost connection.
    """

    reason: str

    @property
    def digest(self) -> str:
        """Return the reason, which ranks compare in place of a plan's content."""
        return f"not read ({self.reason})"

    def find(self, call: Call) -> None:
        """Raise `PlanError` with the reason: there are no chunk sizes."""
        raise PlanError(self.reason)

    def of(self, run: str) -> UnreadPlan:
        """Return the same for the other pass."""
        return self


def this_machine(ranks: int, device: torch.device, backend: str) -> Machine:
    """Describe the machine this process runs on, for a group of `ranks` over `backend`."""
    return Machine(
        hardware=_hardware(device),
        torch=torch.__version__,
        backend=backend,
        threads=torch.get_num_threads(),
        ranks=ranks,
    )


def cached_plan(machine: Machine) -> Path:
    """Return the path of the cached plan of a kind of machine, for COC_PARALLEL_NUM=auto."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "ascend_parallel" / "plans" / f"{Plan(machine).digest}.json"


def load_plan(name: str, variable: str = "COC_PLAN") -> Plan:
    """Read a plan file; raises `PlanError` if it is unreadable or invalid."""
    try:
        raw = json.loads(file_text(Path(name)))
    except OSError as error:
        raise PlanError(f"{variable}={name!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{variable}={name!r} is no plan: not valid JSON: {error}") from error
    try:
        return read_plan(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{variable}={name!r} is no plan that can be used: {_words(error)}; measure a new one with COC_TUNE"
        ) from error


def in_turn_of(operator: str) -> str:
    """Return in words what an exchange without groups is."""
    return "the framework's own layer" if operator == EXPERT_EXCHANGE else "the exchange of all heads"


def differences(plan: Plan, here: Machine) -> list[str]:
    """Return, in words, each difference between the plan's machine and `here`."""
    pairs = ((f.name, getattr(plan.machine, f.name), getattr(here, f.name)) for f in fields(Machine))
    return [f"{name} is {now!r} here and was {then!r}" for name, then, now in pairs if then != now]


def read_plan(raw: Any) -> Plan:
    """Return the plan of a dict from `Plan.as_dict`; raises `ValueError`, `KeyError` or `TypeError` otherwise."""
    if not isinstance(raw, Mapping) or "schema" not in raw:
        raise ValueError("it has no schema")
    if raw["schema"] != SCHEMA:
        raise ValueError(f"its schema is {raw['schema']!r}, and this version reads {SCHEMA}")
    machine = Machine(**raw["machine"])
    for f in fields(Machine):
        required = int if f.name in ("threads", "ranks") else str
        value = getattr(machine, f.name)
        if type(value) is not required or (isinstance(value, int) and value < 1):
            raise ValueError(f"machine.{f.name} is {shown(value)}")
    return Plan(machine, tuple(_entry(index, entry, machine.ranks) for index, entry in enumerate(raw["entries"])))


def _entry(index: int, raw: Mapping[str, Any], ranks: int) -> Entry:
    entry = Entry(**{**raw, "sizes": tuple(raw["sizes"])})
    sizes = entry.sizes[1:] if entry.operator == ALL_GATHER and is_one_gather(entry.sizes) else entry.sizes
    positive = all(type(value) is int and value > 0 for value in (entry.m, entry.k, entry.n, *sizes))
    timed = all(isinstance(value, float) and 0 < value < math.inf for value in (entry.serial, entry.chosen))
    exchange = entry.operator in PART_NAMES
    tile = 1 if exchange else ROW_TILE
    cut = len(entry.sizes) in range(1, MAX_CHUNKS + 1) and all(size % tile == 0 for size in entry.sizes[:-1])
    known = entry.operator in OPERATORS and entry.run in PASSES and isinstance(entry.dtype, str)
    fits = entry.operator != EXPERT_EXCHANGE or entry.k == entry.n
    known = known or (exchange and entry.run == "forward" and fits and isinstance(entry.dtype, str))
    shared = 1 if exchange or entry.operator == ALL_REDUCE else ranks
    if not (known and positive and timed and cut and sum(entry.sizes) * shared == entry.m):
        raise ValueError(f"entry {index} is {shown(dict(raw))}")
    return entry


def _words(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _hardware(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{_cpu()}, {len(os.sched_getaffinity(0))} cores"
    return str(getattr(torch, device.type).get_device_name(device))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith(("model name", "CPU part")):
            return f"{platform.machine()} {line.partition(':')[2].strip()}"
    return platform.machine()
