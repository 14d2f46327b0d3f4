"""Chunk sizes found while a run goes: measured on the shapes that occur, or predicted from a few measurements.

The first time a layer of some shape is called, all ranks of its group measure it together and keep what
was fastest, or one chunk if overlap loses. Every decision is made from numbers that all ranks have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.agreement import DisagreementError
from ascend_parallel.exchange import exchange
from ascend_parallel.layer_choices import Pass
from ascend_parallel.ops.pending import describe
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.planning.measure import Case, Layer, Times
from ascend_parallel.planning.parts import Parts, seconds
from ascend_parallel.planning.plan import (
    Entry,
    Machine,
    Plan,
    PlanError,
    cached_plan,
    differences,
    load_plan,
    this_machine,
)
from ascend_parallel.planning.search import Best, best_sizes
from ascend_parallel.settings import Settings

log = logging.getLogger("ascend_parallel")

COUNTS = (2, 4, 8)  # chunks tried first
ROUNDS = 7  # of every candidate
LEAST_GAIN = 0.02  # of the serial time: overlap has to win more than this, in the median of the rounds
MOST_CHUNKS = 16
FEW = 4  # chunks: what the model finds with no more of them is tried too, for it knows little of what a chunk costs


@dataclass(frozen=True)
class Found:
    """What was found for one pass: the sizes, and the median seconds of one chunk and of them."""

    sizes: Sizes
    serial: float
    chosen: float


class Tuner:
    """Finds chunk sizes for the layers of one process, and keeps them in a plan, group by group.

    With COC_TUNE what is not known yet is measured and kept in its file; with COC_PARALLEL_NUM=auto it is
    predicted from a few measurements of its parts and timed once beside one chunk; what `ascend-parallel
    tune` left in the cache is taken first.
    """

    def __init__(self, settings: Settings) -> None:
        """Measure and keep in the file that ``settings.tune`` names, or predict beside what the cache holds."""
        # In a layer the plan stands in for these three.
        self._settings = replace(settings, tune=None, auto=False, mode=settings.effective_mode)
        self._measure = settings.tune is not None
        self._file = settings.tune
        self._plans: WeakKeyDictionary[dist.ProcessGroup, Plan] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Case, bool], Settings]] = WeakKeyDictionary()

    def settings_for(
        self, case: Case, group: dist.ProcessGroup, *, backward: bool, agree: Callable[[], None] = lambda: None
    ) -> Settings:
        """Return settings whose plan has this layer's passes.

        The first call of a case communicates on `group`, after `agree`, unless none of its passes does.
        """
        known = self._known.setdefault(group, {})
        if (case, backward) not in known:
            passes = [one for one in case.passes(group.size()) if backward or one.run == "forward"]
            if not passes or not case.rows:
                return self._settings
            agree()
            _meet(group, f"{case}, {'with' if backward else 'without'} gradients")
            plan = self._plan(group, case.device)
            missing = [one for one in passes if not _has(plan, one, case)]
            if missing:
                plan = plan.with_entries(tuple(self._entry(case, one, group, plan.machine) for one in missing))
                self._plans[group] = plan
                if self._measure and group.rank() == 0:
                    self._save(plan)
            known[case, backward] = replace(self._settings, plan=plan)
        return known[case, backward]

    def _plan(self, group: dist.ProcessGroup, device: str) -> Plan:
        if group not in self._plans:
            self._plans[group] = self._agreed_start(group, device)
        return self._plans[group]

    def _agreed_start(self, group: dist.ProcessGroup, device: str) -> Plan:
        """Return the plan in the file as the group's first rank sees it, or an empty one; every rank alike."""
        backend: str = group._get_backend(torch.device(device)).name()
        here = this_machine(group.size(), torch.device(device), backend)
        said: list[Any] = [None]
        if group.rank() == 0:
            said = [self._read(here)]
        dist.broadcast_object_list(said, group=group, group_src=0)
        if isinstance(said[0], str):
            raise PlanError(said[0])
        plan: Plan = said[0]
        return plan

    def _read(self, here: Machine) -> Plan | str:
        """Return the plan of the file, an empty one if there is no file, or why the file is not taken."""
        variable = "COC_TUNE" if self._measure else "the cache of COC_PARALLEL_NUM=auto"
        try:
            path = self._path(here)
            path.stat()
            plan = load_plan(str(path), variable)
        except FileNotFoundError:
            return Plan(here)
        except (PlanError, OSError, RuntimeError) as error:  # told to the other ranks, who wait for it
            return f"{variable}: {error}"
        if different := differences(plan, here):
            return (
                f"{variable}={str(path)!r} was measured elsewhere: {'; '.join(different)}. "
                "Name another file, or remove this one"
            )
        return plan

    def _entry(self, case: Case, one: Pass, group: dist.ProcessGroup, machine: Machine) -> Entry:
        layer = Layer(case, group, self._settings, machine)
        parts = layer.parts(one, ROUNDS)
        found = measured(layer, one, parts) if self._measure else confirmed(layer, one, parts)
        dtype = str(case.dtype).removeprefix("torch.")
        if group.rank() == 0:
            log.log(
                logging.WARNING if self._measure else logging.INFO,  # asked for by COC_TUNE, so it is to be seen
                "tuned %s %s [%d, %d, %d]: %s, %.3f ms, one chunk %.3f ms",
                one.run,
                one.operator,
                one.m,
                one.k,
                one.n,
                list(found.sizes),
                1e3 * found.chosen,
                1e3 * found.serial,
            )
        return Entry(run=one.run, operator=one.operator, m=one.m, k=one.k, n=one.n, dtype=dtype, **vars(found))

    def _path(self, machine: Machine) -> Path:
        return cached_plan(machine) if self._file is None else Path(self._file)

    def _save(self, plan: Plan) -> None:
        path = self._path(plan.machine)
        try:
            saved = self._read(plan.machine)  # a stage of the pipeline may have added its shapes meanwhile
            (plan if isinstance(saved, str) else saved.with_entries(plan.entries)).save(path)
        except OSError as error:  # the other ranks go on: the run matters more than the file
            log.warning("the plan could not be written to %s: %s", path, error.strerror)


