"""Choose chunk sizes during a run: measure the shapes that occur, or predict them from a few measurements.

At the first call of a layer of a shape, all ranks of its group measure the layer together. They keep the fastest
sizes, or one chunk if overlap loses. Every decision uses only numbers that all ranks have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.logs import working
from ascend_parallel.ops.device_units import fills
from ascend_parallel.ops.probing import without_grad_and_modes
from ascend_parallel.ops.problem import ALL_GATHER, Problem, matmul_in_words
from ascend_parallel.ops.registry import cuts_to_time, row_step
from ascend_parallel.ops.rows import Sizes, is_one_gather, one_gather
from ascend_parallel.overlap.chunks import Chunks
from ascend_parallel.overlap.layer_shape import COLUMN, FORWARD, LayerOperator, LayerShape
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.backend import backend_of
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.cost_model.chunk_search import ChunkSearchResult, best_sizes
from ascend_parallel.tuning.measured.chunk_plan import (
    Entry,
    Machine,
    Plan,
    PlanError,
    cached_plan,
    differences,
    load_plan,
    read_plan,
    this_machine,
)
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown, seconds
from ascend_parallel.tuning.measured.pass_times import TimedLinear, Times

log = logging.getLogger("ascend_parallel")

COUNTS = (2, 4, 8)  # chunk counts that are always timed
ROUNDS = 7  # timings of every candidate
FIRST_ROUNDS = 3  # of a prediction's confirmation; if each of them agrees, the other rounds are left out
LEAST_GAIN = 0.02  # share of the serial time: a cut must gain more than this in the median of the rounds
LOST = 1  # rounds that a winning cut may lose
MOST_CHUNKS = 16
MOST_UNLIKE = 8  # a pass with so many times the operations or bytes is measured anew
FEW = 4  # the model also searches with at most this many chunks, because its cost per chunk is a rough estimate
LONGER = "; it communicates longer than it multiplies: COC_REGION=auto may hide the rest under other layers"


@dataclass(frozen=True)
class TunedPass:
    """The tuner's choice for one pass.

    sizes
        The rows of each chunk.
    serial, chosen
        The median seconds with one chunk, and with `sizes`.
    why
        If `sizes` is one chunk: the reason.
    """

    sizes: Sizes
    serial: float
    chosen: float
    why: str = ""

    def __str__(self) -> str:
        """Return the result in words, for the log."""
        if len(self.sizes) == 1:
            return f"kept whole (one chunk of {self.sizes[0]} rows), because {self.why}; {1e3 * self.serial:.3f} ms"
        if is_one_gather(self.sizes):
            whole = f"waited for first: {1e3 * self.serial:.3f} ms"
            return f"one gather under the product of a rank's own rows, {1e3 * self.chosen:.3f} ms ({whole})"
        rows = str(self.sizes[0]) if len(set(self.sizes)) == 1 else ", ".join(map(str, self.sizes))
        times = f"{1e3 * self.chosen:.3f} ms (whole {1e3 * self.serial:.3f} ms)"
        return f"{len(self.sizes)} chunks of {rows} rows, {times}"


# The chunks of each pass that this process has tuned or found in a plan, for its last line.
CHUNKS: dict[LayerOperator, int] = {}


class Tuner:
    """Chooses chunk sizes for the layers of one process and keeps one plan per group.

    COC_TUNE
        Measures each unknown pass and keeps the result in the file that COC_TUNE names.
    COC_PARALLEL_NUM=auto
        Takes the entries that `ascend-parallel tune` left in the cache. Predicts each unknown pass from a few
        measurements of its parts, and times the predicted sizes once beside one chunk.
    """

    def __init__(self, settings: Settings, original_if_whole: bool = False, hint: str = LONGER) -> None:
        """Measure into the file that ``settings.tune`` names, or predict what the cached plan lacks.

        original_if_whole
            Whether the framework's own layer runs a call whose matmuls all stay in one chunk.
        hint
            What the log says of a pass that communicates longer than it multiplies.
        """
        self._hint = hint
        self._settings, self._original_if_whole = settings, original_if_whole
        self._measure = settings.tune is not None
        self._file = settings.tune
        self._plans: WeakKeyDictionary[dist.ProcessGroup, Plan] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[LayerShape, bool], Chunks]] = WeakKeyDictionary()
        self._breakdowns: WeakKeyDictionary[dist.ProcessGroup, MeasuredBreakdowns] = WeakKeyDictionary()
        self._logged: set[LayerOperator] = set()
        self._unkept: set[int] = set()  # sizes of groups of which the file keeps nothing: it is of another size

    def chunks_for(
        self,
        shape: LayerShape,
        group: dist.ProcessGroup,
        *,
        backward: bool,
        agree: Callable[[], None] = lambda: None,
        replicas: Sequence[dist.ProcessGroup] = (),
    ) -> Chunks:
        """Return what cuts a call: by a plan that has an entry for each pass of this layer.

        The first call of a shape runs `agree` and then communicates on `group`, unless no pass of it has a
        collective; then on each of `replicas`, whose ranks measure the same shape in groups of their own and have to
        run the same chunks: sums over more than two ranks have the bits of their chunks.
        """
        known = self._known.setdefault(group, {})
        chunks = known.get((shape, backward))
        if chunks is None:
            assert shape.ranks == group.size()
            passes = [operator for operator in shape.operators if backward or operator.direction == FORWARD]
            if not passes or not shape.own_rows:
                return self._chunks(None, shape, group, cut=False)
            agree()
            _check_same_call(group, f"{shape}, {'with' if backward else 'without'} gradients")
            plan = self.plan(group, shape.device)
            missing = [operator for operator in passes if plan.entry_of(operator) is None]
            if missing:
                plan = plan.with_entries(
                    tuple(self._entry(shape, operator, group, plan.machine) for operator in missing)
                )
            for other in replicas:
                plan = self._as_replicas(plan, passes, shape, other)
            self._plans[group] = plan
            if missing and self._measure and group.rank() == 0:
                self._save(plan)
            self._log_known(plan, passes)
            entries = [plan.entry_of(operator) for operator in passes]
            cut = any(entry is not None and len(entry.sizes) > 1 for entry in entries)
            chunks = known[shape, backward] = self._chunks(plan, shape, group, cut=cut)
        return chunks

    def _chunks(self, plan: Plan | None, shape: LayerShape, group: dist.ProcessGroup, *, cut: bool) -> Chunks:
        original = self._original_if_whole and not cut and _may_be_original(shape, group)
        why = "the framework's own layer is as fast" if original else "measured"
        return Chunks.measured(self._settings, plan, why, original)

    def exchange_entry(self, problem: Problem, group: dist.ProcessGroup) -> Entry | None:
        """Return the entry of an exchange around parts, or None; every rank of `group` calls this alike."""
        return self.plan(group, problem.device).entry_of(LayerOperator(FORWARD, problem))

    def keep(self, entry: Entry, group: dist.ProcessGroup, device: str) -> None:
        """Add an entry to the plan of `group`, and with COC_TUNE to the file."""
        self._plans[group] = self.plan(group, device).with_entries((entry,))
        if self._measure and group.rank() == 0:
            self._save(self._plans[group])

    def plan(self, group: dist.ProcessGroup, device: str) -> Plan:
        """Return the plan of a group; the first call reads the file, and every rank of `group` makes it."""
        if group not in self._plans:
            self._plans[group] = self._starting_plan(group, device)
        return self._plans[group]

    def _starting_plan(self, group: dist.ProcessGroup, device: str) -> Plan:
        """Return the plan file as the group's first rank reads it, or an empty plan; the same plan on every rank."""
        backend: str = group._get_backend(torch.device(device)).name()
        here = this_machine(group.size(), torch.device(device), backend)
        read = self._read(here) if group.rank() == 0 else ""
        mine = {"error": read} if isinstance(read, str) else {"plan": read.as_dict()}
        values = store_all_gather(group, "the plan's reading", mine, DisagreementError)
        first = values[dist.get_process_group_ranks(group)[0]]
        if "error" in first:
            raise PlanError(first["error"])
        return read_plan(first["plan"])

    def _read(self, here: Machine) -> Plan | str:
        """Return the file's plan, an empty plan if there is no file, or the reason (a text) why the file is refused."""
        variable = "COC_TUNE" if self._measure else "the cache of COC_PARALLEL_NUM=auto"
        try:
            path = self._path(here)
            path.stat()
            plan = load_plan(str(path), variable)
        except FileNotFoundError:
            return Plan(here)
        except (PlanError, OSError, RuntimeError) as error:  # broadcast to the other ranks, which wait for this one
            return f"{variable}: {error}"
        if self._measure and not differences(plan, replace(here, ranks=plan.machine.ranks)):
            return plan if plan.machine == here else self._not_kept(plan, here)
        if different := differences(plan, here):
            return (
                f"{variable}={str(path)!r} was measured elsewhere: {'; '.join(different)}. "
                "Name another file, or remove this file"
            )
        return plan

    def _entry(self, shape: LayerShape, operator: LayerOperator, group: dist.ProcessGroup, machine: Machine) -> Entry:
        timing = f"timing {operator.direction} {operator.problem.operator} {matmul_in_words(operator.problem)}"
        # The modes: hide these matmuls from a selective checkpoint's policy.
        with working(timing, shown=dist.get_rank() == 0), without_grad_and_modes():
            layer = TimedLinear(shape, group, Chunks.measured(self._settings, None).settings, machine)
            if self._measure:
                breakdown = layer.breakdown(operator, ROUNDS)
            else:
                breakdown = self._breakdowns.setdefault(group, MeasuredBreakdowns()).of(layer, operator)
            tuned = (measured if self._measure else confirmed)(layer, operator, breakdown)
        bound = breakdown.communication > breakdown.computation and not self._settings.region
        self._log_once(operator, tuned, self._hint if bound else "")
        return Entry.of(operator, tuned.sizes, tuned.serial, tuned.chosen)

    def _as_replicas(
        self, plan: Plan, passes: list[LayerOperator], shape: LayerShape, group: dist.ProcessGroup
    ) -> Plan:
        """Return the plan with the fewest chunks that a rank of `group` has for each pass: a cut has to win on all."""
        mine = [entry for operator in passes if (entry := plan.entry_of(operator)) is not None]
        value = {"entries": [asdict(entry) for entry in mine]}
        values = store_all_gather(group, f"the chunks of {shape}", value, DisagreementError).values()
        found = [[Entry(**{**raw, "sizes": tuple(raw["sizes"])}) for raw in each["entries"]] for each in values]
        fewest = tuple(min(same, key=_fewest) for same in zip(*found, strict=True))
        for entry, before in zip(fewest, mine, strict=True):
            if entry.sizes != before.sizes and dist.get_rank() == 0:
                variable = "COC_TUNE" if self._measure else "COC_PARALLEL_NUM=auto"
                rows = ", ".join(map(str, entry.sizes))
                log.warning("%s: %s %s: chunks of %s rows, as on a replica", variable, entry.run, entry.operator, rows)
        return plan.with_entries(fewest)

    def _log_known(self, plan: Plan, passes: list[LayerOperator]) -> None:
        """Log the entries of passes that the plan file already had."""
        for operator in passes:
            entry = plan.entry_of(operator)
            assert entry is not None
            tuned = TunedPass(entry.sizes, entry.serial, entry.chosen, "no cut won when it was measured")
            self._log_once(operator, tuned, f" (known from {self._path(plan.machine)})")

    def _log_once(self, operator: LayerOperator, tuned: TunedPass, more: str = "") -> None:
        """Log the sizes of one pass once, on rank 0; as a warning, so that the default log level shows the line."""
        if operator not in self._logged and dist.get_rank() == 0:
            variable = "COC_TUNE" if self._measure else "COC_PARALLEL_NUM=auto"
            name, matmul = operator.problem.operator, matmul_in_words(operator.problem)
            log.warning("%s: %s %s %s: %s%s", variable, operator.direction, name, matmul, tuned, more)
        self._logged.add(operator)
        CHUNKS[operator] = len(tuned.sizes)

    def _path(self, machine: Machine) -> Path:
        return cached_plan(machine) if self._file is None else Path(self._file)

    def _not_kept(self, plan: Plan, here: Machine) -> Plan:
        """Return an empty plan for groups of another size than those of the file, which stays as it is."""
        if here.ranks not in self._unkept:
            text = "COC_TUNE: %s is of groups of %d ranks; what is measured on %d is not kept"
            log.warning(text, self._file, plan.machine.ranks, here.ranks)
        self._unkept.add(here.ranks)
        return Plan(here)

    def _save(self, plan: Plan) -> None:
        path = self._path(plan.machine)
        try:
            saved = self._read(plan.machine)  # another pipeline stage may have added entries
            if plan.machine.ranks in self._unkept:
                return
            (plan if isinstance(saved, str) else saved.with_entries(plan.entries)).save(path)
        except OSError as error:  # the run continues without the file
            log.warning("the plan could not be written to %s: %s", path, error.strerror)


