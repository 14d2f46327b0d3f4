"""What a prediction of a training step assumes: the hardware, the layout, the degrees and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ascend_parallel.ops.key_gather import GATHER, HEADS
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.models import TORCH, Batch, Model
from ascend_parallel.tuning.cost_model.step import Layout, operators_of
from ascend_parallel.tuning.cost_model.tables import require


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a prediction assumes of a run; a `sequence` or `micro_batch` of None: as `batch` says."""

    hardware: Hardware
    layout: Layout
    dtype: torch.dtype
    tp: int
    cp: int = 1
    cp_exchange: str = ""
    cp_groups: int = 1
    ep: int = 1
    etp: int = 1
    sequence: int | None = None
    micro_batch: int | None = None
    sequence_parallel: bool = True

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the hardware."""
        return CostModel(self.hardware)

    def batch(self, model: Model) -> Batch:
        """Return the batch of `model`; by default the sequence that it was trained with, and micro-batch 1."""
        return Batch(
            sequence=self.sequence or model.sequence or 4096,
            micro_batch=self.micro_batch or 1,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            device=self.hardware.device,
            cp=self.cp,
            cp_exchange=self._exchange(model),
            cp_groups=self.cp_groups,
            ep=self.ep,
            etp=self.etp,
            activation=operators_of(self.layout.runtime),
            rotary=operators_of(self.layout.runtime),
        )

    def _exchange(self, model: Model) -> str:
        """Return how keys reach the queries: a plan gathers them where the ranks do not divide the heads."""
        heads = -(-model.heads // self.tp)
        shared = heads % self.cp == 0
        words = f"gather: --cp {self.cp} does not divide the {heads} heads of a rank"
        require("--cp-exchange", self.cp_exchange, self.cp_exchange != HEADS or shared, words)
        planned = operators_of(self.layout.runtime) == TORCH
        return GATHER if planned and not self.cp_exchange and not shared else self.cp_exchange
