"""Measure activation recompute in a GPT: memory kept for backward, peak memory, and time of a step.

    python benchmarks/recompute.py --plot docs/images/recompute.png       a minute or two

A GPT of 6 layers, 256 wide, 8 heads, 4 sequences of 256 tokens, fp32, tensor-parallel without sequence parallelism on
--ranks ranks of one thread each. Bytes are those of live tensors; the plan's prediction stands beside them. Time is CPU
time of the slower rank, forward and backward. CPU time is valid on a shared machine and excludes waiting.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import FOLDER, in_turn, on_ranks, options_of, run, table
from torch import nn

from ascend_parallel import Settings
from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.recompute_config import Recompute

sys.path += [str(FOLDER.parent / name) for name in ("tests/support", "examples/strategy")]

from allocations import alive_bytes, peak_bytes
from gpt import GPT

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 256, 8, 256, 4, 512
COLUMN, ROW = ([None, ("mp", None), None], None), ([None, (None, "mp"), None], None)
STRATEGIES = {"layers.*.qkv": COLUMN, "layers.*.up": COLUMN, "layers.*.o": ROW, "layers.*.down": ROW}
ALL = {"modules": ["layers.*"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gelu": {"modules": ["layers.*:gelu"]},
    "attention and gelu": {"modules": ["layers.*:scaled_dot_product_attention", "layers.*:gelu"]},
    "every second layer": {"modules": [f"layers.{index}" for index in range(0, LAYERS, 2)]},
    "every layer, attention kept": {**ALL, "keep": ["layers.*:scaled_dot_product_attention"]},
    "every layer, output operator kept": {**ALL, "keep": ["layers.*.down"]},
    "every layer": ALL,
    "every layer, collectives recomputed": {**ALL, "collectives": "recompute"},
}


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, link=False, rounds=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of a sequence; default: {LENGTH}")
    parser.add_argument("--plot", type=Path, help="file for a picture")
    options = parser.parse_args()
    asked = {"rounds": options.rounds, "length": options.length}
    found = {ranks: on_ranks("recompute:rank", ranks, **asked) for ranks in options.ranks}
    heads = ["computed again", "waits MB", "as planned MB", "most alive MB", "CPU ms", "against nothing"]
    for ranks, measured in found.items():
        rows = [
            [
                name,
                *(f"{value / 1e6:.1f}" for value in sizes),
                f"{1e3 * took:.0f}",
                f"{took / measured['nothing'][3]:.2f}",
            ]
            for name, (*sizes, took) in measured.items()
        ]
        print(f"\n{ranks} rank{'s' if ranks > 1 else ''}\n\n{table(heads, rows)}")
    if options.plot is not None:
        draw(found, options.plot)


def rank(group: dist.ProcessGroup, rounds: int, length: int) -> dict[str, tuple[int, int, int, float]]:
    """Measure every variant on this rank: bytes kept for backward, planned and at most, and seconds."""
    torch.manual_seed(1)
    whole, tokens = GPT(LAYERS, WIDTH, HEADS, VOCABULARY, length), torch.randint(VOCABULARY, (BATCH, length))
    batch = tokens, tokens.roll(-1, 1)
    plan = propagate(
        trace(whole, batch), ProcessMesh(list(range(group.size())), ["mp"]), STRATEGIES, objective="redistribution"
    )
    models = {
        name: ShardedModule(whole, plan, settings=Settings(num_chunks=2), recompute=Recompute(**options))
        for name, options in VARIANTS.items()
    }

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(*batch).backward()

    runs = {name: lambda model=model: step(model) for name, model in models.items()}
    times = in_turn(runs, rounds, warm_up=1, clock=time.process_time)
    found = {}
    for name, model in models.items():
        waits = alive_bytes(lambda model=model: model(*batch))
        most = peak_bytes(lambda model=model: model(*batch).backward())  # the parameters have gradients already
        planned = saved_bytes(model.rank_plan, Recompute(**VARIANTS[name]))
        found[name] = waits, planned, most, median(times[name])
    return found


def draw(found: dict[int, dict[str, tuple[float, float, float, float]]], file: Path) -> None:
    """Draw memory against time, a panel for each number of ranks."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(found), figsize=(6.2 * len(found), 4.4), squeeze=False, layout="constrained"
    )
    for panel, (ranks, rows) in zip(panels[0], found.items(), strict=True):
        for number, (name, (_, _, most, took)) in enumerate(rows.items()):
            label = f"{number + 1} {name}"
            panel.scatter(1e3 * took, most / 1e6, s=60, label=label)
            panel.annotate(str(number + 1), (1e3 * took, most / 1e6), xytext=(5, 5), textcoords="offset points")
        panel.set(title=f"{ranks} rank{'s' if ranks > 1 else ''}", xlabel="CPU ms of a step", ylabel="most alive, MB")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0][-1].legend(fontsize="small", title="computed again")
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    run(main)
