"""Predict the bytes of the rank that holds the most in a training step, by kind, for a transformer by its dimensions.

Activations are what Megatron-core's layers save for backward (arXiv:2205.05198, section 4, by the same rules for gated
MLPs and fused attention); states are those of ZeRO (arXiv:1910.02054, figure 1) with fp32 sums of gradients.
"""

from __future__ import annotations

import numpy as np

from ascend_parallel.tuning.cost_model.gradients import WIDE
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.step import BUCKET, Layout, check_experts, held_weights, layers_of_stages
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes, optimizer_bytes, zero_bytes
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.timing import live

# Fused attention keeps a maximum and a sum of each row of scores in fp32; on an NPU eight times each (the shape
# [B, N, S, 8] of npu_fusion_attention's softmax_max and softmax_sum).
STATISTICS = {"npu": 2 * 8 * WIDE, "cuda": WIDE, "cpu": WIDE}
# Tensors that a gated activation keeps, by how it runs (`Batch`): both halves and the product; with split operators the
# activation before the product; with those of gelu's approximation half of the input, tanh, and one more than tanh.
GATED = {"fused": 3, "split": 4, "tanh": 7}
# Bytes of a written score that backward reads: the softmax's result in 16 bits (no dropout).
WRITTEN = 2


def step_memory(model: Model, batch: Batch, layout: Layout) -> RankBytes:
    """Return the bytes of the rank that holds the most; without the allocator's fragments and the framework's own."""
    check_experts(model, batch, layout)
    item = batch.dtype.itemsize
    element = item, WIDE, optimizer_bytes(item, WIDE if item < WIDE else None)
    states, buckets = np.zeros((3, layout.pp)), np.zeros(layout.pp)
    for held, replicas in held_weights(model, batch, layout):
        weights = np.array(held)
        own = weights / replicas.count if layout.zero else weights
        states += np.array(zero_bytes(weights, own, layout.zero, element))
        buckets += np.minimum(weights, BUCKET) * WIDE * (replicas.count > 1)
    activations = np.array(_activations(model, batch, layout))
    kinds = (*states, activations, buckets + _working(model, batch))
    fullest = int(np.sum(kinds, axis=0).argmax())
    return RankBytes(*(float(kind[fullest]) for kind in kinds))


def layer_activations(model: Model, batch: Batch, recompute: str, *, sparse: bool = False) -> float:
    """Return the bytes that a layer's forward of a micro-batch keeps for backward; sparse: a layer with experts."""
    item, rows, own = batch.dtype.itemsize, batch.rows, batch.own_rows
    if recompute == "full":
        return float(own * model.hidden * item)
    heads, kv_heads = -(-model.heads // batch.tp), -(-model.kv_heads // batch.tp)
    projected = (heads + kv_heads) * model.head_dim + kv_heads * model.value_dim
    attended = heads * model.value_dim
    ffn = -(-(model.shared_ffn if sparse else model.ffn) // batch.tp)
    # Both norms' inputs and outputs; queries, keys, values; attention's result; the MLP before and after activation.
    gated = GATED[batch.activation]
    kept = 4 * own * model.hidden + rows * (projected + attended + ffn * (gated if model.gated else 2))
    if sparse:
        kept += _of_experts(model, batch)
    statistics = heads * rows * STATISTICS[batch.device]
    if not batch.fused_attention:
        scores = batch.micro_batch * heads * batch.own_sequence * batch.sequence * WRITTEN
        statistics = 0 if recompute == "selective" else scores
    return float(kept * item + statistics)


def _of_experts(model: Model, batch: Batch) -> int:
    """Return the elements that a rank's experts keep: the rows they get, before and after activation, and those sent.

    What comes back is kept for the gradients of the routing weights. Experts are equally loaded.
    """
    width = -(-model.expert_ffn // batch.etp) * (3 if model.gated else 2)
    sent = batch.own_rows * model.top_k
    return sent * batch.etp * (model.hidden + width) + sent * model.hidden


def _activations(model: Model, batch: Batch, layout: Layout) -> list[float]:
    """Return, by rank, the bytes of all micro-batches in flight; one more layer runs again if layers are recomputed."""
    kept = [
        [layer_activations(model, batch, kind, sparse=sparse) for kind in ("none", layout.recompute)]
        for sparse in (False, True)
    ]
    stages = layout.pp * layout.virtual_stages
    in_flight: tuple[float, ...] = (1.0,)
    ranks: tuple[int, ...] = (0,)
    if layout.pp > 1:
        in_flight = live(layout.schedule, layout.pp, stages, layout.micro_batches)
        ranks = stages_of(layout.schedule, layout.pp, stages)
    result = [0.0] * layout.pp
    running = [0.0] * layout.pp  # the layer that runs again, whole
    for stage, counts in enumerate(layers_of_stages(model, stages)):
        for layers, recomputed, (whole, again) in zip(counts, layout.recomputed(*counts), kept, strict=True):
            result[ranks[stage]] += recomputed * again + (layers - recomputed) * whole
            running[ranks[stage]] = max(running[ranks[stage]], (whole - again) * (recomputed > 0))
    held = [size * count + more for size, count, more in zip(result, in_flight, running, strict=True)]
    held[-1] += _logits(model, batch)
    return held


def _logits(model: Model, batch: Batch) -> float:
    """Return the bytes of the softmax of the logits, which cross-entropy keeps in fp32 beside the logits."""
    return float(batch.rows * -(-model.vocab // batch.tp) * (WIDE + batch.dtype.itemsize))


def _working(model: Model, batch: Batch) -> float:
    """Return the bytes of the gradients of the MLP's widest tensors, or of the experts', while its backward runs."""
    width = -(-model.ffn // batch.tp) * (3 if model.gated else 2) + model.hidden
    dense = 0 if model.experts and not model.dense_layers else batch.rows * width
    sparse = _of_experts(model, batch) if model.experts else 0
    return float(max(dense, sparse) * batch.dtype.itemsize)
