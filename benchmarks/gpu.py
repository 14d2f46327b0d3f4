"""Run the layers of two ranks that share one GPU: bits and errors, times, and what runs under matmuls.

    python benchmarks/gpu.py                         gloo: GPU, host, TCP, host, GPU
    python benchmarks/gpu.py --backend nccl          NCCL 2.30 and later, with NCCL_MULTI_RANK_GPU_ENABLE=1
    python benchmarks/gpu.py --device cpu --hidden 256 --rows 256 --heads 4      the same on CPUs
    python benchmarks/gpu.py --halves --nccl PATH    two halves of the card at the same time: benchmarks/halves.py; PATH
                                                     of libnccl.so.2 of NCCL 2.30 or later, where torch's is older

Row and column layers, without and with sequence parallelism (`row_linear`, `column_linear`), beside torch's matmuls and
collectives in turn ("plain"): which results differ from plain's bits, the largest error against float64, and
milliseconds of forward and backward, interleaved, with the ratio plain / chunks. Then gradients and times of a step of
the decoder of examples/frameworks/torch_tp.py, patched; and, of a row layer's profile, the microseconds in which copies
and other kernels run under a matmul. Two processes share the GPU by turns: kernels of both never run at the same time.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks import state_of, torch_decoder
from halves import PARTS, Reasons, run_halves
from measuring import (
    VARIANTS,
    State,
    deciding,
    in_turn,
    milliseconds,
    on_ranks,
    options_of,
    ratio,
    run,
    settings_of,
    table,
    with_state,
)

import ascend_parallel
from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops.unfinished import plain_tensor

RANKS, PLAIN = 2, "plain"
OWN_PARTS = ("layers", "steps", "streams", "profile")
KINDS = ("row", "row, sequence parallel", "column", "column, sequence parallel")
LAYERS: dict[str, dict[str, Any]] = {
    "2": {"num_chunks": 2},
    "4": {"num_chunks": 4},
    "8": {"num_chunks": 8},
    "4, column backward too": {"num_chunks": 4, "enable_coc_in_column_backward": True},
    "4, split weight gradient": {"num_chunks": 4, "split_weight_gradient": True},
    "4, deterministic": {"num_chunks": 4, "deterministic": True},
}
MATMULS = ("gemm", "nvjet", "cutlass", "xmma")
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Read the command line, run, print."""
    parser = options_of(__doc__, link=False, rounds=15, json=True)
    parser.add_argument("--halves", action="store_true", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--nccl", type=Path, metavar="PATH", help="with --halves: NCCL's library")
    parser.add_argument("--ctas", default="4", help="with --halves: CTAs of a collective, with commas; 0: NCCL's own")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="with --halves: write a report without names")
    parser.add_argument("--priority", action="store_true", help="with --halves: TORCH_NCCL_HIGH_PRIORITY=1")
    parser.add_argument("--share", type=int, default=45, help="with --halves: per cent of the card for each rank")
    parser.add_argument("--modes", default="all-reduce,sequence parallel", help="with --halves: of the steps")
    parser.add_argument("--repeats", type=int, default=10, help="with --halves: calls of a layer in a round")
    parser.add_argument("--batch", type=int, default=4, help="with --halves: sequences of the steps")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--plugin", help="a module to import first, which registers the backend")
    parser.add_argument("--parts", help="with commas; default: all")
    parser.add_argument("--chunks", default="2,4,8,4 region,auto,auto region=auto", help=VARIANTS + "; of the decoder")
    parser.add_argument("--connections", type=int, help="CUDA_DEVICE_MAX_CONNECTIONS; default: 1, with --halves 8")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="with commas")
    for name, size in {"hidden": 4096, "rows": 4096, "layers": 2, "heads": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--traces", type=Path, help="keep rank 0's traces in this folder")
    options = vars(parser.parse_args())
    options["traces"] = options["traces"] and str(options["traces"].absolute())
    options["nccl"] = options["nccl"] and str(options["nccl"].absolute())
    options["connections"] = options["connections"] or (8 if options["halves"] else 1)
    options["parts"] = options["parts"] or ",".join(PARTS if options["halves"] else OWN_PARTS)
    file, folder = options.pop("json"), options.pop("report")
    if options["halves"]:
        run_halves(options, file, folder)
        return
    if file is not None or folder is not None:
        raise ValueError(f"{'--json' if file else '--report'} needs --halves")
    for text in on_ranks("gpu:rank", RANKS, limit=1200, options=options):
        print(text)


def rank(group: dist.ProcessGroup, options: dict[str, Any]) -> list[str]:
    """Run the parts on this rank; return lines of text."""
    device = options["device"]
    faulthandler.enable()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options["connections"])
    texts = [f"torch {torch.__version__}, {options['backend']}"]
    if device == "cuda":
        torch.cuda.set_device(0)
        texts[0] += f", NCCL {torch.cuda.nccl.version()}, {torch.cuda.get_device_name()}"
    if options["plugin"]:
        __import__(options["plugin"])
    if options["backend"] != "gloo":
        group = dist.new_group(backend=options["backend"])
    parts = {"layers": _layers, "steps": _steps, "streams": _streams, "profile": _profiles}
    for name in options["parts"].split(","):
        start = time.monotonic()
        texts += parts[name](group, options)
        texts.append(f"({name}: {time.monotonic() - start:.0f} s)")
    return texts


