"""Two NCCL ranks on two halves of one NVIDIA card: `python benchmarks/gpu.py --halves --nccl PATH`.

NVIDIA's MPS gives each rank a share of the multiprocessors, so kernels of both run at the same time; NCCL 2.30 and
later lets two ranks share a card. The number of CTAs of a collective is here also the bandwidth of the link. One card
shows the order of streams, launches, copies, bits and the host's time as two cards would; not NVLink, and no NPU.

``--report FOLDER`` writes them as `ascend-parallel report` does: two files without names, to paste into an issue.

Parts, each in processes of its own, so that a part that hangs takes no other along:

    layers    one forward of each layer: milliseconds of the device and of the host, plain, by hand and overlapped
    symm      the same of torch's async operators (symmetric memory), where the layer has one
    graph     the same in CUDA graphs: what the device takes where the host takes nothing
    profile   kernels, launches and copies of one forward and backward of each layer on rank 0
    steps     whole steps of Megatron's GPT, with the bits of its loss and gradients
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import itertools
import json
import logging
import os
import platform
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measuring import deciding, in_turn, milliseconds, on_ranks, ratio, settings_of, table, with_state

import ascend_parallel
from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.cli.output import needs_folder
from ascend_parallel.cli.report.command import complete, write
from ascend_parallel.cli.report.redaction import Redaction
from ascend_parallel.tuning.launch.ranks import RankError

RANKS, PLAIN = 2, "plain"
CHANGED = ("every cut changes the matmul's bits", "these chunks change the matmul's bits")  # in the log
AGAIN = "plain, again"  # the control: a step whose own bits change says nothing about chunks
PARTS = ("layers", "symm", "graph", "profile", "steps")
SILENCE = 30.0  # seconds without progress after which a rank prints its stacks and ends
PART_LIMIT = 100.0
Way = Callable[[], torch.Tensor]


def run_halves(options: dict[str, Any], file: Path | None, folder: Path | None) -> None:
    """Run the parts that `options` name, for each number of CTAs; print tables, and write the figures to `file`.

    folder: for a report, which names nobody.
    """
    found: dict[str, Any] = {"options": options, "parts": {}}
    names = [name.strip() for name in options["parts"].split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--parts {','.join(unknown)}: give some of {', '.join(PARTS)}")
    if folder is not None:
        needs_folder("--report", folder)
        folder.mkdir(exist_ok=True)
    on_cpu = options["device"] == "cpu"
    with mps(options):
        for ctas, name in itertools.product(["0"] if on_cpu else options["ctas"].split(","), names):
            chosen = f"{ctas} CTAs" if int(ctas) else "CTAs as NCCL chooses"
            start, title = time.monotonic(), f"{name}, {'gloo' if on_cpu else chosen}"
            with _environment(options, ctas):
                try:
                    part = on_ranks("halves:rank", RANKS, limit=PART_LIMIT, part=name, options=options, title=title)
                except RankError as error:  # a hang of the card's schedule is a result too
                    part = {"error": str(error)}
            found["parts"][title] = part
            part["seconds"] = round(time.monotonic() - start, 1)
            texts = [f"FAILED: {part['error']}"] if "error" in part else part["texts"]
            print(f"\n## {title}", *texts, f"({part['seconds']:.0f} s)", sep="\n", flush=True)
            if file is not None:
                file.write_text(json.dumps(found, indent=1) + "\n")
            if folder is not None:
                write(complete(*report_of(found), Redaction.of(os.environ)), folder)


def report_of(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts and sections of a report; its title, each section and its JSON say that there is one card."""
    options, parts = found["options"], found["parts"]
    card = next((part["machine"]["card"] for part in parts.values() if "machine" in part), "NVIDIA card")
    device, place, count = f"two halves of one {card}: one GPU, not two", "two halves of one card", 1
    if options["device"] == "cpu":
        device, place, count = "CPUs, in place of two halves of a card: no figure of a GPU", "on CPUs", 0
    facts = {"ranks": RANKS, "device": device, "accelerators": count, "quick": False, "options": options}
    return facts, {f"{title}, {place}": part for title, part in parts.items()}


@contextlib.contextmanager
def mps(options: dict[str, Any]) -> Iterator[None]:
    """Run NVIDIA's MPS with folders of its own, which two processes of one card need to run at the same time."""
    if options["device"] == "cpu":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="halves-mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            Path(path).mkdir()
        with mock.patch.dict(os.environ, own):
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)
            try:
                yield
            finally:
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=30)


