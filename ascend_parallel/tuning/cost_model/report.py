"""Return a prediction as plain values for scripts, and print it as tables."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console

from ascend_parallel.ops.call import EXPERT_EXCHANGE
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.text import dtype_name, size_of
from ascend_parallel.text.tables import FittedTable, terminal_table
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.layer_passes import (
    BEST,
    BOUND,
    EQUAL,
    IN_TURN,
    MEGATRON,
    ChunkSchedule,
    LinearPass,
    operator_of,
)
from ascend_parallel.tuning.cost_model.layers import TransformerLayerTime
from ascend_parallel.tuning.cost_model.memory import step_memory
from ascend_parallel.tuning.cost_model.models import Batch, Model, uneven_splits
from ascend_parallel.tuning.cost_model.step import Layout, parts_of, ranks_of, step_time
from ascend_parallel.tuning.e_bound import e_bound
from ascend_parallel.tuning.step_time.throughput import Throughput, rates_in_words

# The schedules that the tables compare, by displayed name.
SCHEDULES = {
    "in turn": IN_TURN,
    "serial": MEGATRON,
    "2 chunks": ChunkSchedule(name="2"),
    "4 chunks": ChunkSchedule(name="4"),
    "8 chunks": ChunkSchedule(name="8"),
    "2, regions": ChunkSchedule(name="2", region=True),
    "4, regions": ChunkSchedule(name="4", region=True),
    "8, regions": ChunkSchedule(name="8", region=True),
    "best equal": EQUAL,
    "best": BEST,
    "bound": BOUND,
}
LEGEND = """\
serial: as Megatron-core runs the pass (one chunk; the column layer's backward already runs its collectives beside
the matmuls). best: the best chunk sizes. gain: serial / best - 1. bound: lower bound for all sizes, layer
by layer. regions: chunks through all that stands between two attentions (COC_REGION=1); they may pass that bound.
E_bound: the share that is hidden of all that a layer's computation and communication could hide of each other. Times
are predictions of a model, not measurements; docs/predict.md has its formulas and sources."""


def gain(before: float, after: float) -> float:
    """Return the gain in throughput as a share: before / after - 1."""
    return before / after - 1 if after else 0.0


def predict(model: Model, batch: Batch, layout: Layout, hardware: Hardware) -> dict[str, Any]:
    """Return the prediction as plain values; times in seconds, gains as shares over "serial"."""
    costs = CostModel(hardware)
    layer, ends = parts_of(costs, model, batch)
    calls = [
        *layer.linear_passes[FORWARD],
        ends.linear_passes[FORWARD],
        *layer.linear_passes[BACKWARD],
        ends.linear_passes[BACKWARD],
    ]
    assumed = sorted(name for name, number in hardware.numbers.items() if number.assumed)
    steps, ranks = _steps(costs, model, batch, layout), ranks_of(batch, layout)
    return {
        "model": model.name,
        "parameters": model.count_parameters(),
        "active_parameters": model.count_active(),
        "hardware": hardware.name,
        "link_bits_per_second": hardware.link.rate if hardware.link else None,
        "tp": batch.tp,
        "dp": layout.dp,
        "pp": layout.pp,
        "cp": batch.cp,
        "cp_exchange": batch.context if batch.cp > 1 else None,
        "cp_groups": layer.context_groups,
        "ep": batch.ep,
        "etp": batch.etp,
        "ranks": ranks,
        "virtual_stages": layout.virtual_stages,
        "zero": layout.zero,
        "sequence": batch.sequence,
        "micro_batch": batch.micro_batch,
        "micro_batches": layout.micro_batches,
        "sequence_parallel": batch.sequence_parallel,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "recompute": layout.recompute,
        "recompute_layers": layout.recompute_layers,
        "dtype": dtype_name(batch.dtype),
        "assumed": assumed,
        "rounded_up": uneven_splits(model, batch),
        "calls": [*map(_call, calls), *_expert_calls(layer)],
        "layer": _layer(layer, layout),
        "step": steps,
        "verdict": _verdict(layer, layout, steps["best"], ranks),
        "memory": _memory(model, batch, layout, hardware),
    }


def show(prediction: dict[str, Any], console: Console) -> None:
    """Print a prediction as tables."""
    mode = "sequence parallel" if prediction["sequence_parallel"] else "all-reduce"
    mode = mode if prediction["tp"] > 1 else "no layer is split"
    console.print(
        f"{prediction['model']} ({_sizes(prediction)}) on {prediction['hardware']}, "
        f"TP {prediction['tp']} x CP {prediction['cp']}{_context(prediction)} x "
        f"DP {prediction['dp']} x PP {prediction['pp']}{_pipeline(prediction)} = "
        f"{prediction['ranks']} ranks, {_experts(prediction)}{mode}, "
        f"sequence {prediction['sequence']}, micro-batch {prediction['micro_batch']}, {prediction['dtype']}, "
        f"recompute {_recompute(prediction)}",
        markup=False,
    )
    for words in prediction["rounded_up"]:
        console.print(f"note: not divisible, so rounded up: {words}", markup=False)
    if any(layer["gain"] for layer in prediction["layer"].values()):
        console.print(_calls_table(prediction["calls"]))
        console.print(_totals_table(prediction))
        console.print(LEGEND, markup=False)
    else:
        console.print(_without_gain(prediction), markup=False)
    for words in summary(prediction):
        console.print(words, markup=False)


def _sizes(prediction: dict[str, Any]) -> str:
    total, active = (f"{prediction[name] / 1e9:.1f}B" for name in ("parameters", "active_parameters"))
    return total if prediction["active_parameters"] == prediction["parameters"] else f"{total}, {active} active"


def _context(prediction: dict[str, Any]) -> str:
    """Return in words how keys reach the queries of ranks that share a sequence; "": none do."""
    if prediction["cp"] == 1:
        return ""
    groups = f", {prediction['cp_groups']} groups" if prediction["cp_groups"] > 1 else ""
    return f" ({prediction['cp_exchange']}{groups})"


def _pipeline(prediction: dict[str, Any]) -> str:
    """Return the schedule of a pipeline in words; "": there is none."""
    return "" if prediction["pp"] == 1 else f" ({prediction['schedule']}, {prediction['micro_batches']} micro-batches)"


def _recompute(prediction: dict[str, Any]) -> str:
    layers = prediction["recompute_layers"]
    every = prediction["recompute"] == "none" or not layers
    return str(prediction["recompute"]) if every else f"{prediction['recompute']}, {layers} layers a stage"


def _experts(prediction: dict[str, Any]) -> str:
    """Return the degrees of experts in words; "": the model has none."""
    if prediction["active_parameters"] == prediction["parameters"]:
        return ""
    width = f", width over {prediction['etp']}" if prediction["etp"] > 1 else ""
    return f"experts over EP {prediction['ep']}{width}, "


def summary(prediction: dict[str, Any]) -> list[str]:
    """Return the verdict in lines: the step, what is hidden and exposed, memory by kind, and what is assumed."""
    verdict, best, memory = prediction["verdict"], prediction["step"]["best"], prediction["memory"]
    fits = {None: "the card's memory is not known", True: "fits", False: "does not fit"}[memory["fits"]]
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    lines = [
        f"verdict: {verdict['seconds']:.4g} s a step with the best chunks, {verdict['gain']:+.2%} over serial; "
        f"{rates_in_words(verdict['tokens_per_second_per_card'], 'tokens', verdict['mfu'])}. "
        f"The slowest of {prediction['ranks']} cards computes {verdict['slowest']:.1%} slower than the mean. "
        "Assumed: no broken card, no time of the host beside the launches",
        *(f"note: {note}" for note in prediction.get("notes", ())),
        f"collectives inside a layer, forward and backward: {_ms(verdict['exposed'])} ms exposed, "
        f"{_ms(verdict['communication'] - verdict['exposed'])} ms hidden; serial: {_ms(verdict['exposed_serial'])} ms "
        "exposed",
        f"sums of gradients: {_ms(best['gradients'])} ms exposed, {_ms(best['gradients_hidden'])} ms hidden; "
        f"update and gathers of weights: {_ms(best['optimizer'])} ms",
        f"memory of the fullest card: {size_of(memory['total'])}, {fits}: "
        + ", ".join(f"{kind} {size_of(memory[kind])}" for kind in kinds),
    ]
    if prediction["assumed"]:
        lines.append(f"assumed, without a public source: {', '.join(prediction['assumed'])} (--sources)")
    return lines


def show_sources(hardware: Hardware, console: Console) -> None:
    """Print every number of a hardware with its source."""
    rows = [(name, number.value, number.words) for name, number in sorted(hardware.numbers.items())]
    console.print(terminal_table(f"{hardware.name}: {hardware.title}", ("number", "value", "source"), rows))


def sizes_in_words(sizes: tuple[int, ...]) -> str:
    """Return ``256x4`` for four chunks of 256 rows, ``512 256x2`` for one of 512 and two of 256."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return " ".join(str(size) if count == 1 else f"{size}x{count}" for size, count in runs)


