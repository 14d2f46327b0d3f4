"""Stages on meshes of different shapes: tensors and gradients between them go block by block, from owners to readers.

A tensor that is sent is whole or cut, never a term of a sum, on both meshes. Each rank gets the blocks of its part from
ranks that have them; the senders share the work. Gradients return in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import Layout, Shape, local_shape
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.redistribute.across_meshes import Transfer, block_of, rank_bounds, transfers
from ascend_parallel.training.pipeline.groups import Groups
from ascend_parallel.training.pipeline.split_plan import StagePlan
from ascend_parallel.training.pipeline.stage import RankStage, StageModule
from ascend_parallel.tuning.step_time.timing import Slot

Blocks = list[tuple[Transfer, torch.Tensor]]


@dataclass(frozen=True)
class Channel:
    """The way of a tensor from the ranks of a mesh, in a layout without sums, to those of another."""

    shape: Shape
    dtype: torch.dtype
    source_mesh: ProcessMesh
    source: Layout
    target_mesh: ProcessMesh
    target: Layout

    @cached_property
    def sent(self) -> tuple[Transfer, ...]:
        """The blocks that this rank sends."""
        return tuple(each for each in self._all() if each.sender == dist.get_rank())

    @cached_property
    def received(self) -> tuple[Transfer, ...]:
        """The blocks that this rank receives."""
        return tuple(each for each in self._all() if each.receiver == dist.get_rank())

    @cached_property
    def back(self) -> Channel:
        """Return the way of the gradient."""
        return Channel(self.shape, self.dtype, self.target_mesh, self.target, self.source_mesh, self.source)

    def sends(self, local: torch.Tensor | None, group: dist.ProcessGroup, device: torch.device) -> list[dist.P2POp]:
        """Return this rank's sends of its part; None: of zeros."""
        rank = dist.get_rank()
        if local is None:
            place = self.source_mesh.coordinate(rank)
            assert place is not None
            shape = local_shape(self.shape, self.source, self.source_mesh.shape, place)
            local = torch.zeros(shape, dtype=self.dtype, device=device)
        own = rank_bounds(self.shape, self.source_mesh, self.source, rank)
        return [
            dist.P2POp(dist.isend, block_of(local.detach(), each.bounds, own).contiguous(), each.receiver, group)
            for each in self.sent
        ]

    def receives(self, group: dist.ProcessGroup, device: torch.device) -> tuple[list[dist.P2POp], Blocks]:
        """Return this rank's receives, and the blocks that they fill."""
        blocks = [
            (each, torch.empty([stop - start for start, stop in each.bounds], dtype=self.dtype, device=device))
            for each in self.received
        ]
        return [dist.P2POp(dist.irecv, block, each.sender, group) for each, block in blocks], blocks

    def joined(self, blocks: Blocks, device: torch.device) -> torch.Tensor:
        """Return this rank's part, made of the received blocks."""
        own = rank_bounds(self.shape, self.target_mesh, self.target, dist.get_rank())
        if len(blocks) == 1 and blocks[0][0].bounds == own:
            return blocks[0][1]
        part = torch.empty([stop - start for start, stop in own], dtype=self.dtype, device=device)
        for transfer, block in blocks:
            block_of(part, transfer.bounds, own).copy_(block)
        return part

    def _all(self) -> tuple[Transfer, ...]:
        return transfers(self.shape, self.source_mesh, self.source, self.target_mesh, self.target)


def channels(part: StagePlan, following: StagePlan) -> tuple[tuple[Channel, bool], ...]:
    """Return, for each tensor that `part` sends to the next stage, its channel, and whether it has a gradient."""
    found = []
    for value, name in zip(part.plan.graph.outputs, following.received, strict=True):
        meta, there = part.plan.graph.meta(value), Value(name)
        channel = Channel(
            tuple(meta.shape),
            meta.dtype,
            part.plan.mesh,
            part.plan.returned[value],
            following.plan.mesh,
            following.plan.layouts[there],
        )
        has_gradient = there in following.plan.differentiable and (
            meta.dtype.is_floating_point or meta.dtype.is_complex
        )
        found.append((channel, has_gradient))
    return tuple(found)