@contextlib.contextmanager
def _environment(options: dict[str, Any], ctas: str) -> Iterator[None]:
    """Set what the ranks read: the share of the card, NCCL's library and its CTAs."""
    own = {}
    if options["device"] != "cpu":
        own = {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(options["share"]),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        if int(ctas):
            own["NCCL_MAX_CTAS"] = ctas
        if options["priority"]:
            own["TORCH_NCCL_HIGH_PRIORITY"] = "1"
        if options["nccl"]:
            own["LD_PRELOAD"] = options["nccl"]
    with mock.patch.dict(os.environ, own):
        yield


# ---- a rank ----------------------------------------------------------------------------------------------


def rank(group: dist.ProcessGroup, part: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a part on this rank; return its texts and figures."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options["connections"])
    alive(f"{part} begins")
    faulthandler.enable()
    machine = _machine(options)
    if options["device"] == "cuda":
        torch.cuda.set_device(0)
        group = dist.new_group(backend="nccl")
    run = {"layers": _layers, "symm": _symm, "graph": _graphs, "profile": _profiles, "steps": _steps}[part]
    more, figures = run(group, options)
    faulthandler.cancel_dump_traceback_later()
    texts = [", ".join(f"{name} {value}" for name, value in machine.items()), *more]
    return {"machine": machine, "texts": texts, "figures": figures}


def alive(what: str) -> None:
    """Say what this rank does now; it prints its stacks and ends if it says nothing for `SILENCE` seconds."""
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
    faulthandler.dump_traceback_later(SILENCE, exit=True)


def _machine(options: dict[str, Any]) -> dict[str, str]:
    """Return what the figures are of: the card, its halves, what communicates, and the versions of all of it."""
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    if options["device"] == "cpu":
        none = dict.fromkeys(("card", "halves", "driver", "CTAs"), "none")
        return {**none, "backend": "gloo", **versions, "figures": "of no device: the program only"}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
    ).stdout.strip()
    version = ctypes.c_int()  # of the library that is loaded; torch.cuda.nccl.version() is that of torch's build
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    nccl = f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"
    return {
        "card": torch.cuda.get_device_name(0),
        "halves": f"two of one card (MPS: {options['share']} % of its multiprocessors for each rank)",
        "driver": driver,
        "CTAs": os.environ.get("NCCL_MAX_CTAS", "NCCL's own"),
        "backend": f"NCCL {nccl}",
        **versions,
        "CUDA_DEVICE_MAX_CONNECTIONS": str(options["connections"]),
        "NCCL's streams": "of high priority" if options["priority"] else "of usual priority",
    }


def synchronize(options: dict[str, Any]) -> None:
    """Wait for the device."""
    if options["device"] == "cuda":
        torch.cuda.synchronize()


# ---- one forward of a layer, by hand and overlapped ------------------------------------------------------


class Operands:
    """One rank's operands of a layer, and the ways to run its forward.

    kind            x                   w [N, K]
    row             [M, 4 H / R]        [H, 4 H / R]
    row, sequence   [M, 4 H / R]        [H, 4 H / R]     the result has M / R rows
    column, sequence   [M / R, H]       [4 H / R, H]
    """

    def __init__(self, kind: str, group: dist.ProcessGroup, options: dict[str, Any]) -> None:
        """Draw the operands."""
        rows, hidden, device = options["rows"], options["hidden"], options["device"]
        self.kind, self.group, self.rank = kind, group, group.rank()
        inner = 4 * hidden // RANKS
        m, n, k = (rows // RANKS, inner, hidden) if kind.startswith("column") else (rows, hidden, inner)
        torch.manual_seed(self.rank)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.x = torch.randn(m, k, device=device, dtype=dtype)
        self.w = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        self.gathered = self.x.repeat(RANKS, 1) if kind.startswith("column") else self.x

    def matmul(self) -> torch.Tensor:
        """Multiply what this rank has to multiply, without communication."""
        return self.gathered @ self.w.t()

    def plain(self) -> torch.Tensor:
        """Run torch's matmul and collective, one after another."""
        x, w, group = self.x, self.w, self.group
        if self.kind.startswith("column"):
            gathered = x.new_empty(RANKS * x.shape[0], x.shape[1])
            dist.all_gather_into_tensor(gathered, x, group=group)
            return gathered @ w.t()
        y = x @ w.t()
        if "sequence" not in self.kind:
            dist.all_reduce(y, group=group)
            return y
        own = y.new_empty(y.shape[0] // RANKS, y.shape[1])
        dist.reduce_scatter_tensor(own, y, group=group)
        return own

    def ours(self, settings: Settings) -> torch.Tensor:
        """Run this package's layer."""
        linear = column_linear if self.kind.startswith("column") else row_linear
        with torch.no_grad():
            return linear(
                self.x, self.w, group=self.group, settings=settings, sequence_parallel="sequence" in self.kind
            )

    def by_hand(self) -> dict[str, Way]:
        """Return the ways that a program written for this layer alone could take."""
        ways: dict[str, Callable[[int], torch.Tensor]] = {"chunks": self._reduced}
        if "sequence" in self.kind:
            ways = {"chunks": self._scattered}
        if self.kind.startswith("column"):
            ways = {"sends": self._sent, "chunk-major": self._through_buffers}
        made = {
            f"by hand, {name} {count}": functools.partial(way, count) for name, way in ways.items() for count in (2, 4)
        }
        return {**made, **({"by hand, one gather": self._gathered_once} if "sends" in ways else {})}

    def _reduced(self, count: int) -> torch.Tensor:
        y, works = self.x.new_empty(self.x.shape[0], self.w.shape[0]), []
        for x_c, y_c in zip(self.x.chunk(count), y.chunk(count), strict=True):
            torch.mm(x_c, self.w.t(), out=y_c)
            works.append(dist.all_reduce(y_c, group=self.group, async_op=True))
        return _waited(works, y)

    def _scattered(self, count: int) -> torch.Tensor:
        m, n = self.x.shape[0] // RANKS, self.w.shape[0]
        y, works, kept = self.x.new_empty(m, n), [], []
        w = self.w.t().expand(RANKS, -1, -1)
        for x_c, y_c in zip(self.x.view(RANKS, m, -1).chunk(count, 1), y.chunk(count), strict=True):
            part = torch.bmm(x_c, w)
            kept.append(part)
            works.append(dist.reduce_scatter_tensor(y_c, part.flatten(0, 1), group=self.group, async_op=True))
        return _waited(works, y)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        m = self.x.shape[0]
        return self.x.new_empty(RANKS, m, self.x.shape[1]), self.x.new_empty(RANKS, m, self.w.shape[0]), m

    def _sent(self, count: int) -> torch.Tensor:
        gathered, y, _ = self._places()
        other, works = 1 - self.rank, []
        for x_c, place in zip(self.x.chunk(count), gathered[other].chunk(count), strict=True):
            sends = [dist.P2POp(dist.isend, x_c, group=self.group, group_peer=other)]
            sends.append(dist.P2POp(dist.irecv, place, group=self.group, group_peer=other))
            works.append(dist.batch_isend_irecv(sends))
        torch.mm(self.x, self.w.t(), out=y[self.rank])
        chunks = zip(works, gathered[other].chunk(count), y[other].chunk(count), strict=True)
        for works_c, x_c, y_c in chunks:
            _waited(works_c, y_c)
            torch.mm(x_c, self.w.t(), out=y_c)
        return y.flatten(0, 1)

    def _through_buffers(self, count: int) -> torch.Tensor:
        _, y, _ = self._places()
        parts = []
        for x_c in self.x.chunk(count):
            part = x_c.new_empty(RANKS * x_c.shape[0], x_c.shape[1])
            parts.append((part, dist.all_gather_into_tensor(part, x_c, group=self.group, async_op=True)))
        for (part, work), y_c in zip(parts, y.chunk(count, 1), strict=True):
            work.wait()
            y_c.copy_(torch.mm(part, self.w.t()).view_as(y_c))
        return y.flatten(0, 1)

    def _gathered_once(self) -> torch.Tensor:
        gathered, y, _ = self._places()
        work = dist.all_gather_into_tensor(gathered.flatten(0, 1), self.x, group=self.group, async_op=True)
        torch.mm(self.x, self.w.t(), out=y[self.rank])
        work.wait()
        torch.mm(gathered[1 - self.rank], self.w.t(), out=y[1 - self.rank])
        return y.flatten(0, 1)


KINDS = ("row", "row, sequence", "column, sequence")


def _waited(works: Sequence[Any], y: torch.Tensor) -> torch.Tensor:
    for work in works:
        work.wait()
    return y


def _timed(ways: dict[str, Way], options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of the device and of the host of one call of each way, medians of the rounds.

    A round runs each way `repeats` times; a call's time on the device is that of the slowest rank.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    repeats = options["repeats"]
    for index in range(-1, options["rounds"]):
        for name, way in ways.items():
            alive(f"round {index + 1}, {name}")
            synchronize(options)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                way()
            host = time.perf_counter() - start
            synchronize(options)
            device = time.perf_counter() - start
            if index >= 0:
                times[name].append((1e3 * device / repeats, 1e3 * host / repeats))
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    middle = slowest.median(dim=1).values.tolist()
    return {name: (device, host) for name, (device, host) in zip(ways, middle, strict=True)}


def _compared(
    kind: str, ways: dict[str, Way], like: torch.Tensor, options: dict[str, Any]
) -> tuple[list[list[str]], dict[str, Any]]:
    """Check and time ways; return lines of the table, and the figures."""
    bits = {}
    for name, way in ways.items():
        alive(f"{kind}: {name}")
        results = [way() for _ in range(3)]
        if results[0].shape == like.shape and name != "matmul alone":
            for result in results:
                torch.testing.assert_close(result.float(), like.float(), rtol=3e-2, atol=3e-2)
            bits[name] = "equal" if all(torch.equal(result, like) for result in results) else "other"
        synchronize(options)
    times = _timed(ways, options)
    rows = [
        [kind, name, f"{device:.3f}", f"{host:.3f}", f"{times[PLAIN][0] / device:.3f}", bits.get(name, "")]
        for name, (device, host) in times.items()
    ]
    return rows, {
        name: {"device_ms": device, "host_ms": host, "bits": bits.get(name)} for name, (device, host) in times.items()
    }


HEADS = ("layer", "way", "ms", "host, ms", "plain / it", "bits of plain")


def _layers(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    rows, figures = [], {}
    for kind in KINDS:
        operands = Operands(kind, group, options)
        ways: dict[str, Way] = {"matmul alone": operands.matmul, PLAIN: operands.plain, **operands.by_hand()}
        for count in (1, 2, 4):
            ways[f"ours, {count}"] = functools.partial(operands.ours, Settings(num_chunks=count))
        begin = time.monotonic()
        more, figures[kind] = _compared(kind, ways, operands.plain(), options)
        rows += more
        alive(f"{kind}: {time.monotonic() - begin:.1f} s")
    return [_sizes(options), table(HEADS, rows)], figures


def _sizes(options: dict[str, Any]) -> str:
    sizes = f"{options['rows']} rows, hidden {options['hidden']}, 4 x hidden inside"
    return f"{sizes}, one forward; {options['rounds']} rounds of {options['repeats']} calls"


def _symm(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Time torch's async operators beside plain and ours, where the backend has symmetric memory."""
    if options["device"] == "cpu":
        return ["torch's async operators have no CPU"], {}
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    alive("symmetric memory")
    enable_symm_mem_for_group(group.group_name)
    rows, figures = [], {}
    for kind in KINDS[1:]:
        operands = Operands(kind, group, options)
        x, w, name = operands.x, operands.w, group.group_name

        def gathers(x: torch.Tensor = x, w: torch.Tensor = w, name: str = name) -> torch.Tensor:
            return torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name, return_A=False)[1][0]

        def scatters(x: torch.Tensor = x, w: torch.Tensor = w, name: str = name) -> torch.Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)

        ways: dict[str, Way] = {
            PLAIN: operands.plain,
            "torch, async": gathers if kind.startswith("column") else scatters,
        }
        for count in (2, 4):
            ways[f"ours, {count}"] = functools.partial(operands.ours, Settings(num_chunks=count))
        more, figures[kind] = _compared(kind, ways, operands.plain(), options)
        rows += more
    return [_sizes(options), table(HEADS, rows)], figures


def _graphs(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Capture one forward of each way, replay it, and compare the bits."""
    if options["device"] == "cpu":
        return ["a CPU captures no graph"], {}
    rows, figures = [], {}
    for kind in KINDS:
        operands = Operands(kind, group, options)
        ways: dict[str, Way] = {PLAIN: operands.plain, **operands.by_hand()}
        for count in (2, 4):
            ways[f"ours, {count}"] = functools.partial(operands.ours, Settings(num_chunks=count))
        replays = {}
        for name, way in ways.items():
            alive(f"{kind}: capture of {name}")
            replays[name] = _captured(way)
        more, figures[kind] = _compared(kind, replays, operands.plain().clone(), options)
        rows += more
    return [_sizes(options), table(HEADS, rows)], figures


def _captured(way: Way) -> Way:
    """Return what replays a way as a graph; three calls warm up, and find out about bits."""
    for _ in range(3):
        way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = way()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


# ---- profiles --------------------------------------------------------------------------------------------


def _profiles(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    rows, figures, kernels = [], {}, []
    for kind in KINDS:
        operands = Operands(kind, group, options)
        x = operands.x.detach().requires_grad_()
        w = operands.w.detach().requires_grad_()
        linear = column_linear if kind.startswith("column") else row_linear

        def both(count: int, x: Any = x, w: Any = w, linear: Any = linear, kind: str = kind) -> None:
            settings = Settings(num_chunks=count)
            y = linear(x, w, group=group, settings=settings, sequence_parallel="sequence" in kind)
            torch.autograd.grad(y, (x, w), torch.ones_like(y))

        runs: dict[str, Callable[[], object]] = {
            PLAIN: operands.plain,
            "ours 1, both passes": functools.partial(both, 1),
        }
        runs |= {f"ours {count}, both passes": functools.partial(both, count) for count in (2, 4)}
        runs["ours 4"] = functools.partial(operands.ours, Settings(num_chunks=4))
        for name, run in runs.items():
            alive(f"profile of {kind}, {name}")
            line, found = _profile(run, options)
            rows.append([kind, name, *line])
            figures[f"{kind}: {name}"] = found
            if name.startswith("ours 4"):
                kernels.append(f"{kind}, {name}: " + "; ".join(f"{number} x {each}" for each, number in found["names"]))
    heads = ["layer", "run", "launches", "copies", "matmuls, us", "copies, us", "NCCL, us", "other, us"]
    heads += ["NCCL under matmuls, us", "idle, us", "span, us"]
    return ["one call on rank 0:", table(heads, rows), *kernels], figures


def _profile(run: Callable[[], object], options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    for _ in range(3):
        run()
    synchronize(options)
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options["device"] == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        synchronize(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    parts: dict[str, list[dict[str, Any]]] = {"matmul": [], "copy": [], "nccl": [], "other": []}
    for each in on_device:
        parts[_sort(each)].append(each)
    busy, ends = _length(on_device), [(each["ts"], each["ts"] + each["dur"]) for each in on_device] or [(0.0, 0.0)]
    span = max(end for _, end in ends) - min(begin for begin, _ in ends)
    under = _length(parts["nccl"]) + _length(parts["matmul"]) - _length(parts["nccl"] + parts["matmul"])
    sums = [*(_length(parts[name]) for name in parts), under, span - busy, span]
    names = Counter(each["name"].partition("(")[0].removeprefix("void ")[:60] for each in on_device)
    found = {"launches": len(on_device), "copies": len(parts["copy"]), "us": sums, "names": names.most_common()}
    return [str(len(on_device)), str(len(parts["copy"])), *(f"{each:.0f}" for each in sums)], found


def _sort(event: dict[str, Any]) -> str:
    name = event["name"].lower()
    if "nccl" in name:
        return "nccl"
    if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma")):
        return "matmul"
    return "copy" if event["cat"] == "gpu_memcpy" or "copy" in name or "catarray" in name else "other"


def _length(events: Sequence[dict[str, Any]]) -> float:
    total, end = 0.0, float("-inf")
    for begin, stop in sorted((each["ts"], each["ts"] + each["dur"]) for each in events):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


# ---- steps of a GPT --------------------------------------------------------------------------------------


def _steps(group: dist.ProcessGroup, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel

    rows, figures = [], {}
    reasons = Reasons()
    on_cpu = options["device"] == "cpu"
    with contextlib.ExitStack() as stack:
        if on_cpu:
            stack.enter_context(megatron_on_cpu())
        else:
            stack.enter_context(mock.patch.object(dist, "new_group", functools.partial(_nccl_group, dist.new_group)))
        start_model_parallel(RANKS)
        for mode in options["modes"].split(","):
            more, figures[mode] = _gpt(mode, options)
            rows += more
        if on_cpu:
            end_model_parallel()
    heads = ("mode", "COC_PARALLEL_NUM", "ms", "plain / it", "95 %", "host, ms", "loss and gradients with other bits")
    shape = f"GPT of {options['layers']} layers, hidden {options['hidden']}, {options['heads']} heads, "
    shape += f"{options['rows']} tokens in {options['batch']} sequences"
    figures["log"] = reasons.taken()
    decided = [text[:200] for text in figures["log"] if "on this machine" in text or "=auto: " in text]
    changed = [text for text in figures["log"] if any(words in text for words in CHANGED)]
    figures["bits_promised"] = not changed
    promise = "equal bits are promised: no cut changed a matmul's bits in the probe"
    if changed:
        promise = f"equal bits are not promised: the probe names {len(changed)} shapes whose bits chunks change here"
    return [shape, table(heads, rows), promise, *decided[:14]], figures


class Reasons(logging.Handler):
    """Collects why kernels and chunks were taken."""

    def __init__(self) -> None:
        """Listen to the package's log."""
        super().__init__(logging.INFO)
        self._said: dict[str, None] = {}
        logging.getLogger("ascend_parallel").setLevel(logging.INFO)
        logging.getLogger("ascend_parallel").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._said[record.getMessage()] = None

    def taken(self) -> list[str]:
        """Return the messages, and stop listening."""
        logging.getLogger("ascend_parallel").removeHandler(self)
        return list(self._said)


def _nccl_group(new_group: Callable[..., Any], *args: Any, backend: str | None = None, **options: Any) -> Any:
    return new_group(*args, backend=backend or "nccl", **options)


def _gpt(mode: str, options: dict[str, Any]) -> tuple[list[list[str]], dict[str, Any]]:
    from megatron_cpu import finalize_gradients, next_token_loss, small_gpt
    from training import forwards

    dtype = torch.float32 if options["device"] == "cpu" else torch.bfloat16
    alive(f"{mode}: the model")
    seq = options["rows"] // options["batch"]
    model = small_gpt(
        num_layers=options["layers"],
        hidden=options["hidden"],
        heads=options["heads"],
        seq=seq,
        vocab=8192,
        sequence_parallel=mode != "all-reduce",
        dtype=dtype,
    ).to(options["device"])
    tokens = torch.randint(8192, (options["batch"], seq + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(options["device"])
    hosts: list[float] = []

    def step() -> torch.Tensor:
        start = time.perf_counter()
        for parameter in model.parameters():
            parameter.grad = None
        loss = next_token_loss(model, tokens)
        loss.backward()
        finalize_gradients(model)
        hosts.append(time.perf_counter() - start)
        return loss.detach()

    def clock() -> float:
        synchronize(options)
        alive("a step")
        return time.perf_counter()

    ascend_parallel.configure(num_chunks=1)
    states = {PLAIN: forwards()}
    for name in options["chunks"].split(","):
        ascend_parallel.configure(**settings_of(name))
        states[name] = forwards()
        ascend_parallel.configure(num_chunks=1)
    runs = {name: lambda state=state: with_state(state, step) for name, state in states.items()}
    first, results, host = {}, {}, {}

    def kept(name: str) -> dict[str, torch.Tensor]:
        made: list[torch.Tensor] = []
        with_state(states[name], lambda: made.append(step()))
        gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
        return {"loss": made[0].clone(), **gradients}

    for name, function in runs.items():
        alive(f"{mode}: {name}, the first steps")
        begin = clock()
        function()
        first[name] = clock() - begin
        for _ in range(2 + deciding(name)):
            function()
            alive(f"{mode}: {name}")
        hosts.clear()
        for _ in range(3):
            with_state(states[name], step)
            synchronize(options)
        host[name] = 1e3 * median(hosts)
        results[name] = kept(name)
    times = in_turn(runs, options["rounds"], warm_up=1, clock=clock)
    results[AGAIN] = kept(PLAIN)
    rows, figures = [], {}
    for name in results:
        other = [key for key, each in results[name].items() if not torch.equal(each, results[PLAIN][key])]
        bits = f"{len(other)} of {len(results[name])}"
        if name == AGAIN:
            rows.append([mode, name, *[""] * 4, bits])
            figures[name] = {"other_bits": other[:8]}
            continue
        rows.append(
            [mode, name, milliseconds(times[name], 2), *ratio(times[PLAIN], times[name]), f"{host[name]:.1f}", bits]
        )
        figures[name] = {"seconds": times[name], "host_ms": host[name], "first": first[name], "other_bits": other[:8]}
    return rows, figures
