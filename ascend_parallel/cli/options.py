"""Options that several commands share, with their limits and defaults.

The defaults of a command that describes a cluster are those of a host of 8 NPUs. A command that starts processes on
this machine starts two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32", "float64")
MOST_RANKS, MOST_ROWS = 1 << 20, 1 << 30
RAREST, MOST_GROUPS = 999_999_999, 64  # settings.RAREST and MAX_CHUNKS, whose module needs torch
# Parameters of bench, tune and explain that a way to name the layers does not read, or layers of a framework.
UNREAD_BY = {
    "--model": ("layer", "shared"),
    "--shape": ("seq", "micro_batch", "scale", "shared"),
    "--moe": (
        *("layer", "sequence_parallel", "seq", "micro_batch", "scale", "plot_file", "deterministic", "every"),
        "framework",
    ),
    "--framework": ("layer", "sequence_parallel", "deterministic"),
}
UNREAD_BY["--context"] = (*UNREAD_BY["--moe"], "shared")
LAYERS = {"both": ("row", "column"), "row": ("row",), "column": ("column",)}
TP, TP_HERE = 8, 2
SEQUENCE = 4096  # of a model whose preset names none

MINDFORMERS = "YAML file of a MindFormers training (docs/from-mindspore.md)."
ModelOption = Annotated[str | None, typer.Option(help="A preset's layers: ascend-parallel predict --list.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", metavar="M,K,N", help="Matmul [M, K] x [K, N]; may be repeated.")
]
LayerOption = Annotated[str, typer.Option(help="For --shape: row, column or both.")]
SequenceOption = Annotated[
    int | None,
    typer.Option("--seq", min=1, max=MOST_ROWS, help=f"Sequence length; default: the model's, or {SEQUENCE}."),
]
BatchOption = Annotated[
    int, typer.Option("--micro-batch", min=1, max=MOST_ROWS, help="For --model: sequences per micro-batch.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda or npu; default: what has a device for each process, otherwise the CPU.")
]
ParallelOption = Annotated[bool, typer.Option(help="All-gather and reduce-scatter, or all-reduce.")]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that --dtype names."""
    import torch

    from ascend_parallel.tuning.cost_model.tables import lookup

    dtype: torch.dtype = lookup("--dtype", name, {each: getattr(torch, each) for each in DTYPES})
    return dtype
