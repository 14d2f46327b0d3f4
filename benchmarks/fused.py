"""Time the shared-memory kernel beside matmul and gloo in turn, chunks, and a lower bound of its memory traffic.

    python benchmarks/fused.py                                    about three minutes
    python benchmarks/fused.py --operators matmul_all_reduce --shapes 4096,8,2048

M, K, N are those of the whole matmul [M, K] x [K, N]; M counts the rows of all ranks.

    shm       the shared-memory kernel
    start     the same through `start_...` or `run_...`, with the choice of a kernel
    serial    the matmul, then gloo's collective
    chunked   four chunks, if there are enough rows
    matmul    the whole matmul alone
    gloo      the collective alone, on existing rows
    exchange  the kernel, with an allocated result
    product   the whole matmul, with an allocated result: exchange - product compares with gloo
    copy      a copy of as many bytes as the collective's tensor

A call is repeated in a row for a measurable time. The table has medians in ms, and medians of the rounds' ratios.
bytes: what an all-reduce or reduce-scatter sums, what an all-gather gathers. bound: matmul, and the bytes that shm
moves at the speed of a copy. The column exchange is exchange - product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table

from ascend_parallel.ops import chunked, reference, shm
from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.operators import (
    decided,
    run_all_gather_matmul,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
)
from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.pass_parts import Collective

# From little communication to almost nothing else. The result of 16,8,128 is 8 KB, that of 4096,8,2048 32 MB.
DEFAULT_SHAPES = {
    "matmul_all_reduce": [
        "16,8,128",
        "64,64,1024",
        "256,64,1024",
        "1024,64,1024",
        "1024,256,1024",
        "2048,1024,1024",
        "4096,8,2048",
        "4096,128,2048",
    ],
    "matmul_reduce_scatter": ["64,64,1024", "1024,64,1024", "1024,256,1024", "4096,64,1024"],
    "all_gather_matmul": ["64,1024,64", "1024,1024,64", "1024,1024,256", "4096,1024,64"],
}
DTYPES = ("float32", "bfloat16", "float16")
CHUNKS = 4
SHORTEST = 2e-3  # seconds that the calls in a row take at least
MOST_CALLS = 200
FUSED = Settings(fused=True)
COLUMNS = ("matmul", "gloo", "serial", "chunked", "shm", "start")

Call = Callable[[], object]


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, link=False, rounds=40)
    every = list(DEFAULT_SHAPES)
    parser.add_argument("--operators", nargs="+", choices=every, default=every, help="default: all")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,K,N", help="default: some per operator")
    parser.add_argument("--ranks", type=int, default=2, help="2 to 8 (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    options = parser.parse_args()
    if options.rounds < 1 or not 2 <= options.ranks <= 8:
        parser.error("--rounds needs 1 or more, --ranks 2 to 8")
    if any(shape[0] % options.ranks for shape in options.shapes or []):
        parser.error(f"--shapes: M has to be divisible by the {options.ranks} ranks")
    rows = []
    for operator in options.operators:
        for shape in options.shapes or map(parse_shape, DEFAULT_SHAPES[operator]):
            arguments = {"operator": operator, "shape": shape, "dtype": options.dtype, "rounds": options.rounds}
            size, times = on_ranks("fused:rank", options.ranks, title=f"{operator} {shape}:", **arguments)
            rows.append([operator, ",".join(map(str, shape)), *cells(operator, options.ranks, size, times)])
    heads = ("operator", "M,K,N", "bytes", *COLUMNS, "bound", "exchange", "serial/shm", "chunked/shm", "gloo/exchange")
    print(table(heads, rows))


def parse_shape(text: str) -> tuple[int, int, int]:
    """Read ``M,K,N``."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: give M,K,N such as 2048,1024,1024")
    m, k, n = map(int, parts)
    return m, k, n


