"""A plugin of vLLM that plants a fault, as PLANTED says: a norm with another order of operations, or smaller tiles."""

import os


def register():
    fault = os.environ.get("PLANTED")
    if fault == "norm":
        plant_norm()
    elif fault == "tile":
        plant_tile()


def plant_norm():
    import torch
    import vllm.model_executor.layers.linear  # noqa: F401  this package's patches come first
    from vllm.model_executor.layers.layernorm import RMSNorm

    inner = RMSNorm.forward

    def forward(self, x, residual=None):
        if residual is not None:
            return inner(self, x, residual)
        return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], self.weight.double(), self.variance_epsilon).to(x)

    RMSNorm.forward = forward


def plant_tile():
    import torch

    multiply = torch.mm

    def by_rows(x, w, out=None):
        y = torch.cat([multiply(row, w) for row in x.split(1)])
        return y if out is None else out.copy_(y)

    torch.mm = by_rows
