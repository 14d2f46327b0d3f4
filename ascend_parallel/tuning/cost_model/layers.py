"""Compute the times of a transformer layer, and of embedding and logits, forward and backward, on one rank."""

from __future__ import annotations

from functools import cached_property

from ascend_parallel.devices import device_type
from ascend_parallel.ops.key_gather import GATHER, HEADS
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.process_groups.collectives import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND
from ascend_parallel.tuning.cost_model.cost import ATTENTION_BACKWARD, ELEMENTWISE_BACKWARD, CostModel
from ascend_parallel.tuning.cost_model.experts import ExpertsTime
from ascend_parallel.tuning.cost_model.layer_passes import ChunkSchedule, LinearPass
from ascend_parallel.tuning.cost_model.models import TORCH, Batch, Model, ModelLinear, head_linear, layer_linears
from ascend_parallel.tuning.cost_model.region import Elementwise, Region
from ascend_parallel.tuning.cost_model.shared_attention import SharedAttention

RECOMPUTE = ("none", "selective", "full")
# Row-wide tensors that pass through memory: a norm reads 1 and writes 1, a residual reads 2 and writes 1, an
# activation reads 1 (gated: 2) and writes 1.
NORM_ACCESSES, RESIDUAL_ACCESSES = 2, 3
# Beyond a fused kernel: tensors that pass through memory, and launches, forward and backward. Rotary embedding
# (MindSpeed-LLM 1.0.RC3, modellink/core/models/common/embeddings/rotary_pos_embedding.py): "sliced" cuts off the part
# that is not rotated, which is empty, and appends it; backward writes zeros for it and adds them. "split" runs two
# products, a negation, two concatenations and a sum, too. A gated activation (modellink/model/transformer.py,
# modellink/core/transformer/mlp.py): "split" is chunk, silu or gelu, and a product, each through memory; "tanh" has
# gelu's approximation by tanh, written out, in the place of gelu.
# `TORCH` is what plan-training's model of a preset runs (training/degrees/transformer.py), with a backward of twice the
# forward: x * cos + cat(-x2, x1) * sin, whose two halves join their gradients; silu, and a product.
EXTRA_ROTARY = {
    "fused": ((0, 0), (0, 0)),
    "sliced": ((2, 1), (4, 2)),
    "split": ((10, 5), (10, 6)),
    TORCH: ((8, 4), (18, 10)),
}
EXTRA_ACTIVATION = {
    "fused": ((0, 0), (0, 0)),
    "split": ((2, 1), (7, 3)),
    "tanh": ((18, 8), (32, 13)),
    TORCH: ((2, 1), (4, 2)),
}
# Bytes that cross-entropy moves for each logit in 16 bits, forward and backward: Megatron-core's
# tensor_parallel/cross_entropy.py casts to fp32, and takes maximum, difference, exponential, sum and quotient; backward
# multiplies and casts back.
LOSS_BYTES = (6 + 4 + 8 + 8 + 4 + 8, 8 + 6)