def cells(operator: str, ranks: int, size: int, times: dict[str, list[float]]) -> list[str]:
    """Return the cells of a row after operator and shape."""
    # A copy reads and writes the bytes once each.
    moves = [copy * moved(operator, ranks, size) / (2 * size) for copy in times["copy"]]
    bound = [matmul + move for matmul, move in zip(times["matmul"], moves, strict=True)]
    exchange = median(whole - product for whole, product in zip(times["exchange"], times["product"], strict=True))
    shown = f"{size / 2**20:.0f} MB" if size >= 2**20 else f"{size / 2**10:.0f} KB"
    ratios = [f"{gain(times[name], times['shm']):.2f}" for name in ("serial", "chunked")]
    ratios.append(f"{median(times['gloo']) / exchange:.2f}" if exchange > 0 else "-")
    return [shown, *(milliseconds(times[name], 3) for name in COLUMNS), *map(_ms, (median(bound), exchange)), *ratios]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def rank(
    group: dist.ProcessGroup, operator: str, shape: list[int], dtype: str, rounds: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of the collective's tensor, and the slowest rank's seconds of each case."""
    torch.set_grad_enabled(False)
    if reason := shm.reach(group):
        raise RuntimeError(f"no shared memory here: {reason}")
    size, calls = cases(operator, shape, getattr(torch, dtype), group)
    counts = {name: how_often(call) for name, call in calls.items()}
    times = in_turn({name: lambda name=name: repeat(calls[name], counts[name]) for name in calls}, rounds, warm_up=1)
    return size, {name: [took / counts[name] for took in times[name]] for name in calls}


def repeat(call: Call, count: int) -> object:
    """Run a call `count` times; return the last result."""
    for _ in range(count):
        kept = call()
    return kept


def how_often(call: Call) -> int:
    """Return the number of calls in a row that take `SHORTEST`, equal on all ranks; the first calls warm up."""
    repeat(call, 2)
    dist.barrier()
    begin = time.perf_counter()
    repeat(call, 3)
    took = torch.tensor((time.perf_counter() - begin) / 3)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return max(1, min(MOST_CALLS, round(SHORTEST / float(took))))


def cases(operator: str, shape: list[int], dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[int, dict[str, Call]]:
    """Return the bytes of the collective's tensor, and the calls."""
    ranks, (m, k, n) = group.size(), shape
    gathers = operator == "all_gather_matmul"
    draw = torch.Generator().manual_seed(group.rank())
    whole = torch.randn(m, k, generator=draw).to(dtype)
    x, w = whole[: m // ranks] if gathers else whole, torch.randn(k, n, generator=draw).to(dtype)
    rows = torch.zeros(m, k if gathers else n, dtype=dtype)
    split = m if operator == "matmul_all_reduce" else m // ranks
    sizes, collective = split_rows(split, CHUNKS), Collective(operator, group, w, split, rows.shape[1])
    place, product = torch.zeros_like(rows), torch.zeros(m, n, dtype=dtype)
    y = torch.zeros(m // ranks if operator == "matmul_reduce_scatter" else m, n, dtype=dtype)
    pieces = shm.pieces(Matmul(operator, m, k, n, dtype, "cpu", ranks))
    results = (y, place, shm.gathers_before_matmul(split)) if gathers else (y,)
    calls: dict[str, Call] = {
        "shm": lambda: run_kernel(shm, operator, x, w, group, pieces),
        "start": lambda: through_choice(operator, x, w, group),
        "serial": lambda: run_kernel(reference, operator, x, w, group, (split,)),
        "chunked": lambda: run_kernel(chunked if len(sizes) > 1 else reference, operator, x, w, group, sizes),
        "matmul": lambda: torch.mm(whole, w),
        "gloo": lambda: collective.run((split,)),
        "exchange": lambda: getattr(shm._SHARED[group], operator)(x, w, *results, pieces, 0, shm.TIME_LIMIT),
        "product": lambda: torch.mm(whole, w, out=product),
        "copy": lambda: place.copy_(rows),
    }
    check(calls, f"{operator} {shape}")
    return rows.nbytes, calls


def run_kernel(
    kernel: Any, operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes
) -> Any:
    """Run a kernel's operator to its end."""
    result = getattr(kernel, operator)(x, w, group, sizes)
    return result[0] if isinstance(result, tuple) else result.wait()


def through_choice(operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Run an operator as `linear` does."""
    if operator == "all_gather_matmul":
        return run_all_gather_matmul(x, w, group, decided(operator, x, w, group, FUSED))[0]
    begin = start_matmul_all_reduce if operator == "matmul_all_reduce" else start_matmul_reduce_scatter
    return begin(x, w, group, decided(operator, x, w, group, FUSED)).wait()


def moved(operator: str, ranks: int, size: int) -> int:
    """Return the bytes that a rank reads and writes to exchange `size` bytes, without the matmul's."""
    if operator == "all_gather_matmul":  # its own rows to the stage; all from the stages to the gathered ones
        return 2 * size // ranks + 2 * size
    if operator == "matmul_reduce_scatter":  # its part of every stage, and the result
        return size + size // ranks
    if ranks == 2:  # both stages, and the result
        return 3 * size
    return 3 * size + size // ranks  # its part of every stage, and the sum; all sums, and the result


def check(calls: dict[str, Call], title: str) -> None:
    """Raise unless all calls compute the same result."""
    expected = calls["serial"]()
    assert isinstance(expected, torch.Tensor)
    for name in ("shm", "start", "chunked"):
        got = calls[name]()
        assert isinstance(got, torch.Tensor)
        error = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error < max(1e-4, 8 * torch.finfo(got.dtype).eps):
            raise RuntimeError(f"{title}: {name} is off by {error:.2g}")


if __name__ == "__main__":
    run(main)
