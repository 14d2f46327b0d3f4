"""The ranks' part of `bench`: every pass of every case timed, serial and in all other ways, paired."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.layer_choices import Pass
from ascend_parallel.measuring.ranks import report
from ascend_parallel.ops import shm
from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import choose
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.planning.measure import Case, Layer, Parts
from ascend_parallel.planning.plan import Entry, Plan, this_machine
from ascend_parallel.planning.search import best_sizes
from ascend_parallel.planning.tuner import decide, seconds
from ascend_parallel.settings import Settings

SERIAL = "serial"
PLAIN = Settings(mode=2)


def measure(
    group: dist.ProcessGroup, cases: list[dict[str, Any]], chunks: list[int], fused: bool, rounds: int
) -> dict[str, Any]:
    """Time every pass of `cases`; return, for each, the times by variant and the plan they make."""
    machine = this_machine(group.size(), torch.device("cpu"), "gloo")
    found, entries = [], []
    for index, raw in enumerate(cases):
        case = Case(**{**raw, "dtype": getattr(torch, raw["dtype"])})
        layer = Layer(case, group, PLAIN, machine)
        for one in case.passes(group.size()):
            report(f"{index + 1}/{len(cases)}  {case.kind} {one.run} [{one.m}, {one.k}] x [{one.k}, {one.n}]")
            result = _measure_pass(layer, one, chunks, fused, rounds)
            entries.append(result.pop("entry"))
            found.append({"case": index, **result})
    return {"passes": found, "plan": Plan(machine, tuple(entries)).as_dict(), "torch": torch.__version__}


def _measure_pass(layer: Layer, one: Pass, chunks: list[int], fused: bool, rounds: int) -> dict[str, Any]:
    parts = layer.parts(one, rounds)
    ways = _ways(layer, one, parts, chunks)
    variants = {name: layer.with_sizes(one, sizes) for name, sizes in ways.items()}
    if fused and _takes_shm(layer, one):
        variants["shm"] = replace(PLAIN, fused=True, enable_coc_in_column_backward=True)
    times = layer.time(one, variants, rounds)
    best = min(ways, key=lambda name: sorted(times[name])[rounds // 2])
    # Once more, the two alone: a lucky median among many must not decide.
    again = layer.time_sizes(one, tuple(dict.fromkeys((ways[SERIAL], ways[best]))), rounds)
    kept = decide(again, ways[SERIAL], ways[best])
    dtype = str(layer.case.dtype).removeprefix("torch.")
    entry = Entry(run=one.run, operator=one.operator, m=one.m, k=one.k, n=one.n, dtype=dtype, **vars(kept))
    return {
        **asdict(one),
        "kind": layer.case.kind,
        "sequence_parallel": layer.case.sequence_parallel,
        "parts": asdict(parts),
        "sizes": {name: list(sizes) for name, sizes in ways.items()},
        "times": times,
        "entry": entry,
    }


def _ways(layer: Layer, one: Pass, parts: Parts, chunks: list[int]) -> dict[str, Sizes]:
    """Name the ways to cut the rows: one chunk, the counts asked for, and what the model finds best."""
    ways: dict[str, Sizes] = {SERIAL: (parts.rows,)}
    for count in chunks:
        sizes = split_rows(parts.rows, count)
        if len(sizes) == count:
            ways[f"{count} chunks"] = sizes
    model = best_sizes(parts.rows, lambda sizes: seconds(layer.case, one, parts, layer.group.size(), sizes)).sizes
    if model not in ways.values():
        ways["model"] = model
    return ways


def _takes_shm(layer: Layer, one: Pass) -> bool:
    case, group = layer.case, layer.group
    problem = Problem(one.operator, one.m, one.k, one.n, case.dtype, "cpu", group.size(), shm=shm.reach(group))
    return choose(problem, Settings(fused=True)).kernel == "shm"
