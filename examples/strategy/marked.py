"""One marked model in both modes, as in Paddle: a step on DTensors to look at it, then training by the graph.

torchrun --nproc-per-node 4 examples/strategy/marked.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ascend_parallel.sharding import (
    ProcessMesh,
    Replicate,
    Shard,
    ShardingStage1,
    reshard,
    shard_dataloader,
    shard_layer,
    shard_optimizer,
    shard_tensor,
    unshard,
)
from ascend_parallel.training import to_static


class MLP(nn.Module):
    """Two matmuls for a single card, and a mark between them."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """Make the layers."""
        super().__init__()
        self.mesh, self.up, self.down = mesh, nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for rows ``[batch, 64]``."""
        hidden = torch.relu(self.up(x))
        return self.down(reshard(hidden, self.mesh, [Shard(0), Shard(1)]))


def marks(path: str, module: nn.Module, mesh: ProcessMesh) -> None:
    """Cut the first weight by columns and the second by rows along mp."""
    if isinstance(module, nn.Linear):
        module.weight = shard_tensor(module.weight, mesh, [Replicate(), Shard(0 if path == "up" else 1)])


def main() -> tuple[float, list[float]]:
    """Return the loss of the eager run, and the losses of the graph."""
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    torch.manual_seed(0)
    model = shard_layer(MLP(mesh), mesh, marks)
    data = TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    loader = shard_dataloader(DataLoader(data, batch_size=16), mesh, "dp")
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), ShardingStage1("dp"))

    x, target = next(iter(loader))
    output = model(x)  # a DTensor: print it, take its norm, set a breakpoint
    eager = unshard(nn.functional.mse_loss(output, target)).item()

    training = to_static(model, loader, nn.MSELoss(), optimizer)
    losses = [training(*batch).item() for _ in range(5) for batch in loader]
    if dist.get_rank() == 0:
        print(training.step.explain())
    training.write_back()
    training.close()
    return eager, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    eager, losses = main()
    if dist.get_rank() == 0:
        print(f"eager {eager:.6f}; graph {losses[0]:.6f}, then {losses[-1]:.6f}")
    dist.destroy_process_group()
