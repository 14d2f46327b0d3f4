"""Records an MLP on a link of 1 Gbit/s between 2 ranks, serial and overlapped, and draws timeline.png of it.

    python docs/images/draw_timeline.py [FOLDER]     keeps both recordings in FOLDER, if one is given

Needs root, for network namespaces, and matplotlib (the extra `plot`).

The layers are sequence-parallel, 2048 rows, hidden size 1024, inner size 2048, fp32; 8 chunks overlapped. Steps of
both are recorded in turn, each by itself, and the fastest of each is drawn, which other programs disturbed least.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist

import ascend_parallel
from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.diagnostics.timeline.align import align
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.diagnostics.timeline.picture import picture

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS, HIDDEN, INNER, STEPS, LIMIT = 2048, 1024, 2048, 24, 240.0
RUNS = {"serial": Settings(num_chunks=1, mode=1), "overlapped": Settings(num_chunks=8)}


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


def run_rank(folder: Path) -> None:
    """Record on one rank, every step into a folder of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {name: model(settings) for name, settings in RUNS.items()}
    x = torch.randn(ROWS // dist.get_world_size(), HIDDEN, requires_grad=True)
    for number in range(STEPS):
        for name, layers in models.items():
            layers(x).square().mean().backward()  # warm, and both ranks here
            with ascend_parallel.timeline.record(folder / name / str(number)):
                dist.barrier()
                layers(x).square().mean().backward()
    dist.destroy_process_group()


def model(settings: Settings) -> torch.nn.Module:
    """Make the MLP."""
    inner = INNER // dist.get_world_size()
    layers = {
        "fc1": Linear(column_linear, inner, HIDDEN, settings),
        "gelu": torch.nn.GELU(),
        "fc2": Linear(row_linear, HIDDEN, inner, settings),
    }
    return torch.nn.Sequential(OrderedDict(layers))


def fastest(folder: Path) -> Path:
    """Return the folder of the shortest step."""
    return min(folder.iterdir(), key=lambda step: picture(align(read_run(step)[0])[0], "").milliseconds)


def main() -> None:
    """Build the link, run two ranks on it, and draw."""
    from ascend_parallel.tuning.launch.link import shaped_link

    with tempfile.TemporaryDirectory() as name, shaped_link("1gbit") as ends:
        folder = Path(name)
        common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29517", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [*end.prefix, sys.executable, __file__, "--rank", name],
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
        Path(__file__).with_name("timeline.png").write_bytes((folder / "timeline.png").read_bytes())
        if len(sys.argv) > 1:
            for run in RUNS:
                shutil.copytree(fastest(folder / run), Path(sys.argv[1]) / run)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        main()
