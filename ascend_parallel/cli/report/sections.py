"""The sections of a report. Each that communicates runs in processes of its own, which end at its time limit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascend_parallel.diagnostics.doctor import examine
from ascend_parallel.ops.problem import ALL_GATHER, Problem
from ascend_parallel.patch_control import CONTROL
from ascend_parallel.tuning.bench.results import rows_of
from ascend_parallel.tuning.bench.shapes import as_plain, shape_linears
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import all_hardware
from ascend_parallel.tuning.launch.devices import BACKENDS, CPU
from ascend_parallel.tuning.launch.ranks import PACKAGE, RankError, call_on_ranks
from ascend_parallel.tuning.measured.chunk_plan import this_machine
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown, seconds

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much a report measures on one type of device.

    kibibytes
        Sizes of collectives.
    dtypes, operand
        Of the operators: dtypes; rows of a rank, K and N.
    shapes
        M, K and N of the layers to time: the first half with all-reduces, the second with sequence parallelism, whose M
        is rounded up to a multiple of the ranks.
    hidden, layers, rows
        Of the Llama.
    """

    kibibytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    operand: tuple[int, int, int]
    shapes: tuple[tuple[int, int, int], ...]
    bench_dtype: str
    chunks: tuple[int, ...]
    rounds: int
    hidden: int
    layers: int
    rows: int


