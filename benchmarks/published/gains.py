"""Predict the training steps whose gains MindSpeed publishes, and compare.

No number of the cost model was fitted to these gains. The publication leaves much open, so every prediction is made for
both modes and over a grid of sequences and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.text import dtype_name
from ascend_parallel.tuning.cost_model.assumptions import Assumptions
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.layer_passes import (
    BEST,
    BOUND,
    EQUAL,
    MEGATRON,
    ChunkSchedule,
)
from ascend_parallel.tuning.cost_model.models import Batch, Model, find_model
from ascend_parallel.tuning.cost_model.report import gain
from ascend_parallel.tuning.cost_model.step import Layout, parts_of, step_time
from ascend_parallel.tuning.cost_model.tables import ASSUMED

# End to end, fused operators, TP 8, as shares.
PUBLISHED = {"bloom-7b": 0.0320, "bloom-176b": 0.0547, "llama2-70b": 0.0785}
SOURCE = "MindSpeed, docs/features/communication-over-computation.md"
PUBLISHED_TP = 8
NOT_PUBLISHED = f"{ASSUMED}: not published"
# Fused operators do not run in the column layer's backward unless enable_coc_in_column_backward is set.
FUSED_BOUND = ChunkSchedule(name="bound", column_backward=False)
SCHEDULES: dict[str, ChunkSchedule] = {
    **{f"{count} equal": ChunkSchedule(name=f"={count}") for count in (2, 4, 8)},
    "best equal": EQUAL,
    "best": BEST,
    "bound": BOUND,
    "bound, fused": FUSED_BOUND,
}
MODES = {False: "all-reduce", True: "sequence"}
GRID_SEQUENCES = (1024, 2048, 4096, 8192)
GRID_MICRO_BATCHES = (1, 4)
SLOWER_COLLECTIVE = 200e-6
CAUSE_STAGES = 8
# The numbers of a hardware that decide the times of matmuls and collectives; `predict --sources` prints all.
NUMBERS = (
    "matmul.cores",
    "matmul.frequency",
    "matmul.macs_per_cycle",
    "matmul.utilisation",
    "matmul.launch",
    "attention.utilisation",
    "memory.bandwidth",
    "memory.efficiency",
    "collectives.all_reduce",
    "collectives.gather_share",
    "link.rate",
    "contention.collective",
    "contention.compute",
    "host.launch",
)
LEFT_OUT = (
    "The inside of a fused operator: its tiles, its launches, its share of the cores. Chunks stand for it.",
    "What a step runs beside the layers: dropout, data loading, logging, gradient norms, loss scaling.",
    "The baseline of the publication, and whether a gain is in throughput (as here) or in time.",
    "Broken or throttled cards, and host time that grows with the number of operators.",
)


def grid_of(assumptions: Assumptions, batch: Batch) -> Iterator[Batch]:
    """Yield `batch` with every sequence and micro-batch that is not given."""
    sequences = GRID_SEQUENCES if assumptions.sequence is None else (assumptions.sequence,)
    micro_batches = GRID_MICRO_BATCHES if assumptions.micro_batch is None else (assumptions.micro_batch,)
    for micro_batch, sequence in product(micro_batches, sequences):
        yield replace(batch, sequence=sequence, micro_batch=micro_batch)


def step_gain(costs: CostModel, model: Model, batch: Batch, layout: Layout, schedule: ChunkSchedule) -> float:
    """Return the predicted gain of a training step over Megatron-core's schedule, as a share."""
    before, after = (step_time(costs, model, batch, layout, timed).total for timed in (MEGATRON, schedule))
    return gain(before, after)


def compare(assumptions: Assumptions, modes: Sequence[bool] = tuple(MODES)) -> dict[str, Any]:
    """Return the published gains and the predictions as plain values; gains are shares.

    modes: the values of sequence parallelism, in place of that of `assumptions`.
    """
    return {
        "source": SOURCE,
        "assumptions": assumption_rows(assumptions, modes),
        "models": [_model(assumptions, find_model(name), modes) for name in PUBLISHED],
        "left_out": list(LEFT_OUT),
    }


def assumption_rows(assumptions: Assumptions, modes: Sequence[bool]) -> list[dict[str, str]]:
    """Return name, value and source of every assumption; what is not published is marked so."""
    layout, hardware = assumptions.layout, assumptions.hardware
    sequence = assumptions.sequence or "the model's training sequence"
    published_tp = f"{SOURCE}: only TP {PUBLISHED_TP} is supported"
    rows = [
        ("chip", hardware.name, NOT_PUBLISHED),
        ("tensor parallel", assumptions.tp, published_tp if assumptions.tp == PUBLISHED_TP else NOT_PUBLISHED),
        ("mode", " and ".join(MODES[mode] for mode in modes), NOT_PUBLISHED),
        ("sequence", sequence, NOT_PUBLISHED),
        ("micro-batch", assumptions.micro_batch or 1, NOT_PUBLISHED),
        ("micro-batches per step", layout.micro_batches, NOT_PUBLISHED),
        ("replicas", layout.dp, NOT_PUBLISHED),
        ("pipeline stages", layout.pp, NOT_PUBLISHED),
        ("recompute", layout.recompute, NOT_PUBLISHED),
        ("dtype", dtype_name(assumptions.dtype), NOT_PUBLISHED),
        ("baseline", "Megatron-core: one chunk, the column layer's backward overlapped", NOT_PUBLISHED),
    ]
    for name in PUBLISHED:
        model = find_model(name)
        rows.append((name, f"{model.layers} layers, hidden {model.hidden}, ffn {model.ffn}", model.source))
    rows += _number_rows(hardware)
    return [{"name": name, "value": str(value), "source": source} for name, value, source in rows]


