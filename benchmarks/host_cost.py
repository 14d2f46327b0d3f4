"""Measure the host cost of chunks, beyond the matmuls and collectives themselves.

    python benchmarks/host_cost.py            operators, layers and reads, a table of each
    python benchmarks/host_cost.py --layers   Megatron-core's layers alone, some seconds
    python benchmarks/host_cost.py --loops    both loops of chunks beside Megatron-core's layers, a minute
    python benchmarks/host_cost.py --reads    reads of unfinished rows alone, some seconds

Operators. On shapes too small for the work to matter, the chunked operators are timed beside the same calls of
``torch.mm(out=)`` and torch.distributed by hand, on views made beforehand, in the same order. The difference is the
cost of checks, choice, chunks and bookkeeping. The table has medians over the rounds, of the slowest rank, in
microseconds: of a call for bare; of a chunk, beyond that, for the others. +1: cost of one more chunk.

layer     the linear layer's forward, without gradients
torch.op  the operator through torch.library, as a traced model calls it
bare      torch.mm(out=) and torch.distributed by hand

wall: elapsed time, which other programs disturb, and in which waiting for gloo's threads may hide a cost. cpu:
processor time of the calling thread, in which no cost can hide.

Layers. The forward of Megatron-core's layers on 128 rows of 32 features, with gradients: its own, patched with
COC_PARALLEL_NUM=auto, which leaves so small a layer whole, and patched with 4 chunks; processor time of the calling
thread, medians of the slowest rank in microseconds.

Loops. Forward and backward of the same layers, warm: Megatron-core's own, in 4 chunks that Python loops over, and in 4
that the C++ extension loops over, in turn; processor time of the calling thread, medians of the slowest rank in
microseconds.

Reads. What an operator of a region costs the host where a wait takes no time: rows in 4 chunks whose all-reduces have
finished, which nobody has waited for yet. An addition and a norm of such rows, with the read of their result, beside
torch's own of finished rows; and a read of the rows themselves, beside nothing. Processor time of the calling thread,
medians of the slowest rank in microseconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measuring import in_turn, on_ranks, options_of, run, table
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel

import ascend_parallel
from ascend_parallel import ops
from ascend_parallel.ops import chunk_loop
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.unfinished import finished, unfinished
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings

# The least rows of a chunk: N chunks have N times as many rows, in equal chunks.
ROWS = 16
WIDTH = 16
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}
CALLERS = ("layer", "torch.op")
GOAL_MICROSECONDS = 15
LEFT_WHOLE_GOAL = 1.2  # times Megatron-core's own layer
LAYERS = {
    "row": ("RowParallelLinear", False),
    "column": ("ColumnParallelLinear", False),
    "row, sequence parallel": ("RowParallelLinear", True),
    "column, sequence parallel": ("ColumnParallelLinear", True),
}
LAYER_ROWS, FEATURES = 128, 32
LAYER_SETTINGS: dict[str, dict[str, Any]] = {
    "megatron's": {"num_chunks": 1},
    "left whole": {"auto": True},
    "4 chunks": {"num_chunks": 4},
}
# By name the chunks, and whether the C++ extension loops over them.
LOOPS = {"megatron's": (1, True), "Python's loop": (4, False), "C++ loop": (4, True)}
READ_CHUNKS = 4
RESIDUAL = torch.ones(READ_CHUNKS * ROWS, WIDTH)
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + RESIDUAL,
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "whole read": lambda x: x,
}
BUSY_LOAD = 0.5

Call = Callable[[], object]
# clock -> caller or "bare" -> seconds per call, one number per round
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, link=False, rounds=40)
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16], metavar="COUNT", help="default: 4 8 16")
    parser.add_argument("--calls", type=int, default=10, help="calls timed together in a round (default: 10)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--layers", action="store_true", help="Megatron-core's layers alone")
    alone.add_argument("--loops", action="store_true", help="both loops of chunks alone")
    alone.add_argument("--reads", action="store_true", help="reads of unfinished rows alone")
    options = parser.parse_args()
    chunks = sorted(set(options.chunks))
    if min(chunks) < 2 or len(chunks) < 2:
        parser.error("--chunks: give two or more different counts, each 2 or more")
    if options.ranks < 2 or options.rounds < 1 or options.calls < 1:
        parser.error("--ranks needs 2 or more, --rounds and --calls 1 or more")
    load = os.getloadavg()[0]
    measure = partial(on_ranks, ranks=options.ranks, rounds=options.rounds, calls=options.calls)
    parts = {
        "operators": lambda: operators(options, chunks),
        "layers": lambda: layers(measure("host_cost:layer_times")),
        "loops": lambda: loops(measure("host_cost:loop_times")),
        "reads": lambda: reads(measure("host_cost:read_times")),
    }
    asked = [name for name in parts if getattr(options, name, False)]
    for name in asked or parts:
        print(parts[name]())
    if load > BUSY_LOAD:
        print(f"The machine was busy before (load {load:.1f}): wall is unreliable.")


def operators(options: argparse.Namespace, chunks: list[int]) -> str:
    """Measure the operators; return their table."""
    measured = on_ranks("host_cost:rank", options.ranks, chunks=chunks, rounds=options.rounds, calls=options.calls)
    heads = ["operator", "chunks", *(f"{clock} {what}" for clock in CLOCKS for what in ("bare", *CALLERS))]
    found = table(heads, [row for operator, by_count in measured.items() for row in rows(operator, by_count)])
    return f"{found}\n\nThe goal of layer and torch.op is {GOAL_MICROSECONDS} microseconds a chunk.\n"


def layers(measured: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of the layers."""
    cells = []
    for name, times in measured.items():
        own, *patched = (1e6 * median(times[settings]) for settings in LAYER_SETTINGS)
        cells.append([name, f"{own:.0f}", *(f"{took:.0f}" for took in patched), f"{patched[0] / own:.2f}"])
    found = table(["layer", *LAYER_SETTINGS, "left whole / megatron's"], cells)
    return f"{found}\n\nThe goal of a layer that is left whole is {LEFT_WHOLE_GOAL} times Megatron-core's own."


