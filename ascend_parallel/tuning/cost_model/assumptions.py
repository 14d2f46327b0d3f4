"""What a prediction of a training step assumes: the hardware, the layout, the degrees and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.step import Layout, operators_of


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
            cp_exchange=self.cp_exchange,
            cp_groups=self.cp_groups,
            ep=self.ep,
            etp=self.etp,
            activation=operators_of(self.layout.runtime),
            rotary=operators_of(self.layout.runtime),
        )
