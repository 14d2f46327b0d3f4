"""The ranks' part of `bench`: every pass of every case timed, serial and in all other ways, paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops import shm
from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import choose
from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows
from ascend_parallel.overlap.choices import LayerOperator
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.cost_model.chunk_search import equal_sizes
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.chunk_plan import Entry, Plan, this_machine
from ascend_parallel.tuning.measured.pass_parts import Parts
from ascend_parallel.tuning.measured.pass_times import Case, Layer
from ascend_parallel.tuning.measured.tuner import FEW, MOST_CHUNKS, ROUNDS, best_of_model, decide

SERIAL = "serial"
PLAIN = Settings(mode=2)


def measure(
    group: dist.ProcessGroup,
    cases: list[dict[str, Any]],
    chunks: list[int],
    fused: bool,
    rounds: int,
    equal: bool = False,
) -> dict[str, Any]:
    """Time every pass of `cases`; return, for each, the times by variant and the plan they make.

    equal: also chunks of equal rows, by the names "2 equal", "4 equal" ...
    """
    machine = this_machine(group.size(), torch.device("cpu"), "gloo")
    found, entries = [], []
    for index, raw in enumerate(cases):
        case = Case(**{**raw, "dtype": getattr(torch, raw["dtype"])})
        layer = Layer(case, group, PLAIN, machine)
        for one in case.passes(group.size()):
            report(f"{index + 1}/{len(cases)}  {case.kind} {one.run} [{one.m}, {one.k}] x [{one.k}, {one.n}]")
            result = _measure_pass(layer, one, chunks, fused, rounds, equal)
            entries.append(result.pop("entry"))
            found.append({"case": index, **result})
    return {"passes": found, "plan": Plan(machine, tuple(entries)).as_dict(), "torch": torch.__version__}


def _measure_pass(
    layer: Layer, one: LayerOperator, chunks: list[int], fused: bool, rounds: int, equal: bool
) -> dict[str, Any]:
    ways = _ways(layer, one, layer.parts(one, ROUNDS), chunks, equal)
    variants = {name: layer.with_sizes(one, sizes) for name, sizes in ways.items()}
    if fused and _takes_shm(layer, one):
        variants["shm"] = replace(PLAIN, fused=True, enable_coc_in_column_backward=True)
    parts, times = layer.time_with_parts(one, variants, rounds)
    # Once more, the best alone: a lucky median among many must not decide.
    again = layer.time(one, {name: variants[name] for name in _finalists(ways, times, equal)}, rounds)
    best = min((name for name in again if name != SERIAL), key=lambda name: median(again[name]), default=SERIAL)
    kept = decide({ways[name]: values for name, values in again.items()}, ways[SERIAL], ways[best])
    dtype = str(layer.case.dtype).removeprefix("torch.")
    entry = Entry(run=one.run, operator=one.operator, m=one.m, k=one.k, n=one.n, dtype=dtype, **kept.measured())
    return {
        **asdict(one),
        "kind": layer.case.kind,
        "sequence_parallel": layer.case.sequence_parallel,
        "parts": asdict(parts),
        "sizes": {name: list(sizes) for name, sizes in ways.items()},
        "times": times,
        "again": again,
        "kept": list(kept.sizes),
        "entry": entry,
    }


def _finalists(ways: Mapping[str, Sizes], times: Mapping[str, Sequence[float]], equal: bool) -> list[str]:
    """Name one chunk and the fastest cut; with `equal`, the fastest of equal chunks and of those that differ."""
    ranked = sorted(set(ways) - {SERIAL}, key=lambda name: median(times[name]))
    if not equal:
        return [SERIAL, *ranked[:1]]
    alike = [name for name in ranked if max(ways[name]) - min(ways[name]) <= ROW_TILE]
    return [SERIAL, *alike[:1], *[name for name in ranked if name not in alike][:1]]


def _ways(layer: Layer, one: LayerOperator, parts: Parts, chunks: list[int], equal: bool) -> dict[str, Sizes]:
    """Name the ways to cut the rows: one chunk, the counts asked for, and what the model finds best.

    Each as a run would cut, which takes larger chunks where they keep the matmul's bits.
    """
    ways: dict[str, Sizes] = {SERIAL: (parts.rows,)}
    for count in chunks:
        cuts = {f"{count} equal": equal_sizes(parts.rows, count)} if equal else {}
        cuts[f"{count} chunks"] = split_rows(parts.rows, count)
        for name, asked in cuts.items():
            sizes = layer.as_run(one, asked)
            if len(sizes) == count and sizes not in ways.values():
                ways[name] = sizes
    for name, most in (("model", MOST_CHUNKS), (f"model, {FEW} at most", FEW)):
        sizes = layer.as_run(one, best_of_model(one, parts, layer.group.size(), most).sizes)
        if sizes not in ways.values():
            ways[name] = sizes
    return ways


def _takes_shm(layer: Layer, one: LayerOperator) -> bool:
    case, group = layer.case, layer.group
    problem = shm.ask(Problem(one.operator, one.m, one.k, one.n, case.dtype, "cpu", group.size()), group)
    return choose(problem, Settings(fused=True)).kernel == "shm"
