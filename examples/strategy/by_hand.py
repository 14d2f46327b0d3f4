"""The GPT of gpt.py on 8 processes, by hand: data x tensor x pipeline parallel in plain torch.distributed.

    torchrun --nproc-per-node 8 examples/strategy/by_hand.py

Two pipeline stages (1F1B), each two replicas of two tensor-parallel ranks; annotated.py does the same with annotations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import BATCH, GPT, STEPS, batch_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

PIPELINE, DATA, TENSOR = 2, 2, 2
MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank's groups, and its place in them."""

    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: dist.ProcessGroup

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.pipeline.rank()

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.pipeline.size() - 1


# Tensor parallelism: a column layer reads the whole input, a row layer's output is summed.


class Whole(torch.autograd.Function):
    """The input of column layers: identity; in backward all-reduce the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradient."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The output of row layers: all-reduce; in backward identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum the ranks' outputs."""
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient."""
        return gradient, None


def part(parameter: torch.Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """Return this rank's slice of a parameter."""
    return nn.Parameter(parameter.detach().chunk(group.size(), dim)[group.rank()].clone())


class ColumnLinear(nn.Module):
    """A linear layer; each rank computes some of its outputs."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        """Keep this rank's rows of the weight."""
        super().__init__()
        self.group = group
        self.weight, self.bias = part(whole.weight, 0, group), part(whole.bias, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs from the whole input."""
        return F.linear(Whole.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer; each rank has some of its inputs."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        """Keep this rank's columns of the weight."""
        super().__init__()
        self.group = group
        self.weight, self.bias = part(whole.weight, 1, group), whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the whole output from this rank's part of the input."""
        return Summed.apply(F.linear(x, self.weight), self.group) + self.bias


# Pipeline parallelism: this rank's stage of the model, and the schedule.


class Stage(nn.Module):
    """This rank's part of the GPT."""

    def __init__(self, model: GPT, place: Place) -> None:
        """Take the layers of the stage and cut their linear layers."""
        super().__init__()
        self.place = place
        each = len(model.layers) // place.pipeline.size()
        self.layers = model.layers[place.stage * each : (place.stage + 1) * each]
        for layer in self.layers:
            layer.heads //= place.tensor.size()
            layer.qkv, layer.o = ColumnLinear(layer.qkv, place.tensor), RowLinear(layer.o, place.tensor)
            layer.up, layer.down = ColumnLinear(layer.up, place.tensor), RowLinear(layer.down, place.tensor)
        if place.is_first:
            self.places = model.places
        if place.is_last:
            self.norm = model.norm
        if place.is_first or place.is_last:
            self.tokens = model.tokens  # tied: the first stage's embedding is the last stage's head

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, in the last stage the loss; `x` is tokens in the first stage, else the stream."""
        if self.place.is_first:
            x = self.tokens(x) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        if not self.place.is_last:
            return x
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Schedule1F1B:
    """One forward, one backward (PipeDream's order): a stage holds at most as many micro-batches as stages follow."""

    def __init__(self, stage: Stage) -> None:
        """Start without micro-batches in flight."""
        self.stage, self.place = stage, stage.place
        self.running: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run all micro-batches forward and backward; return the mean loss (0 except in the last stage)."""
        parts = list(zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True))
        ahead = self.place.pipeline.size() - 1 - self.place.stage
        losses = []
        for index, (part_tokens, part_targets) in enumerate(parts):
            losses.append(self.forward(part_tokens, part_targets))
            if index >= ahead:
                self.backward()
        while self.running:
            self.backward()
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        return torch.stack(losses).sum() if self.place.is_last else torch.zeros(())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch through the stage."""
        x = tokens if self.place.is_first else self.receive(tokens.shape, self.place.stage - 1).requires_grad_()
        y = self.stage(x, targets)
        if self.place.is_last:
            y = y / MICRO_BATCHES
        else:
            self.send(y.detach(), self.place.stage + 1)
        self.running.append((x, y))
        return y.detach()

    def backward(self) -> None:
        """Run the oldest micro-batch backward."""
        x, y = self.running.popleft()
        y.backward(None if self.place.is_last else self.receive(y.shape[:2], self.place.stage + 1))
        if not self.place.is_first:
            self.send(x.grad, self.place.stage - 1)

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Start a send, and keep the tensor until it is sent; waiting here would block neighbours on each other."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, group=self.place.pipeline, group_dst=stage), tensor))

    def receive(self, batch_and_length: torch.Size, stage: int) -> torch.Tensor:
        """Return the received stream, or its gradient."""
        parameter = self.stage.layers[0].norm1.weight
        tensor = torch.empty(*batch_and_length, len(parameter), dtype=parameter.dtype)
        dist.recv(tensor, group=self.place.pipeline, group_src=stage)
        return tensor


# Data parallelism.


def reduce_gradients(stage: Stage) -> None:
    """Sum the tied embedding's gradient over its two stages, and average all gradients over the replicas."""
    place = stage.place
    gradients = [parameter.grad for parameter in stage.parameters()]
    if place.is_first or place.is_last:  # with two stages always
        dist.all_reduce(stage.tokens.weight.grad, group=place.pipeline)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=place.data)
    flat /= place.data.size()
    for gradient, summed in zip(gradients, flat.split([part.numel() for part in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def main() -> list[float]:
    """Train on this rank; return the losses of the whole batches."""
    mesh = init_device_mesh("cpu", (PIPELINE, DATA, TENSOR), mesh_dim_names=("pipeline", "data", "tensor"))
    place = Place(**{name: mesh.get_group(name) for name in mesh.mesh_dim_names})
    torch.manual_seed(0)
    stage = Stage(GPT().double(), place)
    schedule = Schedule1F1B(stage)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    rows = BATCH // DATA
    mine = slice(place.data.rank() * rows, (place.data.rank() + 1) * rows)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        loss = schedule.step(tokens[mine], targets[mine]).double()
        reduce_gradients(stage)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # over all last-stage ranks; each tensor-parallel rank has the loss
        losses.append(loss.item() / (DATA * TENSOR))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
