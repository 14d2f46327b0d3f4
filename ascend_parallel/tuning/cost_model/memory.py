"""Predict the bytes of the rank that holds the most in a training step, by kind, for a transformer by its dimensions.

Activations are what Megatron-core's layers save for backward (arXiv:2205.05198, section 4, by the same rules for gated
MLPs and fused attention), or what autograd saves of torch's operators. States are those of `ReplicatedState`.
"""

from __future__ import annotations

import numpy as np

from ascend_parallel.devices import device_type
from ascend_parallel.ops.head_exchange import repeats_of
from ascend_parallel.ops.key_gather import GATHER, HEADS
from ascend_parallel.tuning.cost_model.models import TORCH, Batch, Model
from ascend_parallel.tuning.cost_model.step import (
    Layout,
    check_experts,
    layers_of_stages,
    replicated_state,
    sent_bytes,
)
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes
from ascend_parallel.tuning.step_time.replicas import Numbers
from ascend_parallel.tuning.step_time.runtimes import WIDE
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.timing import live

# Tensors that a gated activation keeps, by how it runs (`Batch`): both halves and the product; with single operators
# the activation before the product; with those of gelu's approximation half of the input, tanh, and one more than tanh.
GATED = {"fused": 3, "split": 4, "tanh": 7, TORCH: 4}
# Bytes of a written score that backward reads: the softmax's result in 16 bits (no dropout).
WRITTEN = 2


def step_memory(model: Model, batch: Batch, layout: Layout) -> RankBytes:
    """Return the bytes of the rank that holds the most; without the allocator's fragments and the framework's own."""
    check_experts(model, batch, layout)
    state = replicated_state(None, model, batch, layout)
    activations = np.array(_activations(model, batch, layout))
    buffers = state.buffers + _working(model, batch) + _received(model, batch, layout)
    kinds = (*state.held, activations, buffers)
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
    gated, norms = GATED[batch.activation], 2 * own * model.hidden * 2
    statistics = heads * rows * device_type(batch.device).statistics * WIDE
    if batch.single_operators:
        # Keys and values are repeated for all heads, and attention's result is copied for the next layer.
        projected, attended = heads * (2 * model.head_dim + model.value_dim), 2 * attended
        if batch.cp > 1:  # no repeated keys are sent: those that come are repeated for the ranks at most
            copies = repeats_of(heads, kv_heads, batch.cp) if batch.context == HEADS else 1
            projected = heads * model.head_dim + copies * kv_heads * (model.head_dim + model.value_dim)
        norms = 2 * own * model.hidden * (2 if model.bias else _of_norm(item))
        statistics = heads * rows * WIDE
    # Both norms' inputs and outputs; queries, keys, values; attention's result; the MLP before and after activation.
    kept = norms + rows * (projected + attended + ffn * (gated if model.gated else 2))
    if batch.cp > 1 and batch.context == GATHER:  # keys and values of the other ranks
        kept += (batch.cp - 1) * rows * kv_heads * (model.head_dim + model.value_dim)
    if sparse:
        kept += _of_experts(model, batch)
    if not batch.fused_attention:
        scores = batch.micro_batch * heads * batch.own_sequence * batch.sequence * WRITTEN
        statistics = 0 if recompute == "selective" else scores
    return float(kept * item + statistics)


def _of_norm(itemsize: int) -> int:
    """Return the tensors of a row's width that an RMS norm of torch keeps, its input and result among them.

    Outside of CUDA it runs as operators (aten/src/ATen/native/layer_norm.cpp, rms_norm_composite): the input in fp32 is
    kept too, and the product with the root mean square before the weights.
    """
    return 2 + 1 + WIDE // itemsize if itemsize < WIDE else 3


def _received(model: Model, batch: Batch, layout: Layout) -> Numbers:
    """Return, by rank, the bytes of receive buffers, from both neighbours of each stage."""
    received = np.zeros(layout.pp)
    stages = layout.pp * layout.virtual_stages
    if layout.pp > 1 and layout.runtime.receives_ahead:
        for stage, rank in enumerate(stages_of(layout.schedule, layout.pp, stages)):
            neighbours = (stage > 0) + (stage < stages - 1)
            received[rank] += neighbours * layout.micro_batches * sent_bytes(model, batch)
    return received


def _of_experts(model: Model, batch: Batch) -> int:
    """Return the elements that a rank's experts keep: the rows they get, before and after activation, and those sent.

    What comes back is kept for the gradients of the routing weights. Experts are equally loaded.
    """
    width = -(-model.expert_ffn // batch.etp) * ((4 if batch.single_operators else 3) if model.gated else 2)
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
    for stage, counts in enumerate(layers_of_stages(model, batch, layout)):
        for layers, recomputed, (whole, again) in zip(counts, layout.recomputed(*counts), kept, strict=True):
            result[ranks[stage]] += recomputed * again + (layers - recomputed) * whole
            running[ranks[stage]] = max(running[ranks[stage]], (whole - again) * (recomputed > 0))
    held = [size * count + more for size, count, more in zip(result, in_flight, running, strict=True)]
    held[-1] += _logits(model, batch)
    return held


def _logits(model: Model, batch: Batch) -> float:
    """Return the bytes of the softmax of the logits, which Megatron-core's cross-entropy keeps in fp32 beside them.

    torch's keeps the softmax's logarithms in the logits' dtype.
    """
    kept = batch.dtype.itemsize if batch.single_operators else WIDE + batch.dtype.itemsize
    return float(batch.rows * -(-model.vocab // batch.tp) * kept)


def _working(model: Model, batch: Batch) -> float:
    """Return the bytes of the gradients of the MLP's widest tensors, or of the experts', while its backward runs."""
    width = -(-model.ffn // batch.tp) * (3 if model.gated else 2) + model.hidden
    dense = 0 if model.experts and not model.dense_layers else batch.rows * width
    sparse = _of_experts(model, batch) if model.experts else 0
    return float(max(dense, sparse) * batch.dtype.itemsize)