def _call(part: LinearPass) -> dict[str, Any]:
    shape, matmul, best = part.shape, part.beside, part.best
    k, n = (shape.k, shape.n) if part.direction == FORWARD else (shape.n, shape.k)
    return {
        "layer": part.linear.name,
        "pass": part.direction,
        "operator": operator_of(part),
        "m": shape.rows,
        "k": k,
        "n": n,
        "rows": matmul.rows if matmul else None,
        "computation": part.computation,
        "communication": part.communication,
        "in_turn": part.in_turn,
        "serial": part.megatron,
        "equal_sizes": list(best.equal) if best else None,
        "equal": best.equal_seconds if best else None,
        "sizes": list(best.sizes) if best else None,
        "best": BEST.seconds(part),
        "bound": part.bound,
        "gain": gain(part.megatron, BEST.seconds(part)),
    }


def _expert_calls(layer: TransformerLayerTime) -> list[dict[str, Any]]:
    """Return the passes of a layer's experts as `_call` returns those of linear layers; m, k, n: an expert's up."""
    experts = layer.experts
    if experts is None:
        return []
    calls = []
    for direction in (FORWARD, BACKWARD):
        work, groups = experts.work(direction), experts.best_groups(direction)
        serial, best, bound = (experts.seconds(direction, schedule, 0.0) for schedule in (MEGATRON, BEST, BOUND))
        calls.append(
            {
                "layer": f"experts, {experts.experts} a rank",
                "pass": direction,
                "operator": EXPERT_EXCHANGE,
                "m": experts.expert_rows,
                "k": layer.model.hidden,
                "n": experts.width,
                "rows": None,
                "computation": work.compute,
                "communication": experts.all_to_alls,
                "in_turn": serial,
                "serial": serial,
                "equal_sizes": None,
                "equal": None,
                "sizes": list(groups) if groups else None,
                "best": best,
                "bound": bound,
                "gain": gain(serial, best),
            }
        )
    return calls