def _meet(group: dist.ProcessGroup, call: str) -> None:
    """Make sure that every rank of the group has come to tune the same call."""
    told = exchange(group, f"the tuning of {call}", {"call": call}, DisagreementError)
    if any(value["call"] != call for value in told.values()):
        what = "; ".join(f"rank {rank}: {value['call']}" for rank, value in told.items())
        raise DisagreementError(
            f"ranks of {describe(group)} came to tune different calls ({what}): a layer has to be called alike, with "
            "the same need of gradients, on every rank of its group"
        )


def measured(layer: Layer, one: Pass, parts: Parts) -> Found:
    """Time equal steps first, then what the model makes of the parts; return the fastest, or one chunk."""
    whole = (parts.rows,)
    candidates = [split_rows(parts.rows, count) for count in COUNTS]
    for most in (MOST_CHUNKS, FEW):
        model = best_of_model(one, parts, layer.group.size(), most)
        candidates += [model.sizes, model.equal]
    tried = tuple(dict.fromkeys([whole, *(sizes for sizes in candidates if layer.takes(one, sizes))]))
    if len(tried) == 1:
        times = layer.time_sizes(one, tried, ROUNDS)
        return Found(whole, median(times[whole]), median(times[whole]))
    times = layer.time_sizes(one, tried, ROUNDS)
    best = min(tried, key=lambda sizes: (median(times[sizes]), len(sizes)))
    # Once more, the two alone, so that a lucky median among many does not decide.
    if best != whole:
        times = layer.time_sizes(one, (whole, best), ROUNDS)
    return decide(times, whole, best)


def decide(times: Times, whole: Sizes, best: Sizes) -> Found:
    """Take `best` if it wins by more than noise in the rounds, paired with one chunk; else one chunk."""
    serial = median(times[whole])
    gains = [1 - ours / theirs for ours, theirs in zip(times[best], times[whole], strict=True)]
    if best == whole or median(gains) <= LEAST_GAIN:
        return Found(whole, serial, serial)
    return Found(best, serial, median(times[best]))


def confirmed(layer: Layer, one: Pass, parts: Parts) -> Found:
    """Time what the model finds best once beside one chunk: a wrong prediction must not make a run slower."""
    whole, best = (parts.rows,), predicted(one, parts, layer.group.size()).sizes
    if best == whole or not layer.takes(one, best):
        best = whole
    times = layer.time_sizes(one, tuple(dict.fromkeys((whole, best))), ROUNDS)
    return decide(times, whole, best)


def predicted(one: Pass, parts: Parts, ranks: int) -> Found:
    """Return what the model finds best from the parts alone."""
    best = best_of_model(one, parts, ranks)
    if best.seconds > best.whole * (1 - LEAST_GAIN):
        return Found((parts.rows,), best.whole, best.whole)
    return Found(best.sizes, best.whole, best.seconds)


def best_of_model(one: Pass, parts: Parts, ranks: int, most_chunks: int = MOST_CHUNKS) -> Best:
    """Search the sizes that the model finds best, from the parts alone."""
    return best_sizes(parts.rows, lambda sizes: seconds(one, parts, ranks, sizes), most_chunks=most_chunks)


def _has(plan: Plan, one: Pass, case: Case) -> bool:
    dtype = str(case.dtype).removeprefix("torch.")
    return any(entry.key == (one.run, one.operator, one.m, one.k, one.n, dtype) for entry in plan.entries)
