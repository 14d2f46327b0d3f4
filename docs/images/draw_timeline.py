"""Records a step on a link of 1 Gbit/s between 2 ranks, serial and overlapped, and draws a picture of it.

    python docs/images/draw_timeline.py timeline [FOLDER]    an MLP; keeps both recordings in FOLDER, if one is given
    python docs/images/draw_timeline.py context [FOLDER]     attention of a sequence that the ranks share

Needs root, for network namespaces, and matplotlib (the extra `plot`).

The MLP's layers are sequence-parallel, 2048 rows, hidden size 1024, inner size 2048, fp32; 8 chunks overlapped. The
attention is causal, of 4096 tokens and 8 heads of 64, fp32; one group of heads, and 4. Steps of both are recorded in
turn, each by itself, and the fastest of each is drawn, which other programs disturbed least.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import ascend_parallel
from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.diagnostics.timeline.align import align
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.diagnostics.timeline.picture import picture
from ascend_parallel.overlap.context import run_attention

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS, HIDDEN, INNER, STEPS, LIMIT = 2048, 1024, 2048, 24, 240.0
TOKENS, HEADS, WIDTH = 4096, 8, 64
Step = Callable[[], None]


class Linear(torch.nn.Module):
    """A layer of the package as a module, for its name."""

    def __init__(self, function: object, rows: int, columns: int, settings: Settings) -> None:
        """Draw a weight [rows, columns]."""
        super().__init__()
        self.function, self.settings = function, settings
        self.weight = torch.nn.Parameter(torch.randn(rows, columns) / columns**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer on the default group."""
        y: torch.Tensor = self.function(  # type: ignore[operator]
            x, self.weight, group=dist.group.WORLD, settings=self.settings, sequence_parallel=True
        )
        return y


def run_rank(subject: str, folder: Path) -> None:
    """Record on one rank, every step into a folder of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make, chunks = SUBJECTS[subject]
    steps = {
        "serial": make(Settings(num_chunks=1, mode=1 if subject == "timeline" else 2)),
        "overlapped": make(Settings(num_chunks=chunks)),
    }
    for number in range(STEPS):
        for name, step in steps.items():
            step()  # warm, and both ranks here
            with ascend_parallel.timeline.record(folder / name / str(number)):
                dist.barrier()
                step()
    dist.destroy_process_group()


def attention(settings: Settings) -> Step:
    """Make a step of attention."""
    own = TOKENS // dist.get_world_size()
    drawn = [torch.randn(own, 1, HEADS, WIDTH, requires_grad=True) for _ in range(3)]

    def attend(_: object, *whole: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in whole)
        return scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3)

    def step() -> None:
        run_attention(*drawn, attend, group=dist.group.WORLD, settings=settings).square().mean().backward()

    return step


def mlp(settings: Settings) -> Step:
    """Make a step of the MLP."""
    inner = INNER // dist.get_world_size()
    layers = {
        "fc1": Linear(column_linear, inner, HIDDEN, settings),
        "gelu": torch.nn.GELU(),
        "fc2": Linear(row_linear, HIDDEN, inner, settings),
    }
    made = torch.nn.Sequential(OrderedDict(layers))
    x = torch.randn(ROWS // dist.get_world_size(), HIDDEN, requires_grad=True)
    return lambda: made(x).square().mean().backward()


# By picture: what makes the step, and its number of chunks or groups.
SUBJECTS = {"timeline": (mlp, 8), "context": (attention, 4)}


def fastest(folder: Path) -> Path:
    """Return the folder of the shortest step."""
    return min(folder.iterdir(), key=lambda step: picture(align(read_run(step)[0])[0], "").milliseconds)


def main(subject: str, *kept: str) -> None:
    """Build the link, run two ranks on it, and draw."""
    from ascend_parallel.tuning.launch.link import shaped_link

    with tempfile.TemporaryDirectory() as name, shaped_link("1gbit") as ends:
        folder = Path(name)
        common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29517", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [*end.prefix, sys.executable, __file__, "--rank", subject, name],
                env={**os.environ, **common, "RANK": str(rank), **end.environment},
            )
            for rank, end in enumerate(ends)
        ]
        try:
            codes = [rank.wait(LIMIT) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        merge(fastest(folder / "overlapped"), against=fastest(folder / "serial")).write(folder, png=True)
        Path(__file__).with_name(f"{subject}.png").write_bytes((folder / "timeline.png").read_bytes())
        for target in kept:
            for run in ("serial", "overlapped"):
                shutil.copytree(fastest(folder / run), Path(target) / run)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] and sys.argv[1] in SUBJECTS:
        main(*sys.argv[1:3])
    else:
        sys.exit(f"give one of {', '.join(SUBJECTS)}")
