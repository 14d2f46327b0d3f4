"""The part of `bench` that runs on the ranks: time every pass of every case, serial and with every variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.devices import DEVICES
from ascend_parallel.ops.arithmetic import TP
from ascend_parallel.ops.operators import with_fused_limits
from ascend_parallel.ops.registry import FUSED, choose
from ascend_parallel.ops.rows import ROW_TILE, Sizes, split_rows
from ascend_parallel.overlap.layer_shape import LayerOperator, LayerShape
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.cost_model.chunk_search import equal_sizes
from ascend_parallel.tuning.launch.devices import device_of, own_device
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.chunk_plan import Entry, Plan, this_machine
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown
from ascend_parallel.tuning.measured.pass_times import TimedLinear, Variant
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
    deterministic: list[str] | None = None,
    timed: type[TimedLinear] = TimedLinear,
) -> dict[str, Any]:
    """Time every pass of `cases`; return the times of each pass by variant, and the plan that they make.

    equal: also time chunks of equal rows, under the names "2 equal", "4 equal" ...
    deterministic: also time one chunk and each count with these values of COC_DETERMINISTIC: "1", "tp".
    timed: the layer of a shape; a framework's own in its place.
    """
    device = device_of(group)
    machine = this_machine(group.size(), own_device(device), DEVICES[device].backend)
    results, entries = [], []
    for index, raw in enumerate(cases):
        shape = LayerShape(**{**raw, "dtype": getattr(torch, raw["dtype"]), "device": device})
        layer = timed(shape, group, PLAIN)
        for operator in shape.operators:
            what = f"{shape.kind} {operator.direction} {operator.matmul.product_in_words}"
            report(f"{index + 1}/{len(cases)}  {what}")
            result = _measure_pass(layer, operator, chunks, fused, rounds, equal, deterministic or [])
            entries.append(result.pop("entry"))
            results.append({"case": index, **result})
    return {"passes": results, "plan": Plan(machine, tuple(entries)).as_dict(), "torch": torch.__version__}


def _measure_pass(
    layer: TimedLinear,
    operator: LayerOperator,
    chunks: list[int],
    fused: bool,
    rounds: int,
    equal: bool,
    deterministic: list[str],
) -> dict[str, Any]:
    candidates = _candidate_sizes(layer, operator, layer.breakdown(operator, ROUNDS), chunks, equal)
    variants = {name: layer.with_sizes(operator, sizes) for name, sizes in candidates.items()}
    for value in deterministic:
        for count in (1, *chunks):
            name = f"{SERIAL if count == 1 else f'{count} chunks'}, {value}"
            asked = Settings(mode=2, num_chunks=count, deterministic=TP if value == TP else True)
            variants[name] = Variant(asked)
    if fused and (kernel := _fused_kernel(layer, operator)) is not None:
        variants[kernel] = Variant(Settings(mode=2, fused=True, enable_coc_in_column_backward=True))
    breakdown, times = layer.time_with_breakdown(operator, variants, rounds)
    # Time the finalists again, alone: among many variants, a lucky median may be the smallest.
    final = layer.time(operator, {name: variants[name] for name in _finalists(candidates, times, equal)}, rounds)
    best = min((name for name in final if name != SERIAL), key=lambda name: median(final[name]), default=SERIAL)
    kept = decide({candidates[name]: values for name, values in final.items()}, candidates[SERIAL], candidates[best])
    return {
        **operator.as_dict(),
        "kind": layer.shape.kind,
        "sequence_parallel": layer.shape.sequence_parallel,
        "parts": asdict(breakdown),
        "sizes": {name: list(sizes) for name, sizes in candidates.items()},
        "times": times,
        "again": final,
        "kept": list(kept.sizes),
        "entry": Entry.of(*operator, kept.sizes, kept.serial, kept.chosen),
    }


def _finalists(candidates: Mapping[str, Sizes], times: Mapping[str, Sequence[float]], equal: bool) -> list[str]:
    """Return the names of one chunk and of the fastest cut; with `equal`, the fastest equal and unequal chunks."""
    ranked = sorted(set(candidates) - {SERIAL}, key=lambda name: median(times[name]))
    if not equal:
        return [SERIAL, *ranked[:1]]
    equals = [name for name in ranked if max(candidates[name]) - min(candidates[name]) <= ROW_TILE]
    return [SERIAL, *equals[:1], *[name for name in ranked if name not in equals][:1]]


def _candidate_sizes(
    layer: TimedLinear, operator: LayerOperator, breakdown: PassBreakdown, chunks: list[int], equal: bool
) -> dict[str, Sizes]:
    """Return chunk sizes by name: one chunk, the requested counts, and the model's best sizes.

    Each list is the sizes that a run uses: larger chunks where the matmul's bits need them.
    """
    candidates: dict[str, Sizes] = {SERIAL: (breakdown.rows,)}
    for count in chunks:
        cuts = {f"{count} equal": equal_sizes(breakdown.rows, count)} if equal else {}
        cuts[f"{count} chunks"] = split_rows(breakdown.rows, count)
        for name, requested in cuts.items():
            sizes = layer.sizes_as_run(operator, requested)
            if len(sizes) >= count and sizes not in candidates.values():  # a framework may cut a rest off
                candidates[name] = sizes
    for name, most in (("model", MOST_CHUNKS), (f"model, {FEW} at most", FEW)):
        sizes = layer.sizes_as_run(operator, best_of_model(operator.matmul, breakdown, most).sizes)
        if sizes not in candidates.values():
            candidates[name] = sizes
    return candidates


def _fused_kernel(layer: TimedLinear, operator: LayerOperator) -> str | None:
    """Return the fused kernel that takes a pass, "shm" or "npu"; None if none does."""
    kernel = choose(with_fused_limits(operator.matmul, layer.group), Settings(fused=True)).kernel
    return kernel if kernel in FUSED else None
