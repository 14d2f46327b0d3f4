"""The log-softmax that trainer and server share: sums over the vocabulary in eight blocks and one tree, in fp32.

A row's bits depend neither on the rows beside it nor on how many ranks share the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.blocks import BLOCKS
from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.tree import sum_of_blocks


def log_softmax(
    logits: torch.Tensor, *, group: dist.ProcessGroup | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-softmax, in fp32, of logits [..., V / R] over the vocabulary V that the ranks of `group` share.

    group=None: logits [..., V] are whole. Raises `DegreeError` for a shared vocabulary that 8 blocks do not divide.
    """
    x, largest, total = _parts(logits, group, temperature)
    return x.sub_(largest).sub_(total.log())


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, *, group: dist.ProcessGroup | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprobs [...], in fp32, of tokens [...] by logits [..., V / R], as `log_softmax` computes them."""
    made: torch.Tensor = _Logprobs.apply(logits, tokens, group, temperature)  # type: ignore[no-untyped-call]
    return made


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, group: dist.ProcessGroup | None, temperature: float
    ) -> torch.Tensor:
        x, largest, total = _parts(logits, group, temperature)
        columns, first = x.shape[-1], 0 if group is None else group.rank() * x.shape[-1]
        place = tokens.unsqueeze(-1) - first
        own = (place >= 0) & (place < columns)
        place = place.clamp(0, columns - 1)
        chosen = x.gather(-1, place).sub_(largest).sub_(total.log()).masked_fill_(~own, 0)
        ctx.save_for_backward(logits, largest, total, place, own)
        ctx.temperature = temperature
        if group is not None and group.size() > 1:  # one rank has it, the others zeros
            chosen = sum_of_blocks([chosen], group)
        return chosen.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        logits, largest, total, place, own = ctx.saved_tensors
        dx = _divided(logits, ctx.temperature).sub_(largest).exp_().div_(total).mul_(-dy.unsqueeze(-1))
        dx.scatter_add_(-1, place, dy.unsqueeze(-1) * own)
        if ctx.temperature != 1:
            dx.div_(ctx.temperature)
        return dx.to(logits.dtype), None, None, None


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return a copy in fp32, divided by the temperature."""
    x = logits.detach().to(torch.float32, copy=True)
    return x if temperature == 1 else x.div_(temperature)


def _parts(
    logits: torch.Tensor, group: dist.ProcessGroup | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits [..., V / R] in fp32, the largest of each row and the sum of exponentials [..., 1]."""
    x = _divided(logits, temperature)
    ranks = 1 if group is None else group.size()
    if ranks > 1 and (x.shape[-1] * ranks) % BLOCKS:
        whole = x.shape[-1] * ranks
        raise DegreeError(f"the log-softmax over {whole} tokens: {ranks} ranks cannot share {BLOCKS} equal blocks")
    largest = x.amax(-1, keepdim=True)
    if group is not None and ranks > 1:
        largest = _largest(largest, group)
    width, count = -(-x.shape[-1] * ranks // BLOCKS), BLOCKS // ranks
    sums = [(block - largest).exp_() for block in torch.split(x, width, -1)]
    sums = [_sum_of_rows(block) for block in sums]
    sums += [torch.zeros_like(sums[0]) for _ in range(count - len(sums))]
    return x, largest, sum_of_blocks(sums, group if ranks > 1 else None)


def _sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sums [..., 1] of rows, never of a single one: torch shares that among threads."""
    rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    if rows.shape[0] == 1:
        return rows.expand(2, -1).contiguous().sum(-1, keepdim=True)[:1].view(*x.shape[:-1], 1)
    return rows.sum(-1, keepdim=True).view(*x.shape[:-1], 1)


def _largest(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = own.new_empty(group.size(), *own.shape)
    with Pending(parts, "largest logits", group) as pending:
        pending.launch(all_gather_single, parts.view(-1), own.contiguous().view(-1), group)
        gathered: torch.Tensor = pending.wait()
    return gathered.amax(0)
