"""Compute the times of a transformer layer, and of embedding and logits, forward and backward, on one rank."""

from __future__ import annotations

from functools import cached_property

from ascend_parallel.ops.problem import ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.layer_passes import BACKWARD, FORWARD, LinearPass, Schedule
from ascend_parallel.tuning.cost_model.models import Batch, Linear, Model, head_linear, layer_linears
from ascend_parallel.tuning.cost_model.region import Elementwise, Region
from ascend_parallel.tuning.cost_model.tables import require

RECOMPUTE = ("none", "selective", "full")
# Multiply-adds of a fused attention kernel's backward / forward: five products / two products.
ATTENTION_BACKWARD = 2.5
# Bytes of element-wise backward / forward.
ELEMENTWISE_BACKWARD = 2.0
# Row-wide tensors that pass through memory: a norm reads 1 and writes 1, a residual reads 2 and writes 1, an
# activation reads 1 (gated: 2) and writes 1.
NORM_ACCESSES, RESIDUAL_ACCESSES = 2, 3


class TransformerLayerTime:
    """The times of one transformer layer on one rank; seconds per micro-batch."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Set up a layer of `model` as `batch` distributes it."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linears = layer_linears(model, batch)
        self.parts = {
            direction: [LinearPass(costs, linear, direction) for linear in self.linears]
            for direction in (FORWARD, BACKWARD)
        }

    @cached_property
    def attention(self) -> float:
        """Seconds of causal attention's forward in a fused kernel: half the products of s x s scores."""
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
        """Seconds of the forward of norms, residuals, rotary embedding and activation: their memory traffic."""
        return sum(self._whole(work) for work in (self.tail, self.tail, self.rotary, self.activation))

    @cached_property
    def tail(self) -> Elementwise:
        """A residual and a norm; a layer has two of each."""
        return self._elementwise(self.batch.own_rows * self.model.hidden * (NORM_ACCESSES + RESIDUAL_ACCESSES), 2)

    @cached_property
    def rotary(self) -> Elementwise:
        """The rotary embedding of queries and keys."""
        heads = -(-(self.model.heads + self.model.kv_heads) // self.batch.tp)
        return self._elementwise(2 * self.batch.rows * heads * self.model.head_dim, 1)

    @cached_property
    def activation(self) -> Elementwise:
        """The MLP's activation."""
        accesses = (3 if self.model.gated else 2) * self.batch.rows * -(-self.model.ffn // self.batch.tp)
        return self._elementwise(accesses, 1)

    def region(self, count: int) -> Region:
        """Return the layer's region in `count` chunks."""
        return Region(self.costs, self.parts, self.batch, count, tail=self.tail, activation=self.activation)

    def _elementwise(self, accesses: int, launches: int) -> Elementwise:
        return Elementwise(seconds=self.costs.stream(self.batch.dtype.itemsize * accesses), launches=launches)

    def _whole(self, work: Elementwise) -> float:
        return work.seconds + work.launches * self.costs.hardware.matmul.launch

    @cached_property
    def replicated(self) -> float:
        """Seconds of the matmuls that each rank runs on its own rows: latent attention's down projection."""
        model, batch = self.model, self.batch
        if not model.latent:
            return 0.0
        width = model.q_rank + model.kv_rank + model.rotary_dim
        return self.costs.matmul(batch.own_rows, model.hidden, width, batch.dtype.itemsize)

    def communication(self, recompute: str) -> float:
        """Return the time of all collectives of forward and backward, each in one chunk."""
        forward, backward = (sum(part.communication for part in parts) for parts in self.parts.values())
        return forward + backward + (forward if recompute == "full" else 0.0)

    def forward(self, schedule: Schedule) -> float:
        """Return the time of forward."""
        if schedule.region and self.batch.tp > 1:
            region = self.region(int(schedule.name))
            outside = 0.0 if region.pulls else sum(schedule.seconds(part) for part in self.parts[FORWARD][:-3])
            return region.forward().seconds + outside + self.attention + self._whole(self.rotary) + self.replicated
        linear = sum(schedule.seconds(part) for part in self.parts[FORWARD])
        return linear + self.attention + self.elementwise + self.replicated

    def backward(self, schedule: Schedule, recompute: str = "none") -> float:
        """Return the time of backward; recompute: "selective" repeats attention's forward, "full" the layer's."""
        require("--recompute", recompute, recompute in RECOMPUTE, ", ".join(RECOMPUTE))
        parts, elementwise, linear = self.parts[BACKWARD], self.elementwise, 0.0
        if schedule.region and self.batch.tp > 1:
            linear = self.region(int(schedule.name)).backward().seconds
            parts, elementwise = parts[:-2], elementwise - self._whole(self.activation)
        linear += sum(schedule.seconds(part) for part in parts)
        other = ATTENTION_BACKWARD * self.attention + ELEMENTWISE_BACKWARD * elementwise + 2 * self.replicated
        recomputed = {"none": 0.0, "selective": self.attention, "full": self.forward(schedule)}[recompute]
        return linear + other + recomputed


class EmbeddingAndLogitsTime:
    """The times of the embedding on the first stage and of the logits on the last stage."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Set up the ends of `model` as `batch` distributes it."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linear: Linear = head_linear(model, batch)
        self.parts = {direction: LinearPass(costs, self.linear, direction) for direction in (FORWARD, BACKWARD)}

    @property
    def embedding(self) -> float:
        """Seconds of the collective that sums the looked-up rows over the ranks, which share the vocabulary."""
        batch = self.batch
        kind = REDUCE_SCATTER if batch.sequence_parallel else ALL_REDUCE
        size = batch.rows * self.model.hidden * batch.dtype.itemsize
        return self.costs.collective(kind, size, batch.tp)

    @property
    def loss(self) -> float:
        """Seconds of cross-entropy: four passes over this rank's logits in fp32."""
        return self.costs.stream(4 * 4 * self.batch.rows * -(-self.model.vocab // self.batch.tp))

    def seconds(self, schedule: Schedule) -> tuple[float, float]:
        """Return the seconds of logits and loss, forward and backward."""
        forward = schedule.seconds(self.parts[FORWARD]) + self.loss
        return forward, schedule.seconds(self.parts[BACKWARD]) + self.loss