def with_fixed_cost(hardware: Hardware, seconds: float) -> Hardware:
    """Return the hardware with `seconds` added to every collective of any size."""
    data = hardware.collectives
    slower: dict[str, Any] = {
        name: tuple((limit, fixed + seconds, *rest) for limit, fixed, *rest in getattr(data, name))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    }
    if not data.all_gather:  # gather_share must not scale the added seconds
        for name in ("all_gather", "reduce_scatter"):
            slower[name] = tuple(
                (limit, data.gather_share * fixed + seconds, *(data.gather_share * value for value in rest))
                for limit, fixed, *rest in data.all_reduce
            )
    return replace(hardware, collectives=replace(data, **slower))


def _number_rows(hardware: Hardware) -> list[tuple[str, Any, str]]:
    rows = []
    for name in NUMBERS:
        number = hardware.numbers.get(name)
        if number is not None:
            table, _, key = name.partition(".")
            value = getattr(getattr(hardware, table), key)
            given = not isinstance(value, tuple) and value != number.value  # by an option, such as --launch-us
            shown = f"{value:g}" if isinstance(value, float) else number.value
            rows.append((name, shown, "given on the command line" if given else number.words))
    return rows


def _model(assumptions: Assumptions, model: Model, modes: Sequence[bool]) -> dict[str, Any]:
    cases = [_case(replace(assumptions, sequence_parallel=mode), model) for mode in modes]
    return {"model": model.name, "published": PUBLISHED[model.name], "cases": cases}


def _case(assumptions: Assumptions, model: Model) -> dict[str, Any]:
    """Return the predictions of one model in the mode of `assumptions`."""
    batch, layout, costs = assumptions.batch(model), assumptions.layout, assumptions.costs
    slower = CostModel(with_fixed_cost(assumptions.hardware, SLOWER_COLLECTIVE))
    gains = {name: step_gain(costs, model, batch, layout, schedule) for name, schedule in SCHEDULES.items()}
    grid = [
        {"sequence": point.sequence, "micro_batch": point.micro_batch, **_ends(costs, model, point, layout)}
        for point in grid_of(assumptions, batch)
    ]
    predicted = [gains["best"], *(point["best"] for point in grid)]
    case = {
        "mode": MODES[batch.sequence_parallel],
        "sequence": batch.sequence,
        "micro_batch": batch.micro_batch,
        "gains": gains,
        "chunks": _chunk_counts(costs, model, batch),
        "grid": grid,
        "range": [min(predicted), max(predicted)],
        "causes": {
            f"{SLOWER_COLLECTIVE * 1e6:.0f} us more a collective": _ends(slower, model, batch, layout),
            "full recompute": _ends(costs, model, batch, replace(layout, recompute="full")),
            f"{CAUSE_STAGES} stages": _ends(
                costs, model, batch, replace(layout, pp=CAUSE_STAGES, micro_batches=8 * CAUSE_STAGES)
            ),
        },
    }
    return case | {"unexplained": _unexplained(PUBLISHED[model.name], case)}


def _ends(costs: CostModel, model: Model, batch: Batch, layout: Layout) -> dict[str, float]:
    """Return the gains of the best chunks and of the bound of fused operators."""
    return {name: step_gain(costs, model, batch, layout, SCHEDULES[name]) for name in ("best", "bound, fused")}


def _chunk_counts(costs: CostModel, model: Model, batch: Batch) -> dict[str, dict[str, int | None]]:
    """Return the number of chunks of each layer's forward and backward at "best"; None: the pass has no collective."""
    layer, ends = parts_of(costs, model, batch)
    parts: Mapping[str, list[Any]] = {
        way: [*layer.linear_passes[way], ends.linear_passes[way]] for way in (FORWARD, BACKWARD)
    }
    return {
        forward.linear.name: {
            part.direction: len(part.best.sizes) if part.best else None for part in (forward, backward)
        }
        for forward, backward in zip(parts[FORWARD], parts[BACKWARD], strict=True)
    }


def _unexplained(published: float, case: Mapping[str, Any]) -> str:
    """Return in words how far the predictions of one mode are from the published gain, and what could explain it."""
    best, bound = case["gains"]["best"], case["gains"]["bound, fused"]
    text = f"published {percent(published)}, predicted {percent(best)}: {100 * (best - published):+.2f} points. "
    text += _shapes(published, *case["range"]) if len(case["grid"]) > 1 else ""
    towards = [
        f"{name} ({percent(gains['best'])})"
        for name, gains in case["causes"].items()
        if (gains["best"] - best) * (published - best) > 0
    ]
    text += f"Towards the published gain: {', '.join(towards) or 'none of the candidate causes'}. "
    if published > bound:
        return (
            text + f"Above even the bound of fused operators ({percent(bound)}): the run differed from the assumptions."
        )
    direction = "less" if best > published else "more"
    return text + f"Else a fused operator hides {direction} than these chunks; its bound is {percent(bound)}."


def _shapes(published: float, least: float, most: float) -> str:
    text = f"Sequences and micro-batches of the grid give {percent(least)} to {percent(most)}, "
    if least <= published <= most:
        return text + "so they alone could explain the difference, and the published gain does not test the model. "
    missed = max(least - published, published - most)
    return text + f"so they leave at least {100 * missed:.2f} points unexplained. "


def percent(share: float) -> str:
    """Return a share in percent, such as ``3.20 %``."""
    return f"{100 * share:.2f} %"
