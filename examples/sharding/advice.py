"""Which operators of a small attention model to configure, by the four published principles; needs no processes.

python examples/sharding/advice.py
"""

import torch
from torch import nn

from ascend_parallel.sharding import Advice, ProcessMesh, advise, propagate, trace


class Attention(nn.Module):
    """Attention of functional matmuls, which only their numbers name."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run on ``[batch, length, width]``."""
        q, k, v = (each(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = torch.matmul(q, k.transpose(-2, -1)).softmax(-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).flatten(2))


def main() -> tuple[Advice, float]:
    """Return the advice for 2 x 2 ranks, and the predicted time of a plan that follows the advice."""
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    with torch.device("meta"):
        model, args = nn.Sequential(Attention(), Attention()), (torch.zeros(64, 128, 512),)
    advice = advise(model, args, mesh, data_dim="dp")
    plan = propagate(
        trace(model, args),
        mesh,
        advice.strategies,
        data_dim="dp",
        only_data_cuts_batch=True,
        objective="redistribution",
    )
    return advice, plan.seconds


if __name__ == "__main__":
    advice, seconds = main()
    print(advice)
    print(f"collectives of the plan that follows the advice: {1e3 * seconds:.3f} ms a step")