class TransformerLayerTime:
    """The times of one transformer layer on one rank; seconds per micro-batch."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch, *, sparse: bool = False) -> None:
        """Set up a layer of `model` as `batch` distributes it; sparse: a layer with experts."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linears = layer_linears(model, batch, sparse=sparse)
        self.experts = ExpertsTime(costs, model, batch) if sparse else None
        self._width = model.shared_ffn if sparse else model.ffn
        self.linear_passes = {
            direction: [LinearPass(costs, linear, direction) for linear in self.linears]
            for direction in (FORWARD, BACKWARD)
        }

    @cached_property
    def attention(self) -> float:
        """Seconds of attention's forward, with what brings keys to the queries of ranks that share a sequence."""
        if not self.batch.fused_attention:
            return self._shared(self._written_attention(1, device_type(self.batch.device).score_bytes[0]), FORWARD)
        return self._shared(self.kernel, FORWARD)

    @cached_property
    def attention_backward(self) -> float:
        """Seconds of attention's backward."""
        if not self.batch.fused_attention:
            return self._shared(self._written_attention(2, device_type(self.batch.device).score_bytes[1]), BACKWARD)
        return self._shared(ATTENTION_BACKWARD * self.kernel, BACKWARD)

    @cached_property
    def kernel(self) -> float:
        """Seconds of causal attention's forward in a fused kernel: half the products of s x s scores."""
        model, batch = self.model, self.batch
        pairs = batch.micro_batch * -(-model.heads // batch.tp) * batch.sequence * batch.own_sequence / 2
        return self.costs.attention(pairs, model.head_dim, model.value_dim, batch.dtype.itemsize)

    def _shared(self, kernel: float, direction: str) -> float:
        """Return the seconds of attention with what brings keys to queries.

        A ring's sends run under blocks of attention; an exchange or a gather in groups of heads as a plan's.
        """
        batch = self.batch
        if batch.cp == 1:
            return kernel
        if batch.context not in (HEADS, GATHER):
            return max(kernel, self._rotation(1 if direction == FORWARD else 2))
        return self.shared.seconds(batch.context, batch.cp_groups, kernel, direction, self.context_collective)

    @cached_property
    def shared(self) -> SharedAttention:
        """The layer's attention as ranks share its sequences. Megatron-core's cut of a sequence is balanced itself."""
        model, batch = self.model, self.batch
        row = batch.own_sequence * batch.micro_batch * batch.dtype.itemsize
        return SharedAttention(
            ranks=batch.cp,
            heads=-(-model.heads // batch.tp),
            key_heads=-(-model.kv_heads // batch.tp),
            query=row * model.head_dim,
            key=row * model.head_dim,
            value=row * model.value_dim,
            output=row * model.value_dim,
            lends=batch.single_operators,
        )

    @property
    def context_groups(self) -> int:
        """The groups in which heads are exchanged, or keys gathered: those asked for, as far as the heads allow."""
        batch = self.batch
        if batch.cp == 1 or batch.context not in (HEADS, GATHER):
            return 1
        return min(batch.cp_groups, self.shared.most_groups(batch.context))

    def context_collective(self, kind: str, nbytes: float) -> float:
        """Return the seconds of a collective of the ranks that share a sequence, all of one domain or of none."""
        costs, batch = self.costs, self.batch
        inside = batch.cp if batch.tp * batch.cp <= costs.hardware.collectives.domain else 1
        if kind == SEND:
            return costs.send(nbytes, inside=inside > 1)
        if kind == ALL_TO_ALL:
            return costs.all_to_all(nbytes / batch.cp, batch.cp, inside)
        return costs.line(kind, nbytes, batch.cp, inside)

    def _written_attention(self, products: int, softmax: int) -> float:
        """Return the seconds of attention that writes all scores: `products` times two matmuls, and the softmax."""
        model, batch = self.model, self.batch
        count, own, item = batch.micro_batch * -(-model.heads // batch.tp), batch.own_sequence, batch.dtype.itemsize
        scores = self.costs.matmul(own, model.head_dim, batch.sequence, item, batches=count)
        values = self.costs.matmul(own, batch.sequence, model.value_dim, item, batches=count)
        return products * (scores + values) + self.costs.stream(count * own * batch.sequence * softmax * item / 2)

    def _rotation(self, tensors: int) -> float:
        """Return the seconds of the ring that passes keys and values, and gradients, to all ranks of a sequence.

        Ring attention (arXiv:2310.01889): a send runs under a block of attention, so the longer of both counts.
        """
        model, batch = self.model, self.batch
        heads = max(1, model.kv_heads // batch.tp)
        rows = batch.own_sequence * batch.micro_batch
        size = tensors * rows * heads * (model.head_dim + model.value_dim) * batch.dtype.itemsize
        inside = batch.tp * batch.cp <= self.costs.hardware.collectives.domain
        return (batch.cp - 1) * self.costs.send(size, inside=inside)

    @cached_property
    def elementwise(self) -> float:
        """Seconds of the forward of norms, residuals, rotary embedding and activation: their memory traffic."""
        return sum(self._whole(work) for work in (self.tail, self.tail, self.rotary, self.split, self.activation))

    @cached_property
    def tail(self) -> Elementwise:
        """A residual and a norm; a layer has two of each."""
        return self._elementwise(self.batch.own_rows * self.model.hidden * (NORM_ACCESSES + RESIDUAL_ACCESSES), 2)

    @cached_property
    def residual(self) -> Elementwise:
        """The sum with the residual."""
        return self._elementwise(self.batch.own_rows * self.model.hidden * RESIDUAL_ACCESSES, 1)

    @cached_property
    def rotary(self) -> Elementwise:
        """The rotary embedding of queries and keys."""
        heads = -(-(self.model.heads + self.model.kv_heads) // self.batch.tp)
        return self._elementwise(2 * self.batch.rows * heads * self.model.head_dim, 1)

    @cached_property
    def split(self) -> Elementwise:
        """Queries, keys and values, copied out of one matmul's columns (Megatron-core, transformer/attention.py).

        torch's operators copy attention's result between heads and rows, and repeat shared keys and values.
        """
        model, batch = self.model, self.batch
        heads = -(-(model.heads + 2 * model.kv_heads) // batch.tp)
        launches = 2
        if batch.single_operators:
            shared = model.kv_heads < model.heads
            heads = -(-(model.heads + (model.heads + model.kv_heads if shared else 0)) // batch.tp)
            launches = 3 if shared else 1
        return self._elementwise(2 * batch.rows * heads * model.head_dim, launches)

    @cached_property
    def activation(self) -> Elementwise:
        """The MLP's activation."""
        accesses = (3 if self.model.gated else 2) * self.batch.rows * -(-self._width // self.batch.tp)
        return self._elementwise(accesses, 1 if self._width else 0)

    @cached_property
    def unfused(self) -> tuple[float, float]:
        """Seconds that operators take longer, forward and backward, because the framework does not fuse them."""
        model, batch = self.model, self.batch
        heads = -(-(model.heads + model.kv_heads) // batch.tp)
        found = []
        for rotary, activation in zip(EXTRA_ROTARY[batch.rotary], EXTRA_ACTIVATION[batch.activation], strict=True):
            rotated = self._elementwise(rotary[0] * batch.rows * heads * model.head_dim, 2 * rotary[1])
            width = -(-self._width // batch.tp) if model.gated else 0
            activated = self._elementwise(activation[0] * batch.rows * width, activation[1] if width else 0)
            found.append(self._whole(rotated) + self._whole(activated))
        return found[0], found[1]

    @property
    def _around_attention(self) -> float:
        return self._whole(self.rotary) + self._whole(self.split)

    def region(self, count: int) -> Region:
        """Return the layer's region in `count` chunks."""
        return Region(self.costs, self.linear_passes, self.batch, count, tail=self.tail, activation=self.activation)

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
        forward, backward = (sum(part.communication for part in parts) for parts in self.linear_passes.values())
        if self.experts is not None:
            forward, backward = forward + self.experts.all_to_alls, backward + self.experts.all_to_alls
        return forward + backward + (forward if recompute == "full" else 0.0)

    def forward(self, schedule: ChunkSchedule) -> float:
        """Return the time of forward."""
        if self._in_region(schedule):
            region = self.region(int(schedule.name))
            outside = 0.0 if region.pulls else sum(schedule.seconds(part) for part in self.linear_passes[FORWARD][:-3])
            around = self._around_attention + self.unfused[0]
            return region.forward().seconds + outside + self.attention + around + self.replicated
        elementwise = self.elementwise + self.unfused[0]
        return self._in_parts(FORWARD, schedule) + self.attention + elementwise + self.replicated

    def backward(self, schedule: ChunkSchedule, recompute: str = "none") -> float:
        """Return the time of backward; recompute: "selective" repeats attention's forward, "full" the layer's."""
        elementwise = self.elementwise
        if self._in_region(schedule):
            region = self.region(int(schedule.name))
            parts = [] if region.pulls else self.linear_passes[BACKWARD][:-3]
            linear = region.backward().seconds + sum(schedule.seconds(part) for part in parts)
            elementwise -= self._whole(self.activation) + (2 if region.pulls else 1) * self._whole(self.tail)
        else:
            linear = self._in_parts(BACKWARD, schedule)
        other = self.attention_backward + ELEMENTWISE_BACKWARD * elementwise + self.unfused[1] + 2 * self.replicated
        return linear + other + self.recomputed(schedule, recompute)

    def both(self, schedule: ChunkSchedule, recompute: str) -> float:
        """Return the time of forward and backward."""
        return self.forward(schedule) + self.backward(schedule, recompute)

    def _in_region(self, schedule: ChunkSchedule) -> bool:
        """Tell whether a region runs what stands between two attentions: experts are not part of one."""
        return schedule.region and self.batch.tp > 1 and self.experts is None

    def _in_parts(self, direction: str, schedule: ChunkSchedule) -> float:
        """Return the seconds of a pass's linear layers, and of its experts."""
        parts = self.linear_passes[direction]
        if self.experts is None:
            return sum(schedule.seconds(part) for part in parts)
        attention = len(parts) - (2 if self._width else 0)
        shared = sum(schedule.seconds(part) for part in parts[attention:])
        experts = self.experts.seconds(direction, schedule, shared)
        return sum(schedule.seconds(part) for part in parts[:attention]) + experts

    def recomputed(self, schedule: ChunkSchedule, recompute: str) -> float:
        """Return the seconds of what backward runs again.

        A planned model's second run ends with the inputs of the layer's last product: nothing reads its result
        (docs/recompute.md).
        """
        if recompute == "full" and self.batch.single_operators:
            last = (
                self.experts.work(FORWARD).compute
                if self.experts
                else schedule.seconds(self.linear_passes[FORWARD][-1])
            )
            return self.forward(schedule) - last - self._whole(self.residual)
        return {"none": 0.0, "selective": self.attention, "full": self.forward(schedule)}[recompute]


class EmbeddingAndLogitsTime:
    """The times of the embedding on the first stage and of the logits on the last stage."""

    def __init__(self, costs: CostModel, model: Model, batch: Batch) -> None:
        """Set up the ends of `model` as `batch` distributes it."""
        self.costs, self.model, self.batch = costs, model, batch
        self.linear: ModelLinear = head_linear(model, batch)
        self.linear_passes = {direction: LinearPass(costs, self.linear, direction) for direction in (FORWARD, BACKWARD)}

    @property
    def embedding(self) -> float:
        """Seconds of the collective that sums the looked-up rows over the ranks, which share the vocabulary."""
        batch = self.batch
        kind = REDUCE_SCATTER if batch.sequence_parallel else ALL_REDUCE
        size = batch.rows * self.model.hidden * batch.dtype.itemsize
        return self.costs.collective(kind, size, batch.tp)

    def loss(self, moved: int) -> float:
        """Return the seconds of a pass of cross-entropy, which moves `moved` bytes for each of this rank's logits.

        torch's operator reads and writes the logits' dtype once in each pass.
        """
        if self.batch.single_operators:
            moved = 2 * self.batch.dtype.itemsize
        return self.costs.stream(moved * self.batch.rows * -(-self.model.vocab // self.batch.tp))

    def seconds(self, schedule: ChunkSchedule) -> tuple[float, float]:
        """Return the seconds of logits and loss, forward and backward."""
        forward, backward = (schedule.seconds(self.linear_passes[direction]) for direction in (FORWARD, BACKWARD))
        return forward + self.loss(LOSS_BYTES[0]), backward + self.loss(LOSS_BYTES[1])
