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

from ascend_parallel.consistency import DisagreementError, exchange
from ascend_parallel.ops.bits import without_grad_and_modes
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.choices import LayerOperator
from ascend_parallel.process_groups import describe
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.cost_model.chunk_search import Best, best_sizes
from ascend_parallel.tuning.measured.chunk_plan import (
    Entry,
    Machine,
    Plan,
    PlanError,
    cached_plan,
    differences,
    load_plan,
    this_machine,
)
from ascend_parallel.tuning.measured.pass_parts import Parts, seconds
from ascend_parallel.tuning.measured.pass_times import Case, Layer, Times

log = logging.getLogger("ascend_parallel")

COUNTS = (2, 4, 8)  # chunks tried first
ROUNDS = 7  # of every candidate
LEAST_GAIN = 0.02  # of the serial time: overlap has to win more than this, in the median of the rounds
LOST = 1  # rounds that a cut may lose all the same
MOST_CHUNKS = 16
FEW = 4  # chunks: what the model finds with no more of them is tried too, for it knows little of what a chunk costs


@dataclass(frozen=True)
class Found:
    """What was found for one pass: the sizes, the median seconds of one chunk and of them, and why it is kept whole."""

    sizes: Sizes
    serial: float
    chosen: float
    why: str = ""

    def measured(self) -> dict[str, Any]:
        """Return what an entry of a plan keeps of it."""
        return {"sizes": self.sizes, "serial": self.serial, "chosen": self.chosen}

    def __str__(self) -> str:
        """Say it in words."""
        if len(self.sizes) == 1:
            return f"kept whole (one chunk of {self.sizes[0]} rows), because {self.why}; {1e3 * self.serial:.3f} ms"
        rows = str(self.sizes[0]) if len(set(self.sizes)) == 1 else ", ".join(map(str, self.sizes))
        times = f"{1e3 * self.chosen:.3f} ms (whole {1e3 * self.serial:.3f} ms)"
        return f"{len(self.sizes)} chunks of {rows} rows, {times}"


class Tuner:
    """Finds chunk sizes for the layers of one process, and keeps them in a plan, group by group.

    With COC_TUNE what is not known yet is measured and kept in its file; with COC_PARALLEL_NUM=auto it is
    predicted from a few measurements of its parts and timed once beside one chunk; what `ascend-parallel
    tune` left in the cache is taken first.
    """

    def __init__(self, settings: Settings, original_if_whole: bool = False) -> None:
        """Measure and keep in the file that ``settings.tune`` names, or predict beside the cache's entries.

        original_if_whole
            Give settings of mode 0 (the framework's own layer) for a call whose matmuls are all kept whole. Not on
            NPUs, where a whole matmul's operands may be padded.
        """
        # In a layer the plan stands in for these three.
        self._settings = replace(settings, tune=None, auto=False, mode=settings.effective_mode)
        self._unless_cut = replace(self._settings, mode=0) if original_if_whole else self._settings
        self._measure = settings.tune is not None
        self._file = settings.tune
        self._plans: WeakKeyDictionary[dist.ProcessGroup, Plan] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Case, bool], Settings]] = WeakKeyDictionary()
        self._told: set[tuple[LayerOperator, str]] = set()

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
                return self._settings if case.device == "npu" else self._unless_cut
            agree()
            _meet(group, f"{case}, {'with' if backward else 'without'} gradients")
            plan = self._plan(group, case.device)
            missing = [one for one in passes if _find(plan, one, case) is None]
            if missing:
                plan = plan.with_entries(tuple(self._entry(case, one, group, plan.machine) for one in missing))
                self._plans[group] = plan
                if self._measure and group.rank() == 0:
                    self._save(plan)
            self._tell_known(plan, passes, case)
            cut = case.device == "npu" or any(_is_cut(plan, one, case) for one in passes)
            known[case, backward] = replace(self._settings if cut else self._unless_cut, plan=plan)
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

    def _entry(self, case: Case, one: LayerOperator, group: dist.ProcessGroup, machine: Machine) -> Entry:
        with without_grad_and_modes():  # a checkpoint's policy would count these matmuls as the call's
            layer = Layer(case, group, self._settings, machine)
            parts = layer.parts(one, ROUNDS)
            found = measured(layer, one, parts) if self._measure else confirmed(layer, one, parts)
        self._tell(one, case, str(found))
        dtype = str(case.dtype).removeprefix("torch.")
        return Entry(run=one.run, operator=one.operator, m=one.m, k=one.k, n=one.n, dtype=dtype, **found.measured())

    def _tell_known(self, plan: Plan, passes: list[LayerOperator], case: Case) -> None:
        """Say of passes that the file knew what it knew."""
        for one in passes:
            entry = _find(plan, one, case)
            assert entry is not None
            found = Found(entry.sizes, entry.serial, entry.chosen, "no cut won when it was measured")
            self._tell(one, case, f"{found} (known from {self._path(plan.machine)})")

    def _tell(self, one: LayerOperator, case: Case, text: str) -> None:
        """Say what one pass runs with: once, on rank 0, as a warning, for it was asked for and is to be seen."""
        if (one, str(case.dtype)) not in self._told and dist.get_rank() == 0:
            asked = "COC_TUNE" if self._measure else "COC_PARALLEL_NUM=auto"
            shape = f"[{one.m}, {one.k}] x [{one.k}, {one.n}]"
            log.warning("%s: %s %s %s: %s", asked, one.run, one.operator, shape, text)
        self._told.add((one, str(case.dtype)))

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


