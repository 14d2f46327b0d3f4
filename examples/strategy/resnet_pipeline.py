"""A small ResNet in two pipeline stages, as published for MindSpore: head, layer1, layer2 | layer3, layer4, pool, fc.

    torchrun --nproc-per-node 2 examples/strategy/resnet_pipeline.py

With more ranks (an even number) each stage is data parallel. Every rank also trains the whole model by itself,
micro-batch by micro-batch, since batch normalisation is over a micro-batch.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding import ProcessMesh, propagate, trace
from ascend_parallel.training.pipeline.pipeline import Pipeline

STEPS, MICRO_BATCHES, CLASSES = 10, 4, 8


class Block(nn.Module):
    """Three convolutions, the middle one narrow, beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Make the layers."""
        super().__init__()
        narrow = after // 4
        self.conv1, self.norm1 = nn.Conv2d(before, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.norm2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.norm3 = nn.Conv2d(narrow, after, 1, bias=False), nn.BatchNorm2d(after)
        self.short, self.norm = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.norm(self.short(x)))


class ResNet(nn.Module):
    """A model that returns the mean loss of the classes."""

    def __init__(self, width: int = 8) -> None:
        """Make the layers and mark each with its stage."""
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Block(width, 2 * width, stride=1)
        self.layer2 = Block(2 * width, 4 * width, stride=2)
        self.layer3 = Block(4 * width, 8 * width, stride=2)
        self.layer4 = Block(8 * width, 16 * width, stride=2)
        self.fc = nn.Linear(16 * width, CLASSES)
        self.head.pipeline_stage = 0
        self.layer1.pipeline_stage = 0
        self.layer2.pipeline_stage = 0
        self.layer3.pipeline_stage = 1
        self.layer4.pipeline_stage = 1
        self.fc.pipeline_stage = 1

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = self.layer2(self.layer1(self.head(images)))
        x = self.layer4(self.layer3(x))
        x = x.mean((2, 3), keepdim=True).squeeze((2, 3))
        return F.cross_entropy(self.fc(x), classes)


def train() -> tuple[list[float], list[float]]:
    """Return the losses of the pipeline and of the whole model."""
    torch.manual_seed(0)
    model = ResNet().double()
    each = dist.get_world_size() // 2
    rows = 2 * each
    images = torch.randn(MICRO_BATCHES * rows, 3, 32, 32, dtype=torch.float64)
    classes = torch.randint(CLASSES, (MICRO_BATCHES * rows,))

    meshes = [ProcessMesh(list(range(first, first + each)), ["dp"]) for first in (0, each)]
    plan = propagate(
        trace(model, (images[:rows], classes[:rows])), meshes[0], semi_auto="dp", objective="redistribution"
    )
    pipeline = Pipeline(model, plan, None, meshes, schedule="1f1b", micro_batches=MICRO_BATCHES, local_inputs=False)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(float(pipeline.step(images, classes)))
        pipeline.reduce_gradients()
        optimizer.step()
        pipeline.zero_grad()
    expected = train_unsharded(model, images, classes)
    same_statistics(pipeline, model)
    return losses, expected


def train_unsharded(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> list[float]:
    """Return the losses of the model on one rank."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in zip(images.chunk(MICRO_BATCHES), classes.chunk(MICRO_BATCHES), strict=True):
            loss = model(*micro_batch) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def same_statistics(pipeline: Pipeline, model: nn.Module) -> None:
    """Raise unless the running statistics of both are the same."""
    for module in pipeline.modules:
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(buffer, model.get_buffer(name), rtol=1e-8, atol=1e-10)


def main() -> int:
    """Train the pipeline and the whole model; return 0 if the losses are equal."""
    dist.init_process_group("gloo")
    losses, expected = train()
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"losses {losses[0]:.6f} ... {losses[-1]:.6f}; whole model {expected[0]:.6f} ... {expected[-1]:.6f}")
        print(f"largest difference {worst:.1e}")
    dist.destroy_process_group()
    return int(worst > 1e-9)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 2 examples/strategy/resnet_pipeline.py")
    sys.exit(main())