def _check_same_call(group: dist.ProcessGroup, call: str) -> None:
    """Raise `DisagreementError` unless every rank of the group tunes the same call."""
    call_by_rank = store_all_gather(group, f"the tuning of {call}", {"call": call}, DisagreementError)
    if any(value["call"] != call for value in call_by_rank.values()):
        calls = "; ".join(f"rank {rank}: {value['call']}" for rank, value in call_by_rank.items())
        raise DisagreementError(
            f"ranks of {describe(group)} tune different calls ({calls}): call a layer with the same shapes, and with "
            "gradients or without, alike on every rank of its group"
        )


def _fewest(entry: Entry) -> tuple[Any, ...]:
    return len(entry.sizes), entry.sizes, entry.serial, entry.chosen


def measured(layer: TimedLinear, operator: LayerOperator, breakdown: PassBreakdown) -> TunedPass:
    """Time the counts of COUNTS and the sizes that the model predicts from `breakdown`; return the fastest."""
    whole = (breakdown.rows,)
    candidates = cuts_to_time(operator.problem, COUNTS)
    for most in (MOST_CHUNKS, FEW):
        model = best_of_model(operator.problem, breakdown, most)
        candidates += [model.sizes, model.equal]
    tried = tuple(dict.fromkeys([whole, *(layer.sizes_as_run(operator, sizes) for sizes in dict.fromkeys(candidates))]))
    times = layer.time_sizes(operator, tried, ROUNDS)
    if len(tried) == 1:
        return TunedPass(whole, median(times[whole]), median(times[whole]), "it cannot be cut")
    best = min(tried, key=lambda sizes: (median(times[sizes]), len(sizes)))
    # Time the two again, alone: among many candidates, a lucky median may be the smallest.
    if best != whole:
        times = layer.time_sizes(operator, (whole, best), ROUNDS)
    return decide(times, whole, best)