def _layer(layer: TransformerLayerTime, layout: Layout) -> dict[str, Any]:
    def seconds(schedule: ChunkSchedule) -> float:
        return layer.both(schedule, layout.recompute)

    communication = layer.communication(layout.recompute)
    in_turn, serial, result = seconds(IN_TURN), seconds(MEGATRON), {}
    for name, schedule in SCHEDULES.items():
        result[name] = {
            "forward": layer.forward(schedule),
            "backward": layer.backward(schedule, layout.recompute),
            "gain": gain(serial, seconds(schedule)),
            "e_bound": e_bound(seconds(schedule), in_turn, in_turn - communication, communication),
        }
    return result


def _steps(costs: CostModel, model: Model, batch: Batch, layout: Layout) -> dict[str, dict[str, float]]:
    serial = step_time(costs, model, batch, layout, MEGATRON).total
    tokens = batch.sequence * batch.micro_batch * layout.micro_batches * layout.dp
    result = {}
    for name, schedule in SCHEDULES.items():
        step = step_time(costs, model, batch, layout, schedule)
        result[name] = {
            "total": step.total,
            "pipeline": step.pipeline,
            "gradients": step.gradients,
            "optimizer": step.gathers + step.optimizer,
            "gradients_hidden": step.hidden,
            "tokens_per_second": tokens / step.total,
            "gain": gain(serial, step.total),
        }
    return result


