"""Measure activation recompute in a GPT: memory kept for backward, peak memory, and time of a step.

    python benchmarks/recompute.py --plot docs/images/recompute.png       a minute or two

A GPT of 6 layers, 256 wide, 8 heads, 4 sequences of 256 tokens, fp32, tensor-parallel without sequence parallelism on
--ranks ranks of one thread each. Bytes are those of live tensors; the plan's prediction stands beside them. Time is CPU
time of the slower rank, forward and backward, the median over rounds in random order. CPU time is valid on a shared
machine and excludes waiting.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import weakref
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_parallel import Settings
from ascend_parallel.sharding import ProcessMesh, parallelize, propagate, trace
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.tuning.launch.ranks import Job, RankError, begin_rank, deliver, run_ranks

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


class Layer(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them on ``[B, S, H]``."""
        qkv = self.qkv(self.norm1(x)).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1), is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean loss."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.tokens, self.norm, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run them on ``[B, S]``."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Alive(TorchDispatchMode):
    """Counts the bytes of live storages made by operators."""

    def __init__(self) -> None:
        """Start at 0 bytes."""
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its new storages."""
        result = function(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if size and place not in self._known and place not in inputs:
                    self._known.add(place)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._forget, place, size)
        return result

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def main() -> int:
    """Read the command line, measure, print; as a rank, measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path, help="file for a picture")
    options = parser.parse_args()
    found = {}
    for ranks in options.ranks:
        job = Job(program=(str(Path(__file__)),), arguments={"rounds": options.rounds}, ranks=ranks, limit=600, ends=[])
        with Console(stderr=True).status(f"measuring on {ranks} ranks") as status:
            found[ranks] = run_ranks(job, lambda line: status.update(line))
        print(f"\n{ranks} rank{'s' if ranks > 1 else ''}\n")
        print("| computed again | waits MB | as planned MB | most alive MB | CPU ms | against nothing |")
        print("|---|---|---|---|---|---|")
        first = found[ranks]["nothing"]
        for name, (waits, planned, most, took) in found[ranks].items():
            cells = [f"{value / 1e6:.1f}" for value in (waits, planned, most)]
            print(f"| {name} | {' | '.join(cells)} | {1e3 * took:.0f} | {took / first[3]:.2f} |")
    if options.plot is not None:
        draw(found, options.plot)
    return 0


def rank() -> None:
    """Measure every variant on this rank."""
    job = begin_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    whole, tokens = GPT(), torch.randint(VOCABULARY, (BATCH, LENGTH))
    mesh = ProcessMesh(list(range(dist.get_world_size())), ["mp"])
    plan = propagate(trace(whole, (tokens,)), mesh, STRATEGIES)
    models = {
        name: parallelize(whole, plan, static=True, settings=Settings(num_chunks=2), recompute=Recompute(**options))
        for name, options in VARIANTS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(job["rounds"] + 1):
        order = list(models)
        random.Random(index).shuffle(order)
        for name in order:
            took = step(models[name], tokens)
            if index:
                times[name].append(took)
    found = {}
    for name, model in models.items():
        waits, most = memory(model, tokens)
        planned = saved_bytes(plan, model.schedule, Recompute(**VARIANTS[name]))
        slower = torch.tensor(median(times[name]), dtype=torch.float64)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        found[name] = (waits, planned, most, slower.item())
    deliver(found)
    dist.destroy_process_group()


def step(model: nn.Module, tokens: torch.Tensor) -> float:
    """Return the CPU seconds of one forward and backward on this rank."""
    model.zero_grad()
    dist.barrier()
    start = time.process_time()
    model(tokens).backward()
    return time.process_time() - start


def memory(model: nn.Module, tokens: torch.Tensor) -> tuple[int, int]:
    """Return the bytes kept for backward, and the peak; gradients of parameters are allocated before."""
    with Alive() as alive:
        loss = model(tokens)
        waits = alive.now
        loss.backward()
    return waits, alive.most


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
    try:
        sys.exit(rank() if sys.argv[-1].endswith("job.json") else main())
    except RankError as error:
        sys.exit(f"recompute.py: {error}")
