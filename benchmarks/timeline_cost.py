"""Measure the cost of recording a timeline, and the cost without recording.

    python benchmarks/timeline_cost.py --link 1gbit

Off: nanoseconds of a check, beside the bare call. On: forward and backward of a row-parallel layer on 2 ranks, 8
chunks, with and without recording. Medians over the rounds, and of the difference within a round.
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from measuring import in_turn, on_ranks, options_of, run

from ascend_parallel import Settings, row_linear, timeline
from ascend_parallel.ops.record import MATMUL, RECORDING, compute

# M, K, N of each rank's matmul: a large one, and the demo's, where the host's share is large.
SHAPES = ((2048, 1024, 1024), (512, 128, 256))


def main() -> None:
    """Measure both and print."""
    options = options_of(__doc__, rounds=100).parse_args()
    bare, looking = off()
    print(f"off: {looking - bare:.0f} ns for each matmul ({looking:.0f} with, {bare:.0f} without the look)")
    results = on_ranks("timeline_cost:rank", 2, link=options.link, rounds=options.rounds)
    for shape, times in zip(SHAPES, results, strict=True):
        without = median(times["off"])
        difference = median(on - off for off, on in zip(times["off"], times["on"], strict=True))
        where = f"M,K,N {','.join(map(str, shape))} over {options.link or 'loopback'}"
        print(
            f"on:  {where}: {without * 1e3:.2f} ms without, "
            f"{difference * 1e6:+.0f} us with ({difference / without:+.1%}), {options.rounds} rounds"
        )


def off() -> tuple[float, float]:
    """Return the ns of a call of an empty function, bare and through `compute`."""

    def nothing(x: object, w: object, out: object) -> None:
        pass

    def best(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=100_000, repeat=15)) / 100_000 * 1e9

    return best(lambda: nothing(1, 2, out=3)), best(lambda: compute(MATMUL, "matmul", nothing, 1, 2, out=3))


def rank(group: dist.ProcessGroup, rounds: int) -> list[dict[str, list[float]]]:
    """Time every shape."""
    with tempfile.TemporaryDirectory() as folder, timeline.record(folder):
        times = [time_shape(shape, group, rounds) for shape in SHAPES]
        dist.barrier()
    return times


def time_shape(shape: tuple[int, int, int], group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Return the slower rank's seconds of each round, with and without the active recorder."""
    m, k, n = shape
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    dy, recorder = torch.randn(m, n), RECORDING.recorder

    def step(name: str) -> None:
        RECORDING.recorder = recorder if name == "on" else None
        row_linear(x, weight, group=group, settings=Settings(num_chunks=8)).backward(dy)

    times = in_turn({name: lambda name=name: step(name) for name in ("on", "off")}, rounds)
    RECORDING.recorder = recorder
    return times


if __name__ == "__main__":
    run(main)
