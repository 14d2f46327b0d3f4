"""A transformer layer and what stands before and after the layers, forward and backward, on one rank."""

from __future__ import annotations

from functools import cached_property

from ascend_parallel.ops.problem import ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.layer_passes import BACKWARD, FORWARD, LinearPass, Schedule
from ascend_parallel.tuning.cost_model.models import Batch, Linear, Model, head_linear, layer_linears
from ascend_parallel.tuning.cost_model.tables import require

RECOMPUTE = ("none", "selective", "full")
# A fused attention kernel's backward against its forward, in multiply-adds (five products for two).
ATTENTION_BACKWARD = 2.5
# Backward of the element-wise parts reads and writes about twice what forward does.
ELEMENTWISE_BACKWARD = 2.0
NORMS, RESIDUALS = 2, 2
# Tensors of the width of a row that pass through memory: a norm reads one and writes one, a residual
# reads two and writes one, an activation reads one (gated: two) and writes one.
NORM_ACCESSES, RESIDUAL_ACCESSES = 2, 3


class Layer:
    """One transformer layer on one rank; times in seconds for one micro-batch."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Take the layer of `model` as `batch` spreads it."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linears = layer_linears(model, batch)
        self.parts = {
            direction: [LinearPass(costs, linear, direction) for linear in self.linears]
            for direction in (FORWARD, BACKWARD)
        }

    @cached_property
    def attention(self) -> float:
        """Forward of causal attention by a fused kernel: half of the products of s x s scores."""
        model, batch, hardware = self.model, self.batch, self.costs.hardware
        heads = -(-model.heads // batch.tp)
        pairs = batch.micro_batch * batch.sequence**2 / 2
        macs = pairs * heads * (model.head_dim + model.value_dim)
        unit = hardware.matmul
        rate = unit.macs_per_cycle * unit.frequency * unit.cores * hardware.attention.utilisation
        rate *= unit.share_32_bit if batch.dtype.itemsize >= 4 else 1.0
        return unit.launch + macs / rate

    @cached_property
    def elementwise(self) -> float:
        """Forward of norms, residuals, rotary embedding and activation: their bytes through memory."""
        model, batch = self.model, self.batch
        item = batch.dtype.itemsize
        own = batch.own_rows * model.hidden * (NORMS * NORM_ACCESSES + RESIDUALS * RESIDUAL_ACCESSES)
        heads = -(-(model.heads + model.kv_heads) // batch.tp)
        rotary = 2 * batch.rows * heads * model.head_dim
        activation = (3 if model.gated else 2) * batch.rows * -(-model.ffn // batch.tp)
        launches = NORMS + RESIDUALS + 2
        return self.costs.stream(item * (own + rotary + activation)) + launches * self.costs.hardware.matmul.launch

    @cached_property
    def replicated(self) -> float:
        """Matmuls that every rank runs on its own rows: latent attention's way down."""
        model, batch = self.model, self.batch
        if not model.latent:
            return 0.0
        width = model.q_rank + model.kv_rank + model.rotary_dim
        return self.costs.matmul(batch.own_rows, model.hidden, width, batch.dtype.itemsize)

    def forward(self, schedule: Schedule) -> float:
        """Return the time of forward."""
        linear = sum(schedule.seconds(part) for part in self.parts[FORWARD])
        return linear + self.attention + self.elementwise + self.replicated

    def backward(self, schedule: Schedule, recompute: str = "none") -> float:
        """Return the time of backward; recompute: "selective" runs attention's forward again, "full" the layer's."""
        require("--recompute", recompute, recompute in RECOMPUTE, ", ".join(RECOMPUTE))
        linear = sum(schedule.seconds(part) for part in self.parts[BACKWARD])
        other = ATTENTION_BACKWARD * self.attention + ELEMENTWISE_BACKWARD * self.elementwise + 2 * self.replicated
        again = {"none": 0.0, "selective": self.attention, "full": self.forward(schedule)}[recompute]
        return linear + other + again


class Ends:
    """Embedding and logits on the first and last stage."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Take the ends of `model` as `batch` spreads it."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linear: Linear = head_linear(model, batch)
        self.parts = {direction: LinearPass(costs, self.linear, direction) for direction in (FORWARD, BACKWARD)}

    @property
    def embedding(self) -> float:
        """The vocabulary is spread over ranks, so the looked-up rows are summed."""
        batch = self.batch
        kind = REDUCE_SCATTER if batch.sequence_parallel else ALL_REDUCE
        size = batch.rows * self.model.hidden * batch.dtype.itemsize
        return self.costs.collective(kind, size, batch.tp)

    @property
    def loss(self) -> float:
        """Cross-entropy of this rank's share of the logits, four passes over them in fp32."""
        return self.costs.stream(4 * 4 * self.batch.rows * -(-self.model.vocab // self.batch.tp))

    def seconds(self, schedule: Schedule) -> tuple[float, float]:
        """Return forward and backward of the last stage's end."""
        forward = schedule.seconds(self.parts[FORWARD]) + self.loss
        return forward, schedule.seconds(self.parts[BACKWARD]) + self.loss