ON_CPU = Sizes(
    kibibytes=(1, 64, 1024, 16384),
    dtypes=("float32", "bfloat16"),
    operand=(256, 1024, 512),
    shapes=(
        (512, 512, 512),
        (1024, 512, 1024),
        (1024, 1024, 1024),
        (512, 1024, 512),
        (1024, 1024, 1024),
        (2048, 512, 1024),
    ),
    bench_dtype="float32",
    chunks=(2, 4, 8),
    rounds=5,
    hidden=512,
    layers=2,
    rows=512,
)
ON_DEVICE = Sizes(
    kibibytes=(1, 64, 1024, 16384, 262144),
    dtypes=("float32", "bfloat16", "float16"),
    operand=(1024, 4096, 1024),
    shapes=(
        (2048, 1024, 4096),
        (4096, 1024, 8192),
        (8192, 3584, 8192),
        (2048, 4096, 1024),
        (4096, 4096, 8192),
        (8192, 8192, 8192),
    ),
    bench_dtype="bfloat16",
    chunks=(2, 4, 8),
    rounds=20,
    hidden=4096,
    layers=4,
    rows=4096,
)
QUICK = Sizes(
    kibibytes=(1, 1024),
    dtypes=("float32",),
    operand=(64, 512, 256),
    shapes=((256, 256, 256), (512, 256, 256)),
    bench_dtype="float32",
    chunks=(2,),
    rounds=3,
    hidden=128,
    layers=1,
    rows=256,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: processes, the type of their devices, and how much."""

    ranks: int
    device: str
    quick: bool

    @property
    def sizes(self) -> Sizes:
        """How much to measure."""
        return QUICK if self.quick else ON_CPU if self.device == CPU else ON_DEVICE

    def on_ranks(self, target: str, limit: float, **arguments: Any) -> Any:
        """Call a function on the ranks; see `call_on_ranks`."""
        return call_on_ranks(target, self.ranks, limit=limit, device=self.device, **arguments)


@dataclass(frozen=True)
class Section:
    """A part of the report: its name, its time limit in seconds, and the function that measures within the limit."""

    name: str
    limit: float
    measure: Callable[[Request, float], dict[str, Any]]

    def run(self, request: Request) -> dict[str, Any]:
        """Return the results and the seconds spent; of a section that fails, the error instead of results."""
        start = time.monotonic()
        try:
            results = self.measure(request, self.limit)
        except (RankError, OSError, ValueError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
            results = {"error": f"{type(error).__name__}: {error}"}
        return {**results, "seconds": round(time.monotonic() - start, 1)}


def versions(request: Request, limit: float) -> dict[str, Any]:
    """Return what doctor finds of versions, devices and kernels, and the commit of a checkout."""
    findings = examine(CONTROL).findings
    parts: dict[str, dict[str, str]] = {name: {} for name in ("versions", "devices", "kernels")}
    for finding in findings:
        if finding.section in parts and finding.name != SHARED_MEMORY:
            parts[finding.section][finding.name] = finding.found
    machine = this_machine(request.ranks, torch.device(request.device), BACKENDS[request.device])
    return {**parts, "commit": commit(limit), "machine": {"hardware": machine.hardware, "backend": machine.backend}}


def commit(limit: float) -> str | None:
    """Return the commit of the checkout that this package is imported from; None outside a checkout."""
    root = Path(PACKAGE).resolve().parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=limit, check=True
        )
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short=12", "HEAD") + changed


def links(request: Request, limit: float) -> dict[str, Any]:
    """Return the times of the collectives."""
    sizes = request.sizes
    measured = request.on_ranks(
        "ascend_parallel.cli.report.links:measure", limit, kibibytes=list(sizes.kibibytes), rounds=sizes.rounds
    )
    return {"collectives": measured}


def operators(request: Request, limit: float) -> dict[str, Any]:
    """Return errors and bits of the operators and of the exchange of experts."""
    sizes = request.sizes
    measured: dict[str, Any] = request.on_ranks(
        "ascend_parallel.cli.report.operators:measure",
        limit,
        dtypes=list(sizes.dtypes),
        shape=list(sizes.operand),
        chunks=list(sizes.chunks),
    )
    return {**measured, "operand": list(sizes.operand)}


def bench(request: Request, limit: float) -> dict[str, Any]:
    """Return the passes of the layers: the serial path and every variant, measured and predicted."""
    sizes = request.sizes
    names, cases = [], list[dict[str, Any]]()
    for index, (m, k, n) in enumerate(sizes.shapes):
        sequence_parallel = index >= len(sizes.shapes) // 2
        dtype = getattr(torch, sizes.bench_dtype)
        if sequence_parallel:
            m = -(-m // request.ranks) * request.ranks
        shape, kinds = f"{m},{k},{n}", ("row", "column")
        names += [f"{kind}, {'sequence parallel' if sequence_parallel else 'all-reduce'}" for kind in kinds]
        linears = shape_linears([shape], kinds, request.ranks, sequence_parallel, dtype, request.device)
        cases += [as_plain(linear.shape) for linear in linears]
    measured = request.on_ranks(
        "ascend_parallel.tuning.bench.passes:measure",
        limit,
        cases=cases,
        chunks=list(sizes.chunks),
        fused=True,
        rounds=sizes.rounds,
    )
    hardware = known_hardware(measured["plan"]["machine"]["hardware"])
    rows = rows_of(names, measured["passes"])
    passes = [
        {
            **row.as_dict(),
            "parts": result["parts"],
            "predicted": predicted(result, request.ranks),
            "predicted_parts": of_hardware(hardware, result, request.ranks, sizes.bench_dtype),
        }
        for row, result in zip(rows, measured["passes"], strict=True)
    ]
    return {"dtype": sizes.bench_dtype, "rounds": sizes.rounds, "hardware": hardware, "passes": passes}


def predicted(result: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return the seconds that the cost model predicts for each choice of chunks, from the parts timed alone."""
    operator, m, k, n = (result[name] for name in ("operator", "m", "k", "n"))
    problem, parts = Problem(operator, m, k, n, torch.float32, CPU, ranks), PassBreakdown(**result["parts"])
    return {name: seconds(problem, parts, sizes) for name, sizes in result["sizes"].items()}


def known_hardware(name: str) -> str | None:
    """Return the name of the cost model's hardware for a device's name such as "Ascend910B3"; None: it has none."""
    plain = name.lower().replace("-", "").replace(" ", "")
    return next((known for known in all_hardware() if known.replace("-", "") == plain), None)


def of_hardware(name: str | None, result: dict[str, Any], ranks: int, dtype: str) -> dict[str, float] | None:
    """Return the seconds of matmul and collective that the data of a hardware predict; None without data."""
    if name is None:
        return None
    costs, item = CostModel(all_hardware()[name]), getattr(torch, dtype).itemsize
    m, k, n = (result[size] for size in ("m", "k", "n"))
    moved = m * (k if result["operator"] == ALL_GATHER else n) * item
    return {"matmul": costs.matmul(m, k, n, item), "collective": costs.collective(result["operator"], moved, ranks)}


def step(request: Request, limit: float) -> dict[str, Any]:
    """Return losses and times of training steps of transformers."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    sizes = request.sizes
    with tempfile.TemporaryDirectory(prefix="ascend_parallel-report-") as folder:
        measured: dict[str, Any] = request.on_ranks(
            "ascend_parallel.cli.report.step:measure",
            limit,
            folder=folder,
            hidden=sizes.hidden,
            layers=sizes.layers,
            rows=sizes.rows,
            chunks=list(sizes.chunks[:2]),
            rounds=sizes.rounds,
        )
    return {**measured, "transformers": importlib.metadata.version("transformers")}


SECTIONS = {
    section.name: section
    for section in (
        Section("versions", 60, versions),
        Section("links", 120, links),
        Section("operators", 120, operators),
        Section("bench", 300, bench),
        Section("step", 180, step),
    )
}
