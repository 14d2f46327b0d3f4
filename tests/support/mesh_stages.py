"""Strategies of the example's GPT cut as Megatron-core does, stages on meshes of different shapes, two small layers."""

import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import PipelineOptions

COLUMNS, ROWS = ([("dp", 1, 1), ("tp", 1)], None), ([("dp", 1, "tp"), (1, "tp")], None)
MEGATRON = {"layers.*.qkv": COLUMNS, "layers.*.up": COLUMNS, "layers.*.o": ROWS, "layers.*.down": ROWS}
SQUARE, LINE, ACROSS = {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}


def pipeline(*meshes, **options):
    return PipelineOptions(**{"degree": len(meshes), "meshes": meshes, "micro_batches": 4, **options})


def semi_auto(*meshes, **options):
    pipelined = {name: options.pop(name) for name in ("schedule", "virtual_stages", "stages") if name in options}
    return {"mode": "semi_auto", "operators": MEGATRON, "pipeline": pipeline(*meshes, **pipelined), **options}


class Two(nn.Module):
    """Two layers, a stage each."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x, y):
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def rows_of(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(12, width, dtype=torch.float64, generator=generator) for width in (6, 4))


SMALL = {
    "mode": "auto",
    "pipeline": pipeline({"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}, micro_batches=3, stages={"first": 0, "last": 1}),
}