def decide(times: Times, whole: Sizes, best: Sizes) -> TunedPass:
    """Return `best` if it beats one chunk by more than noise, round by round; otherwise one chunk.

    The median gain must exceed `LEAST_GAIN`, and at most `LOST` rounds may lose. With 7 rounds, a cut that gains
    nothing passes once in 16 times.
    """
    serial = median(times[whole])
    gains = [1 - ours / theirs for ours, theirs in zip(times[best], times[whole], strict=True)]
    lost = sum(gain <= 0 for gain in gains)
    if best == whole or median(gains) <= LEAST_GAIN or lost > LOST:
        return TunedPass(
            whole, serial, serial, _why_whole(best, whole, median(gains), f"{lost} of {len(gains)} rounds")
        )
    return TunedPass(best, serial, median(times[best]))


def _why_whole(best: Sizes, whole: Sizes, gain: float, lost: str) -> str:
    if best == whole:
        return "no cut that was timed is faster"
    wins = f"wins {100 * gain:.1f} % and loses {lost}, which may be noise"
    return f"the best cut, {len(best)} chunks, " + (wins if gain > 0 else f"takes {-100 * gain:.1f} % longer")


class MeasuredBreakdowns:
    """The breakdowns of passes on one group: of similar passes one is measured, the others follow from their sizes."""

    def __init__(self) -> None:
        """Know no pass yet."""
        self._known: dict[tuple[str, str, bool, torch.dtype], list[tuple[Problem, PassBreakdown]]] = {}

    def of(self, layer: TimedLinear, operator: LayerOperator) -> PassBreakdown:
        """Return the breakdown of a pass. Every rank of the group knows the same, so all measure, or none."""
        alike = operator.problem.operator, operator.direction, layer.shape.kind == COLUMN, layer.shape.dtype
        known = self._known.setdefault(alike, [])
        for other, breakdown in known:
            if (estimate := scaled(breakdown, other, operator.problem)) is not None:
                return estimate
        breakdown = layer.breakdown(operator, FIRST_ROUNDS)
        known.append((operator.problem, breakdown))
        return breakdown


