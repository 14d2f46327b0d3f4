"""Train a compiled tensor-parallel MLP with sequence parallelism and torch's async tensor parallelism.

    torchrun --nproc-per-node 2 examples/frameworks/compiled_tp.py
    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/compiled_tp.py --register

Plain, torch's pass for async tensor parallelism changes nothing on CPU ranks. With --register its operators run
overlapped. Losses and gradients are the same. The last line counts the operators' calls and chunks.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch._inductor.config
import torch.distributed as dist
from results import DTYPES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

BATCH, SEQUENCE, HIDDEN = 2, 384, 256
PLAN = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


class Block(nn.Module):
    """A norm and a residual MLP."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.ReLU(), nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, S, H] plus the MLP of its norm."""
        return x + self.mlp(self.norm(x))


def train(steps: int, dtype: torch.dtype) -> list[float]:
    """Return the losses, and last the sum of the squared gradients of the last step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = parallelize_module(Block().to(dtype), mesh, PLAN)
    x, target = (
        distribute_tensor(torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=dtype), mesh, [Shard(1)])
        for _ in ("inputs", "targets")
    )
    torch._inductor.config._micro_pipeline_tp = True  # torch's switch of async tensor parallelism
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (compiled(x) - target).square().mean().full_tensor()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    squares = [parameter.grad.full_tensor().square().sum().item() for parameter in model.parameters()]
    return [*numbers, sum(squares)]


def main() -> None:
    """Train, and print what rank 0 saw as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--register", action="store_true", help="run torch's operators by ascend_parallel")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    arguments = parser.parse_args()
    if arguments.register:
        import ascend_parallel

        ascend_parallel.register_symm_mem()
    dist.init_process_group("gloo")
    *losses, squares = train(arguments.steps, getattr(torch, arguments.dtype))
    if dist.get_rank() == 0:
        counts = ascend_parallel.ops.COUNTS.as_dict() if arguments.register else {}
        print(json.dumps({"losses": losses, "squared gradients": squares, "operators": counts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
