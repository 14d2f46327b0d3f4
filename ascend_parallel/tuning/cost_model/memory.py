"""Predict the bytes of the rank that holds the most in a training step, by kind, for a transformer by its dimensions.

Activations are what Megatron-core's layers save for backward (arXiv:2205.05198, section 4, by the same rules for gated
MLPs and fused attention); states are those of ZeRO (arXiv:1910.02054, figure 1) with fp32 sums of gradients.
"""

from __future__ import annotations

import numpy as np

from ascend_parallel.tuning.cost_model.gradients import STATES, WIDE
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.step import BUCKET, Layout, spread, stage_parameters
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.timing import live

# Fused attention keeps a maximum and a sum of each row of scores in fp32; on an NPU eight times each (the shape
# [B, N, S, 8] of npu_fusion_attention's softmax_max and softmax_sum).
STATISTICS = {"npu": 2 * 8 * WIDE, "cuda": WIDE, "cpu": WIDE}
# Bytes of a written score that backward reads: the softmax's result in 16 bits (no dropout).
WRITTEN = 2


def step_memory(model: Model, batch: Batch, layout: Layout) -> RankBytes:
    """Return the bytes of the rank that holds the most; without the allocator's fragments and the framework's own."""
    weights = np.array(stage_parameters(model, batch, layout))
    replicas, item = batch.cp * layout.dp, batch.dtype.itemsize
    shares = [1 / replicas if layout.zero >= stage else 1.0 for stage in (3, 2, 1)]
    masters = WIDE if item < WIDE else 0
    parameters, gradients = weights * item * shares[0], weights * WIDE * shares[1]
    optimizer = weights * (STATES * WIDE + masters) * shares[2]
    activations = np.array(_activations(model, batch, layout))
    buffers = np.minimum(weights, BUCKET) * WIDE * (replicas > 1) + _working(model, batch)
    kinds = (parameters, gradients, optimizer, activations, buffers)
    fullest = int(np.sum(kinds, axis=0).argmax())
    return RankBytes(*(float(kind[fullest]) for kind in kinds))


def layer_activations(model: Model, batch: Batch, recompute: str) -> float:
    """Return the bytes that a layer's forward of a micro-batch keeps for backward."""
    item, rows, own = batch.dtype.itemsize, batch.rows, batch.own_rows
    if recompute == "full":
        return float(own * model.hidden * item)
    heads, kv_heads = -(-model.heads // batch.tp), -(-model.kv_heads // batch.tp)
    projected = (heads + kv_heads) * model.head_dim + kv_heads * model.value_dim
    attended = heads * model.value_dim
    ffn = -(-model.ffn // batch.tp)
    # Both norms' inputs and outputs; queries, keys, values; attention's result; the MLP before and after activation.
    kept = 4 * own * model.hidden + rows * (projected + attended + ffn * (3 if model.gated else 2))
    statistics = heads * rows * STATISTICS[batch.device]
    if not batch.fused_attention:
        scores = batch.micro_batch * heads * batch.own_sequence * batch.sequence * WRITTEN
        statistics = 0 if recompute == "selective" else scores
    return float(kept * item + statistics)


def _activations(model: Model, batch: Batch, layout: Layout) -> list[float]:
    """Return, by rank, the bytes of all micro-batches in flight; one more layer runs again if layers are recomputed."""
    whole, again = (layer_activations(model, batch, kind) for kind in ("none", layout.recompute))
    stages = layout.pp * layout.virtual_stages
    in_flight: tuple[float, ...] = (1.0,)
    ranks: tuple[int, ...] = (0,)
    if layout.pp > 1:
        name = layout.schedule if layout.micro_batches >= layout.pp else "gpipe"
        in_flight = live(name, layout.pp, stages, layout.micro_batches)
        ranks = stages_of(name, layout.pp, stages)
    result = [0.0] * layout.pp
    for stage, layers in enumerate(spread(model.layers, stages)):
        recomputed = min(layers, layout.recompute_layers or layers)
        result[ranks[stage]] += recomputed * again + (layers - recomputed) * whole
    held = [size * count for size, count in zip(result, in_flight, strict=True)]
    if layout.recompute != "none":
        held = [size + whole - again for size in held]
    held[-1] += _logits(model, batch)
    return held


def _logits(model: Model, batch: Batch) -> float:
    """Return the bytes of the softmax of the logits, which cross-entropy keeps in fp32 beside the logits."""
    return float(batch.rows * -(-model.vocab // batch.tp) * (WIDE + batch.dtype.itemsize))


def _working(model: Model, batch: Batch) -> float:
    """Return the bytes of the gradients of the MLP's widest tensors, while its backward runs."""
    width = -(-model.ffn // batch.tp) * (3 if model.gated else 2) + model.hidden
    return float(batch.rows * width * batch.dtype.itemsize)
