"""One MLP on 4 ranks in each of the four modes, beside one card: the losses are the same.

torchrun --nproc-per-node 4 examples/strategy/modes.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.sharding import TensorShard
from ascend_parallel.training import Strategy, train_step

STEPS = 5


class MLP(nn.Module):
    """The model for one card."""

    def __init__(self, width: int = 8, wide: int = 16) -> None:
        """Make the layers."""
        super().__init__()
        self.up, self.down = nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return self.down(F.gelu(self.up(x)))


class ParallelMLP(nn.Module):
    """The MLP of a rank of `group` (hybrid): weights cut by hand, collectives by the overlapped layers."""

    def __init__(self, whole: MLP, group: dist.ProcessGroup) -> None:
        """Take this rank's columns of the first weight and rows of the second."""
        super().__init__()
        self._group = group
        self.up = nn.Parameter(whole.up.weight.detach().chunk(group.size())[group.rank()].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(group.size(), 1)[group.rank()].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers; the sum over ranks overlaps with the second matmul."""
        options = {"group": self._group, "settings": Settings(num_chunks=2)}
        return row_linear(F.gelu(column_linear(x, self.up, **options)), self.down, **options)

    def tensor_shards(self) -> dict[str, TensorShard]:
        """Return which shards of the whole weights this rank has, for norms and checkpoints."""
        up, down, ranks, rank = self.up.detach(), self.down.detach(), self._group.size(), self._group.rank()
        return {
            "up": TensorShard(up, (up.shape[0] * ranks, up.shape[1]), (rank * up.shape[0], 0)),
            "down": TensorShard(down, (down.shape[0], down.shape[1] * ranks), (0, rank * down.shape[1])),
        }


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return (model(x) - x).square().mean()


COLUMNS, ROWS = ([("dp", 1), ("tp", 1)], None), ([("dp", "tp"), (1, "tp")], None)
STRATEGIES = {
    "data": Strategy(mode="data", mesh={"dp": 4}),
    "semi_auto": Strategy(mode="semi_auto", mesh={"dp": 2, "tp": 2}, operators={"up": COLUMNS, "down": ROWS}),
    "auto": Strategy(mode="auto", mesh={"dp": 2, "tp": 2}, hardware="cpu-gloo"),
    "hybrid": Strategy(mode="hybrid", mesh={"dp": 2, "tp": 2}),
}


def train(mode: str) -> list[float]:
    """Train on this rank in one of the modes; return the losses of whole batches."""
    torch.manual_seed(0)
    model: nn.Module = MLP().double()
    batch = torch.randn(12, 8, dtype=torch.float64)
    strategy = STRATEGIES[mode]
    if mode == "hybrid":
        mesh = strategy.meshes()[0]
        replica, _ = mesh.coordinate(dist.get_rank()) or (0, 0)
        model, batch = ParallelMLP(model, mesh.group("tp")), batch.chunk(2)[replica]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, (batch,), optimizer, strategy, loss=mean_square)
    losses = [step(batch).item() for _ in range(STEPS)]
    step.close()
    return losses


def train_on_one_card() -> list[float]:
    """Return the losses of one process."""
    torch.manual_seed(0)
    model, batch = MLP().double(), torch.randn(12, 8, dtype=torch.float64)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        loss = mean_square(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train in all modes and print the losses."""
    expected = train_on_one_card()
    for mode in STRATEGIES:
        losses = train(mode)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        if dist.get_rank() == 0:
            print(f"{mode:10} " + "  ".join(f"{loss:.9f}" for loss in losses))
    if dist.get_rank() == 0:
        print(f"{'one card':10} " + "  ".join(f"{loss:.9f}" for loss in expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