def scaled(breakdown: PassBreakdown, measured: Problem, wanted: Problem) -> PassBreakdown | None:
    """Return the breakdown of a pass from that of a similar one, by operations and bytes; None if too different.

    A matmul takes a time per operation, and a collective one per byte beside its latency.
    """
    operations = wanted.m * wanted.k * wanted.n / (measured.m * measured.k * measured.n)
    columns = "k" if wanted.operator == ALL_GATHER else "n"
    moved = wanted.m * getattr(wanted, columns) / (measured.m * getattr(measured, columns))
    if wanted.m != measured.m or not all(1 / MOST_UNLIKE <= ratio <= MOST_UNLIKE for ratio in (operations, moved)):
        return None
    computed = {name: operations * getattr(breakdown, name) for name in ("matmul", "matmul_piece", "weight_gradient")}
    sent = {
        name: breakdown.latency + moved * max(0.0, getattr(breakdown, name) - breakdown.latency)
        if getattr(breakdown, name)
        else 0.0
        for name in ("collective", "pieces", "gather", "gather_pieces")
    }
    changes: dict[str, Any] = computed | sent
    return replace(breakdown, **changes)


def confirmed(layer: TimedLinear, operator: LayerOperator, breakdown: PassBreakdown) -> TunedPass:
    """Time the sizes that the model predicts beside one chunk: a wrong prediction must not make a run slower.

    Where the model expects nothing, nothing is timed. Where the first rounds are clear, no further ones follow.
    """
    whole, expected = (breakdown.rows,), predicted(operator.problem, breakdown)
    best = layer.sizes_as_run(operator, expected.sizes)
    if best == whole:
        uncuttable = "it cannot be cut as a model would"
        why = uncuttable if expected.sizes != whole else "a model of its parts expects no cut to win"
        return TunedPass(whole, expected.serial, expected.serial, why)
    times = layer.time_sizes(operator, (whole, best), FIRST_ROUNDS)
    if not clear(times, whole, best):
        more = layer.time_sizes(operator, (whole, best), ROUNDS - FIRST_ROUNDS)
        times = {sizes: [*times[sizes], *more[sizes]] for sizes in times}
    return decide(times, whole, best)