def _synchronized(device: str) -> Callable[[], float]:
    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return clock


# ---- layers ----------------------------------------------------------------------------------------------


def _layers(group: dist.ProcessGroup, options: dict[str, Any]) -> list[str]:
    reasons = Reasons()
    rows = []
    for name in options["dtypes"].split(","):
        for kind in KINDS:
            layer = Layer(kind, options["rows"], options["hidden"], getattr(torch, name), options["device"], group)
            rows += layer.checked_and_timed(f"{name}, {kind}", options["rounds"])
    heads = ["layer", "variant", "ms", "plain / it", "95 %", "other bits than plain", "error"]
    return [table(heads, rows), *told(reasons)]


class Layer:
    """A layer's operands on this rank, drawn from the same seeds on all ranks."""

    def __init__(
        self, kind: str, rows: int, hidden: int, dtype: torch.dtype, device: str, group: dist.ProcessGroup
    ) -> None:
        """Draw the operands."""
        self.row, self.sequence, self.group = kind.startswith("row"), "sequence" in kind, group
        self.me, shared = group.rank(), hidden // RANKS
        generator = torch.Generator(device).manual_seed(7)

        def drawn(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.25).to(dtype)

        if self.row:
            self.x = [drawn(rows, shared) for _ in range(RANKS)]
            self.w = [drawn(hidden, shared) for _ in range(RANKS)]
            self.dy = [drawn(rows, hidden)]
        else:
            self.x = [drawn(rows, hidden)]
            self.w = [drawn(shared, hidden) for _ in range(RANKS)]
            self.dy = [drawn(rows, shared) for _ in range(RANKS)]

    def mine(self, parts: Sequence[torch.Tensor], by_rows: bool) -> torch.Tensor:
        """Return this rank's part of an operand or result."""
        part = parts[self.me if len(parts) > 1 else 0]
        return part.chunk(RANKS)[self.me].contiguous() if by_rows and self.sequence else part

    def truth(self) -> Tensors:
        """Return the results of this rank in float64."""
        x, w, dy = ([part.double() for part in parts] for parts in (self.x, self.w, self.dy))
        wide = {"x": x * (RANKS if not self.row else 1), "dy": dy * (RANKS if self.row else 1)}
        y = [a @ b.t() for a, b in zip(wide["x"], w, strict=True)]
        dx = [a @ b for a, b in zip(wide["dy"], w, strict=True)]
        dw = wide["dy"][self.me].t() @ wide["x"][self.me]
        y, dx = ([y[0] + y[1]], dx) if self.row else (y, [dx[0] + dx[1]])
        return {"y": self.mine(y, self.row), "dx": self.mine(dx, not self.row), "dw": dw}

    def plain(self) -> Tensors:
        """Run torch's matmuls and collectives, one after another."""
        x, w, dy = self.mine(self.x, not self.row), self.w[self.me], self.mine(self.dy, self.row)
        if self.row:
            y = self._reduced(x @ w.t())
            dy = self._gathered(dy)
            return {"y": y, "dx": dy @ w, "dw": dy.t() @ x}
        x = self._gathered(x)
        return {"y": x @ w.t(), "dx": self._reduced(dy @ w), "dw": dy.t() @ x}

    def _reduced(self, partial: torch.Tensor) -> torch.Tensor:
        if not self.sequence:
            dist.all_reduce(partial, group=self.group)
            return partial
        own = partial.new_empty(partial.shape[0] // RANKS, partial.shape[1])
        dist.reduce_scatter_tensor(own, partial, group=self.group)
        return own

    def _gathered(self, shard: torch.Tensor) -> torch.Tensor:
        if not self.sequence:
            return shard
        whole = shard.new_empty(shard.shape[0] * RANKS, shard.shape[1])
        dist.all_gather_into_tensor(whole, shard, group=self.group)
        return whole

    def overlapped(self, settings: Settings) -> Tensors:
        """Run this package's layer."""
        x = self.mine(self.x, not self.row).detach().requires_grad_()
        w = self.w[self.me].detach().requires_grad_()
        linear = row_linear if self.row else column_linear
        y = linear(x, w, group=self.group, settings=settings, sequence_parallel=self.sequence)
        y.backward(self.mine(self.dy, self.row))
        assert x.grad is not None and w.grad is not None
        return {"y": y.detach(), "dx": x.grad, "dw": w.grad}

    def checked_and_timed(self, title: str, rounds: int) -> Iterator[list[str]]:
        """Yield a line of the table for each variant."""
        of_column = {name for name in LAYERS if "column" in name}
        settings = {name: Settings(**of) for name, of in LAYERS.items() if not (self.row and name in of_column)}
        runs: dict[str, Callable[[], Tensors]] = {PLAIN: self.plain}
        runs |= {name: functools.partial(self.overlapped, of) for name, of in settings.items()}
        truth, plain = self.truth(), self.plain()
        checks = {}
        for name, function in runs.items():
            results = [function() for _ in range(3)]  # a race shows in one of several
            other = {key for each in results for key in each if not torch.equal(each[key], plain[key])}
            unlike = any(not torch.equal(each[key], results[0][key]) for each in results for key in each)
            error = max(_error(each[key], truth[key]) for each in results for key in each)
            checks[name] = [" ".join(sorted(other)) + (", changing" if unlike else ""), error]
        del truth, plain, results
        times = in_turn(runs, rounds, clock=_synchronized(self.w[0].device.type))
        for name in runs:
            other, error = checks[name]
            yield [title, name, milliseconds(times[name], 2), *ratio(times[PLAIN], times[name]), other, f"{error:.1e}"]


def _error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def told(reasons: Reasons) -> list[str]:
    """Return the messages about bits, decisions and chunks that were asked for."""
    found = [text for text in reasons.taken() if "bits" in text or ("=auto: " in text and "kept whole" not in text)]
    return [text[:200] for text in found[:24]]


# ---- steps of the decoder --------------------------------------------------------------------------------


def _steps(group: dist.ProcessGroup, options: dict[str, Any]) -> list[str]:
    texts = []
    reasons = Reasons()
    for name in options["dtypes"].split(","):
        for mode in ("all-reduce", "sequence parallel"):
            texts += _decoder(f"{name}, {mode}", getattr(torch, name), mode != "all-reduce", options)
    heads = ["decoder", "COC_PARALLEL_NUM", "ms", "plain / it", "95 %", "gradients with other bits than plain"]
    return [table(heads, texts), *told(reasons)]


def _decoder(title: str, dtype: torch.dtype, sequence_parallel: bool, options: dict[str, Any]) -> Iterator[list[str]]:
    ascend_parallel.configure(num_chunks=4)  # forwards are installed while a model is made
    job = {**options, "batch": 2, "rows": options["rows"] // 2}
    model, loss_of = torch_decoder(job, sequence_parallel, options["device"], dtype)

    def step() -> None:
        model.zero_grad()
        loss_of(model).backward()

    states: dict[str, State] = {PLAIN: state_of(step, num_chunks=1)}
    states |= {name: state_of(step, **settings_of(name)) for name in options["chunks"].split(",")}
    ascend_parallel.configure(num_chunks=1)
    runs = {name: lambda state=state: with_state(state, step) for name, state in states.items()}
    gradients = {}
    for name, function in runs.items():
        print(title, name, flush=True)  # the last line of a rank that dies
        for _ in range(2 + deciding(name)):
            function()
        gradients[name] = {key: each.grad.to_local().clone() for key, each in _dtensors(model)}
    times = in_turn(runs, options["rounds"], clock=_synchronized(options["device"]))
    runs[PLAIN]()
    for name in runs:
        other = [key for key, each in gradients[name].items() if not torch.equal(each, gradients[PLAIN][key])]
        worst = max((_error(gradients[name][key], gradients[PLAIN][key].double()) for key in other), default=0.0)
        bits = f"{len(other)} of {len(gradients[name])}" + (f", by {worst:.1e}" if other else "")
        yield [title, name, milliseconds(times[name], 2), *ratio(times[PLAIN], times[name]), bits]


def _dtensors(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in model.named_parameters() if hasattr(each.grad, "to_local"))


# ---- rows that are read in two streams -------------------------------------------------------------------


def _streams(group: dist.ProcessGroup, options: dict[str, Any]) -> list[str]:
    """Read the rows of a region in two streams, the first of them late; both must see the finished rows."""
    if options["device"] == "cpu":
        return ["no streams on a CPU"]
    layer = Layer("row", options["rows"], options["hidden"], torch.float32, options["device"], group)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x, w, residual = layer.x[layer.me], layer.w[layer.me], layer.dy[0]
    settings = Settings(num_chunks=4)

    def made(leaves_rows: int) -> torch.Tensor:
        y = row_linear(x, w, group=group, settings=settings, leaves_rows=leaves_rows)
        return torch.nn.functional.layer_norm(y + residual, residual.shape[-1:])

    right, wrong = made(0), {"the side stream first": 0, "the main stream first": 0}
    for first in [side, main] * 5:
        second = main if first is side else side
        tensor = made(1)
        side.wait_stream(main)  # as before any read of a finished tensor
        read = {}
        for stream in (first, second):
            with torch.cuda.stream(stream):
                if stream is first:
                    torch.cuda._sleep(100_000_000)
                read[stream] = plain_tensor(tensor).clone()
        torch.cuda.synchronize()
        name = "the side stream first" if first is side else "the main stream first"
        wrong[name] += not all(torch.equal(each, right) for each in read.values())
    return [f"rows of a region read in two streams, wrong of 5: {wrong}"]


# ---- profile ---------------------------------------------------------------------------------------------


def _profiles(group: dist.ProcessGroup, options: dict[str, Any]) -> list[str]:
    rows, chunked = [], Settings(num_chunks=4, enable_coc_in_column_backward=True)
    for name in options["dtypes"].split(","):
        for kind in KINDS:
            layer = Layer(kind, options["rows"], options["hidden"], getattr(torch, name), options["device"], group)
            runs = {PLAIN: layer.plain, "4": functools.partial(layer.overlapped, chunked)}
            for variant, function in runs.items():
                rows.append([f"{name}, {kind}", variant, *_profile(function, f"{name} {kind} {variant}", options)])
    heads = ["layer", "variant", "matmuls", "copies", "of them under matmuls", "other kernels", "under matmuls", "span"]
    return ["microseconds of one call on rank 0:", table(heads, rows)]


def _profile(function: Callable[[], Tensors], title: str, options: dict[str, Any]) -> list[str]:
    for _ in range(3):
        function()
    clock = _synchronized(options["device"])
    dist.barrier()
    with torch.profiler.profile() as profiler:
        kept = function()
        clock()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options["traces"] or folder) / f"{title.replace(', ', ' ').replace(' ', '-')}.json"
        if dist.get_rank() != 0:
            path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    matmuls = [each for each in device if any(word in each["name"].lower() for word in MATMULS)]
    copies = [each for each in device if each["cat"] == "gpu_memcpy"]
    others = [each for each in device if each["cat"] == "kernel" and each not in matmuls]
    ends = [(each["ts"], each["ts"] + each["dur"]) for each in device] or [(0.0, 0.0)]
    sums = [_length(matmuls), _length(copies), _under(copies, matmuls), _length(others), _under(others, matmuls)]
    return [f"{each:.0f}" for each in (*sums, max(end for _, end in ends) - min(begin for begin, _ in ends))]


def _spans(events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((each["ts"], each["ts"] + each["dur"]) for each in events):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _length(events: Sequence[dict[str, Any]]) -> float:
    return sum(end - begin for begin, end in _spans(events))


def _under(events: Sequence[dict[str, Any]], matmuls: Sequence[dict[str, Any]]) -> float:
    return _length(events) + _length(matmuls) - _length([*events, *matmuls])


if __name__ == "__main__":
    run(main)