def measured(layer: Layer, one: LayerOperator, parts: Parts) -> Found:
    """Time equal steps first, then what the model makes of the parts; return the fastest, or one chunk."""
    whole = (parts.rows,)
    candidates = [split_rows(parts.rows, count) for count in COUNTS]
    for most in (MOST_CHUNKS, FEW):
        model = best_of_model(one, parts, layer.group.size(), most)
        candidates += [model.sizes, model.equal]
    tried = tuple(dict.fromkeys([whole, *(layer.as_run(one, sizes) for sizes in dict.fromkeys(candidates))]))
    if len(tried) == 1:
        times = layer.time_sizes(one, tried, ROUNDS)
        return Found(whole, median(times[whole]), median(times[whole]), "it cannot be cut")
    times = layer.time_sizes(one, tried, ROUNDS)
    best = min(tried, key=lambda sizes: (median(times[sizes]), len(sizes)))
    # Once more, the two alone, so that a lucky median among many does not decide.
    if best != whole:
        times = layer.time_sizes(one, (whole, best), ROUNDS)
    return decide(times, whole, best)


def decide(times: Times, whole: Sizes, best: Sizes) -> Found:
    """Take `best` if it wins by more than noise in the rounds, paired with one chunk; else one chunk.

    That is by the median, and in all rounds but `LOST`: with 7 rounds, a cut that gains nothing passes once in 16.
    """
    serial = median(times[whole])
    gains = [1 - ours / theirs for ours, theirs in zip(times[best], times[whole], strict=True)]
    lost = sum(gain <= 0 for gain in gains)
    if best == whole or median(gains) <= LEAST_GAIN or lost > LOST:
        return Found(whole, serial, serial, _why_whole(best, whole, median(gains), f"{lost} of {len(gains)} rounds"))
    return Found(best, serial, median(times[best]))


def _why_whole(best: Sizes, whole: Sizes, gain: float, lost: str) -> str:
    if best == whole:
        return "no cut that was timed is faster"
    took = f"wins {100 * gain:.1f} % and loses {lost}, which may be noise"
    return f"the best cut, {len(best)} chunks, " + (took if gain > 0 else f"takes {-100 * gain:.1f} % longer")


def confirmed(layer: Layer, one: LayerOperator, parts: Parts) -> Found:
    """Time what the model finds best once beside one chunk: a wrong prediction must not make a run slower."""
    whole, predicted_best = (parts.rows,), predicted(one, parts, layer.group.size()).sizes
    best = layer.as_run(one, predicted_best)
    if best == whole:
        times = layer.time_sizes(one, (whole,), ROUNDS)
        cut = "it cannot be cut as a model would"
        why = cut if predicted_best != whole else "a model of its parts expects no cut to win"
        return Found(whole, median(times[whole]), median(times[whole]), why)
    times = layer.time_sizes(one, (whole, best), ROUNDS)
    return decide(times, whole, best)


def predicted(one: LayerOperator, parts: Parts, ranks: int) -> Found:
    """Return what the model finds best from the parts alone."""
    best = best_of_model(one, parts, ranks)
    if best.seconds > best.whole * (1 - LEAST_GAIN):
        return Found((parts.rows,), best.whole, best.whole)
    return Found(best.sizes, best.whole, best.seconds)


def best_of_model(one: LayerOperator, parts: Parts, ranks: int, most_chunks: int = MOST_CHUNKS) -> Best:
    """Search the sizes that the model finds best, from the parts alone."""
    return best_sizes(parts.rows, lambda sizes: seconds(one, parts, ranks, sizes), most_chunks=most_chunks)


def _is_cut(plan: Plan, one: LayerOperator, case: Case) -> bool:
    entry = _find(plan, one, case)
    return entry is not None and len(entry.sizes) > 1


def _find(plan: Plan, one: LayerOperator, case: Case) -> Entry | None:
    dtype = str(case.dtype).removeprefix("torch.")
    key = (one.run, one.operator, one.m, one.k, one.n, dtype)
    return next((entry for entry in plan.entries if entry.key == key), None)
