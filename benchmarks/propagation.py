"""Measure CPU seconds and memory of tracing and propagation, by layers and mesh.

    python benchmarks/propagation.py               the table of docs/sharding.md
    python benchmarks/propagation.py --layers 32 --mesh 8,8
    python benchmarks/propagation.py --model rwkv --layers 64 --mesh 2,2

A Llama of 8B's dimensions on the meta device, objective "time", two operators configured per layer; a scan of so many
steps, 1024 wide, nothing configured. Each case runs in a separate process, for its own peak memory.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from math import prod

from measuring import FOLDER, options_of, table

from ascend_parallel.tuning.launch.process_tree import process_tree

CASES: tuple[tuple[int, str] | tuple[int, str, str], ...] = (
    (2, "8"),
    (32, "8"),
    (128, "8"),
    (2, "8,8"),
    (8, "8,8"),
    (32, "8,8"),
    (126, "128,8"),
    (128, "1024,8"),
    (32, "4,2,8"),
    (16, "2,2", "rwkv"),
    (64, "2,2", "rwkv"),
    (64, "2,2", "mamba"),
)
LLAMA, SCANS = "llama", ("rwkv", "mamba")


def main() -> None:
    """Print a row per case."""
    parser = options_of(__doc__, link=False)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mesh")
    parser.add_argument("--model", choices=(LLAMA, *SCANS), default=LLAMA)
    options = parser.parse_args()
    if options.layers:
        print(measure(options.layers, tuple(map(int, options.mesh.split(","))), options.model))
        return
    heads = (
        "layers or steps",
        "mesh",
        "ranks",
        "nodes",
        "trace CPU s",
        "solve CPU s",
        "together CPU s",
        "peak memory MB",
        "cost",
    )
    print(table(heads, []))
    for layers, mesh, *model in CASES:
        command = [sys.executable, __file__, "--layers", str(layers), "--mesh", mesh, "--model", *(model or [LLAMA])]
        with process_tree(command, patience=0, stdout=subprocess.PIPE) as process:
            row = process.communicate()[0].decode().strip()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        print(row, flush=True)


def measure(layers: int, sizes: tuple[int, ...], name: str) -> str:
    """Trace and propagate once."""
    sys.path.insert(0, str(FOLDER.parent / "examples" / "sharding"))
    import torch
    from small_models import Llama, Mamba, Rwkv

    from ascend_parallel.sharding.mesh import ProcessMesh
    from ascend_parallel.sharding.planner.propagate import propagate
    from ascend_parallel.sharding.tracing.trace import trace

    rows = 2 * sizes[0] if len(sizes) > 1 else 2
    cut = ([None, (1, "mp")], None)
    with torch.device("meta"):
        if name == LLAMA:
            model: torch.nn.Module = Llama(layers, 4096, 32, 8, 14336, 128256, 2048).bfloat16()
            tokens = torch.zeros(rows, 2048, dtype=torch.long)
            batch, strategies = (tokens, tokens), {"layers.*.attention.o": cut, "layers.*.mlp.down": cut}
        else:
            model = Rwkv(1024, 16) if name == "rwkv" else Mamba(1024)
            batch, strategies = (torch.zeros(2 * rows, layers, 1024),), {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    graph = trace(model, batch)
    traced = time.process_time()
    names = ["dp", "cp", "mp"][-len(sizes) :] if len(sizes) != 2 else ["dp", "mp"]
    mesh = ProcessMesh(torch.arange(prod(sizes)).view(sizes), names)
    plan = propagate(graph, mesh, strategies, objective="time")
    solved = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    proof = "exact" if plan.bound is None else f"within {100 * (plan.cost / plan.bound - 1):.2g} %"
    cells: list[object] = [
        layers if name == LLAMA else f"{name}, {layers} steps",
        " x ".join(map(str, sizes)),
        prod(sizes),
        len(graph.nodes),
    ]
    cells += [f"{traced - start:.2f}", f"{solved - traced:.2f}", f"{solved - start:.2f}"]
    cells += [f"{peak / 1024:.0f} (+{(peak - before) / 1024:.0f})", proof]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