def make_stage(module: StageModule, parts: Sequence[StagePlan], groups: Groups, executed: list[Slot]) -> RankStage:
    """Return a stage of this rank; its tensors go to the same place of the next mesh if all meshes have one shape."""
    device, count = torch.device(default_device()), len(parts)
    if groups.everybody is None:
        return RankStage(module, count, device, groups.along, executed)
    stage = CrossMeshStage(module, count, device, groups.along, executed)
    stage.connect(parts, groups.everybody)
    return stage


class CrossMeshStage(RankStage):
    """A stage on this rank that exchanges blocks with the ranks of the stages before and after it.

    The methods of torch's stage that are replaced here return the sends and receives of one micro-batch, or their
    results.
    """

    def connect(self, parts: Sequence[StagePlan], group: dist.ProcessGroup) -> None:
        """Take the plans of all stages, and a group of all ranks."""
        here = self.stage_index
        self._everybody = group
        self._before = channels(parts[here - 1], parts[here]) if here else ()
        self._after = channels(parts[here], parts[here + 1]) if here + 1 < len(parts) else ()
        self._arrived: dict[tuple[bool, int], list[Blocks]] = {}  # by direction (ahead or not) and micro-batch
        # The same for tensors of stages on this rank, which torch hands over itself.
        self._local: dict[tuple[bool, int], list[Any]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's tensors to the next stage."""
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        pairs = zip(self._after, outputs, strict=True) if self._after else ()
        return [op for (channel, _), out in pairs for op in channel.sends(out, self._everybody, self.device)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's tensors from the stage before."""
        return self._receives(True, fwd_chunk_id, [channel for channel, _ in self._before])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's gradients to the stage before."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        return [
            op
            for (channel, has_gradient), gradient in zip(self._before, gradients, strict=True)
            if has_gradient
            for op in channel.back.sends(gradient, self._everybody, self.device)
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's gradients from the next stage."""
        if not self.has_backward or self.is_last:
            return []
        back = [channel.back for channel, has_gradient in self._after if has_gradient]
        return self._receives(False, bwd_chunk_id, back)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the tensors of the stage before, which is on this rank too."""
        outputs = prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        self._local[True, mb_index] = [output.detach() for output in outputs]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the next stage, which is on this rank too."""
        self._local[False, mb_index] = list(next_stage_bwd_outputs)

    def clear_runtime_states(self) -> None:
        """Drop what a step, or a failed step, has left."""
        super().clear_runtime_states()
        self._arrived.clear()
        self._local.clear()

    def _receives(self, ahead: bool, micro_batch: int, expected: Sequence[Channel]) -> list[dist.P2POp]:
        received = [channel.receives(self._everybody, self.device) for channel in expected]
        self._arrived[ahead, micro_batch] = [blocks for _, blocks in received]
        return [op for ops, _ in received for op in ops]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """Return a micro-batch's tensors of the stage before."""
        own = self._local.pop((True, fwd_chunk_id), None)
        if own is None:
            arrived = self._arrived.pop((True, fwd_chunk_id))
            pairs = zip(self._before, arrived, strict=True)
            own = [channel.joined(blocks, self.device) for (channel, _), blocks in pairs]
        computes = self.has_backward and torch.is_grad_enabled()
        return tuple(
            tensor.requires_grad_(has_gradient and computes)
            for tensor, (_, has_gradient) in zip(own, self._before, strict=True)
        )

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        """Return a micro-batch's gradients of the next stage; None for a tensor without a gradient."""
        own = self._local.pop((False, bwd_chunk_id), None)
        if own is not None:
            return tuple(own)
        blocks = iter(self._arrived.pop((False, bwd_chunk_id)))
        return tuple(
            channel.back.joined(next(blocks), self.device) if has_gradient else None
            for channel, has_gradient in self._after
        )

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        """Return that all shapes are known; torch's stages would ask each other (from torch 2.13 on)."""
        return torch.ones(1, dtype=torch.int32, device=self.device)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        """Return that all shapes are known."""
        return torch.ones(1, dtype=torch.int32, device=self.device)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no sends: torch before 2.13 tries the ways between the stages that it knows of."""
        return []