def _verdict(layer: TransformerLayerTime, layout: Layout, best: dict[str, float], ranks: int) -> dict[str, float]:
    """Return the step with the best chunks, by card, and its MFU: the share of the peak that the model needs."""
    costs, batch, unit = layer.costs, layer.batch, layer.costs.hardware.matmul
    tokens = best["tokens_per_second"] * best["total"]
    throughput = Throughput(
        seconds=best["total"],
        cards=ranks,
        work=tokens,
        macs=tokens * layer.model.macs_per_token(batch.sequence),
        peak=costs.peak(batch.dtype.itemsize),
    )
    in_turn, communication = layer.both(IN_TURN, layout.recompute), layer.communication(layout.recompute)
    exposed, exposed_serial = (
        max(0.0, layer.both(schedule, layout.recompute) - (in_turn - communication)) for schedule in (BEST, MEGATRON)
    )
    return {
        **throughput.as_dict(),
        "gain": best["gain"],
        "slowest": unit.frequency / costs.hardware.of_slowest(ranks).matmul.frequency - 1,
        "communication": communication,
        "exposed": exposed,
        "exposed_serial": exposed_serial,
    }


def _memory(model: Model, batch: Batch, layout: Layout, hardware: Hardware) -> dict[str, Any]:
    """Return the bytes of the fullest card by kind, and whether they fit; None: its capacity is not known."""
    held = step_memory(model, batch, layout)
    capacity = hardware.memory.capacity or None
    fits = None if capacity is None else held.total <= capacity
    return vars(held) | {"total": held.total, "capacity": capacity, "fits": fits}


def _calls_table(calls: list[dict[str, Any]]) -> FittedTable:
    figures = ("m, k, n", "matmul", "comm", "serial", "best", "gain", "bound")
    rows = [
        (
            call["layer"],
            call["pass"],
            call["operator"],
            f"{call['m']}, {call['k']}, {call['n']}",
            *(_ms(call[key]) for key in ("computation", "communication", "serial", "best")),
            f"{call['gain']:.1%}",
            _ms(call["bound"]),
            sizes_in_words(tuple(call["sizes"])) if call["sizes"] else "-",
        )
        for call in calls
    ]
    heads = ("layer", "pass", "operator", *figures, "rows of each chunk")
    return terminal_table("per layer and direction, milliseconds", heads, rows, right=range(3, 3 + len(figures)))


def _without_gain(prediction: dict[str, Any]) -> str:
    """Say the times of all schedules where they are the same."""
    layer, step = prediction["layer"]["best"], prediction["step"]["best"]
    return (
        f"no schedule of chunks gains anything: no collective runs beside a matmul. Layer: forward "
        f"{_ms(layer['forward'])} ms, backward {_ms(layer['backward'])} ms; step: {_ms(step['total'])} ms, "
        f"{step['tokens_per_second']:.0f} tokens/s. docs/predict.md has the model's formulas and sources"
    )


def _totals_table(prediction: dict[str, Any]) -> FittedTable:
    heads = ("schedule", "forward", "backward", "layer's gain", "E_bound", "step", "step's gain", "tokens/s")
    rows = []
    for name in SCHEDULES:
        layer, step = prediction["layer"][name], prediction["step"][name]
        rows.append(
            (
                name,
                _ms(layer["forward"]),
                _ms(layer["backward"]),
                f"{layer['gain']:+.2%}",
                "-" if layer["e_bound"] is None else f"{layer['e_bound']:.2f}",
                _ms(step["total"]),
                f"{step['gain']:+.2%}",
                f"{step['tokens_per_second']:.0f}",
            )
        )
    return terminal_table("layer and training step, milliseconds", heads, rows, right=range(1, len(heads)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"