def loops(measured: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of the loops."""
    cells = []
    for name, times in measured.items():
        own, python, native = (1e6 * median(times[loop]) for loop in LOOPS)
        ratios = f"{python / native:.2f}", f"{native / own:.2f}"
        cells.append([name, f"{own:.0f}", f"{python:.0f}", f"{native:.0f}", *ratios])
    return "\n" + table(["layer in 4 chunks", *LOOPS, "Python's / C++", "C++ / megatron's"], cells)


def reads(measured: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of the reads."""
    cells = []
    for name, times in measured.items():
        ours, torchs = (1e6 * median(times[who]) for who in ("unfinished", "torch"))
        cells.append([name, f"{torchs:.0f}", f"{ours:.0f}", f"{ours - torchs:.0f}"])
    return "\n" + table([f"rows in {READ_CHUNKS} chunks", "torch's own", "unfinished rows", "more"], cells)


def rows(operator: str, by_count: dict[str, Times]) -> list[list[str]]:
    """Return a row for each chunk count of an operator, and one for the cost of each further chunk."""
    extra = {int(count): differences(times) for count, times in by_count.items()}
    found = [
        [operator, str(count), *(f"{time:.0f}" if per is None else f"{per / count:.1f}" for time, per in columns)]
        for count, columns in extra.items()
    ]
    least, most = min(extra), max(extra)
    rises = [
        "" if high is None or low is None else f"{(high - low) / (most - least):.1f}"
        for (_, low), (_, high) in zip(extra[least], extra[most], strict=True)
    ]
    return [*found, [operator, "+1", *rises]]


def differences(by_clock: Times) -> list[tuple[float, float | None]]:
    """Return, by column, the median microseconds per call and the median excess over the bare calls."""
    columns: list[tuple[float, float | None]] = []
    for times in by_clock.values():
        columns.append((median(times["bare"]) * 1e6, None))
        for caller in CALLERS:
            # Paired by round, so that a disturbed round affects only one difference.
            pairs = zip(times[caller], times["bare"], strict=True)
            columns.append((median(times[caller]) * 1e6, median(ours - bare for ours, bare in pairs) * 1e6))
    return columns


def rank(group: dist.ProcessGroup, chunks: list[int], rounds: int, calls: int) -> dict[str, dict[int, Times]]:
    """Measure every operator at every chunk count."""
    torch.set_grad_enabled(False)
    makers = {
        "matmul_all_reduce": all_reduce_calls,
        "matmul_reduce_scatter": reduce_scatter_calls,
        "all_gather_matmul": all_gather_calls,
    }
    return {
        operator: {count: compare(operator, count, make(group, count), rounds, calls) for count in chunks}
        for operator, make in makers.items()
    }


def layer_times(group: dist.ProcessGroup, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the slowest rank's seconds of a forward of each layer, by settings."""
    found: dict[str, dict[str, list[float]]] = {}
    with megatron_on_cpu():
        start_model_parallel(group.size())
        for name, (kind, sequence_parallel) in LAYERS.items():
            layer, x = megatron_layer(kind, group.size(), sequence_parallel)
            for words, settings in LAYER_SETTINGS.items():
                ascend_parallel.configure(**settings)
                ops.COUNTS.clear()
                layer(x)[0].sum().backward()
                ran = sum(counts["chunks"] for counts in ops.COUNTS.as_dict().values())
                if (words == "4 chunks") != bool(ran):
                    raise RuntimeError(f"{name}, {words}: {ran} chunks ran, the comparison would be unfair")
                repeated = {words: lambda layer=layer, x=x: [layer(x) for _ in range(calls)]}
                times = in_turn(repeated, rounds, clock=time.thread_time)
                found.setdefault(name, {})[words] = [took / calls for took in times[words]]
        ascend_parallel.configure(num_chunks=1)
        end_model_parallel()
    return found


def loop_times(group: dist.ProcessGroup, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the slowest rank's seconds of each pass of a layer, by loop."""
    if isinstance(native := chunk_loop.LOOP, str):
        raise RuntimeError(f"there is nothing to compare: {native}")
    passes = [f"{name}, {direction}" for name in LAYERS for direction in ("forward", "backward")]
    found: dict[str, dict[str, list[float]]] = {name: {loop: [] for loop in LOOPS} for name in passes}
    with megatron_on_cpu():
        start_model_parallel(group.size())
        for name, (kind, sequence_parallel) in LAYERS.items():
            layer, x = megatron_layer(kind, group.size(), sequence_parallel)
            for index in range(-1, rounds):
                for loop, (number, in_native) in LOOPS.items():
                    ascend_parallel.configure(num_chunks=number)
                    with mock.patch.object(chunk_loop, "LOOP", native if in_native else "a benchmark"):
                        pass_times(layer, x, 1)
                        for direction, took in zip(("forward", "backward"), pass_times(layer, x, calls), strict=True):
                            found[f"{name}, {direction}"][loop] += [took] if index >= 0 else []
        ascend_parallel.configure(num_chunks=1)
        end_model_parallel()
    for times in found.values():
        for loop, seconds in times.items():
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            times[loop] = slowest.tolist()
    return found


def pass_times(layer: Any, x: torch.Tensor, calls: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward, means of `calls`."""
    forward = backward = 0.0
    for _ in range(calls):
        dist.barrier()
        start = time.thread_time()
        y = layer(x)[0]
        forward += time.thread_time() - start
        dy = torch.ones_like(y)
        start = time.thread_time()
        y.backward(dy)
        backward += time.thread_time() - start
    return forward / calls, backward / calls


def megatron_layer(kind: str, ranks: int, sequence_parallel: bool) -> tuple[Any, torch.Tensor]:
    """Return a layer of Megatron-core with a weight [32, 32] on each rank, and its input."""
    config = importlib.import_module("megatron.core.model_parallel_config").ModelParallelConfig(
        tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel, use_cpu_initialization=True
    )
    row = kind == "RowParallelLinear"
    sizes = (ranks * FEATURES, FEATURES) if row else (FEATURES, ranks * FEATURES)
    more = {"input_is_parallel": True} if row else {"gather_output": False}
    made = getattr(importlib.import_module("megatron.core.tensor_parallel.layers"), kind)(
        *sizes, config=config, init_method=torch.nn.init.normal_, bias=True, skip_bias_add=False, **more
    )
    own_rows = LAYER_ROWS // ranks if sequence_parallel and not row else LAYER_ROWS
    return made, torch.randn(own_rows, 1, FEATURES, requires_grad=True)


def read_times(group: dist.ProcessGroup, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the slowest rank's seconds of each read of unfinished rows, and of the same call of finished ones."""
    torch.set_grad_enabled(False)
    found = {name: {who: [0.0] * rounds for who in ("unfinished", "torch")} for name in READS}
    for name, read in READS.items():
        for index in range(-2, rounds):
            for _ in range(calls):
                for who, x in (("unfinished", arrived_rows(group)), ("torch", torch.ones_like(RESIDUAL))):
                    begin = time.thread_time()
                    y = finished(read(x))
                    took = time.thread_time() - begin
                    del x, y
                    if index >= 0:
                        found[name][who][index] += took / calls
        for who, times in found[name].items():
            slowest = torch.tensor(times, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            found[name][who] = slowest.tolist()
    return found


def arrived_rows(group: dist.ProcessGroup) -> torch.Tensor:
    """Return unfinished rows, whose collectives have finished."""
    x, sizes = torch.ones_like(RESIDUAL), (ROWS,) * READ_CHUNKS
    pending = Pending(x, "all-reduces", group, READ_CHUNKS, sizes)
    for chunk in x.split(ROWS):
        pending.launch(dist.all_reduce, chunk, group=group, async_op=True)
    while not pending.done():
        time.sleep(0)
    return unfinished(pending, 1)


def compare(operator: str, count: int, cases: dict[str, Call], rounds: int, calls: int) -> Times:
    """Return the slowest rank's seconds per call of all cases."""
    for who in CALLERS:
        ops.COUNTS.clear()
        cases[who]()
        cut = ops.COUNTS.as_dict()[operator]["chunks"]
        if cut != count:
            raise RuntimeError(f"{operator} as {who} ran in {cut} chunks, not {count}: the comparison would be unfair")
    repeated = {who: lambda call=call: [call() for _ in range(calls)] for who, call in cases.items()}
    return {
        name: {who: [took / calls for took in times] for who, times in in_turn(repeated, rounds, clock=clock).items()}
        for name, clock in CLOCKS.items()
    }


def all_reduce_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``matmul_all_reduce``: matmul and all-reduce of each chunk, then all waits."""
    x, w = torch.zeros(ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    y = torch.zeros(ROWS * count, WIDTH)
    chunks = list(zip(x.chunk(count), y.chunk(count), strict=True))

    def bare() -> None:
        works = []
        for x_c, y_c in chunks:
            torch.mm(x_c, w, out=y_c)
            works.append(dist.all_reduce(y_c, group=group, async_op=True))
        for work in works:
            work.wait()

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: row_linear(x, w.t(), group=group, settings=settings),
        "torch.op": lambda: ops.matmul_all_reduce(x, w, group, num_chunks=count),
        "bare": bare,
    }


def reduce_scatter_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``matmul_reduce_scatter`` on gloo: all receives, each chunk's matmuls and sends, then waits and sums."""
    ranks, rank = group.size(), group.rank()
    peers = [peer for peer in range(ranks) if peer != rank]
    x, w = torch.zeros(ranks * ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    chunks = []
    for x_r_c in x.view(ranks, -1, WIDTH).chunk(count, dim=1):
        x_r = x_r_c.unbind()
        partial, received = torch.zeros(ranks, ROWS, WIDTH).unbind(), torch.zeros(ranks, ROWS, WIDTH).unbind()
        parts = [partial[peer] if peer == rank else received[peer] for peer in range(ranks)]
        chunks.append((list(zip(x_r, partial, strict=True)), partial, received, parts, torch.zeros(ROWS, WIDTH)))

    def bare() -> None:
        works = [[dist.irecv(received[p], group=group, group_src=p) for p in peers] for _, _, received, _, _ in chunks]
        for index, (slices, partial, _, _, _) in enumerate(chunks):
            for x_c, y_c in slices:
                torch.mm(x_c, w, out=y_c)
            works[index] += [dist.isend(partial[p], group=group, group_dst=p) for p in peers]
        for index, (_, _, _, parts, out) in enumerate(chunks):
            for work in works[index]:
                assert work is not None
                work.wait()
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: row_linear(x, w.t(), group=group, settings=settings, sequence_parallel=True),
        "torch.op": lambda: ops.matmul_reduce_scatter(x, w, group, num_chunks=count),
        "bare": bare,
    }


def all_gather_calls(group: dist.ProcessGroup, count: int) -> dict[str, Call]:
    """``all_gather_matmul``: all gathers, the own rows' matmul, then each chunk's wait and matmuls."""
    ranks, rank = group.size(), group.rank()
    x, w = torch.zeros(ROWS * count, WIDTH), torch.zeros(WIDTH, WIDTH)
    gathered, y = torch.zeros(ranks, ROWS * count, WIDTH), torch.zeros(ranks, ROWS * count, WIDTH)
    chunks = []
    for x_c, gathered_r_c, y_r_c in zip(x.chunk(count), gathered.chunk(count, 1), y.chunk(count, 1), strict=True):
        others = [(gathered_r_c[peer], y_r_c[peer]) for peer in range(ranks) if peer != rank]
        chunks.append((x_c, list(gathered_r_c.unbind()), others))
    own = y[rank]

    def bare() -> None:
        works = [dist.all_gather(views, x_c, group=group, async_op=True) for x_c, views, _ in chunks]
        torch.mm(x, w, out=own)
        for work, (_, _, others) in zip(works, chunks, strict=True):
            work.wait()
            for x_c, y_c in others:
                torch.mm(x_c, w, out=y_c)

    settings = Settings(num_chunks=count, mode=2)
    return {
        "layer": lambda: column_linear(x, w.t(), group=group, settings=settings, sequence_parallel=True),
        "torch.op": lambda: ops.all_gather_matmul(x, w, group, num_chunks=count),
        "bare": bare,
    }


if __name__ == "__main__":
    run(main)