def clear(times: Times, whole: Sizes, best: Sizes) -> bool:
    """Tell whether every round says the same, with twice the least gain; or every one that the cut loses."""
    gains = [1 - ours / theirs for ours, theirs in zip(times[best], times[whole], strict=True)]
    return min(gains) > 2 * LEAST_GAIN or max(gains) <= 0


def predicted(problem: Problem, breakdown: PassBreakdown) -> TunedPass:
    """Return the sizes that the model predicts from the breakdown alone."""
    best = best_of_model(problem, breakdown)
    if best.seconds > best.one_chunk * (1 - LEAST_GAIN):
        return TunedPass((breakdown.rows,), best.one_chunk, best.one_chunk)
    return TunedPass(best.sizes, best.one_chunk, best.seconds)


def best_of_model(problem: Problem, breakdown: PassBreakdown, most_chunks: int = MOST_CHUNKS) -> ChunkSearchResult:
    """Search the sizes of least predicted time, with at most `most_chunks` chunks that fill the device."""

    def cost(sizes: Sizes) -> float:
        return seconds(problem, breakdown, sizes) if fills(problem, sizes) else inf

    best = best_sizes(breakdown.rows, cost, most_chunks=most_chunks, tile=row_step(problem))
    uncut = one_gather(breakdown.rows)
    if uncut in cuts_to_time(problem, ()) and cost(uncut) < best.seconds:
        return replace(best, sizes=uncut, seconds=cost(uncut))
    return best


def _may_be_original(shape: LayerShape, group: dist.ProcessGroup) -> bool:
    """Tell whether the framework's own layer has our bits. On NPUs we may pad; sums of 3 ranks may be ours."""
    scatters = shape.sequence_parallel and shape.ranks > 2
    ours = scatters and not backend_of(group, torch.device(shape.device)).own_scatter
    return shape.device != "npu" and not ours
