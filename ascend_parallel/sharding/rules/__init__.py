"""Rules: the placements that an operator allows on one mesh dimension, and how a rank runs its part.

registry.py       registers and finds rules
axes.py           the helpers that rules are built from
local.py          a rank's part of a call: its local tensors and their position in the whole tensors
pointwise.py      elementwise operators, dropout
matmul.py         products: linear, matmul, einsum, convolutions
views.py          reshape, transpose, slice, split, cat, repeat
reductions.py     sum, mean, softmax, sort: operators along dimensions; pooling
indexing.py       embedding, gather, index
normalisation.py  layer, RMS, group and batch norm
attention.py      scaled_dot_product_attention
loss.py           cross-entropy and elementwise losses
vocabulary.py     cross-entropy of logits sharded along the classes
creation.py       arange, zeros, full
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout
from ascend_parallel.sharding.rules import (
    attention,
    creation,
    indexing,
    loss,
    matmul,
    normalisation,
    pointwise,
    reductions,
    views,
)
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, draws, everywhere, linear_in
from ascend_parallel.sharding.rules.local import AllReduce, Part
from ascend_parallel.sharding.rules.registry import OpPlacements, Reduction, find, register_rule

__all__ = [
    "Axis",
    "OpPlacements",
    "Part",
    "Reduction",
    "arguments",
    "cut",
    "draws",
    "has_rule",
    "linear_in",
    "own_reductions",
    "register_rule",
    "run_local",
    "strategies",
]

for _rules in (pointwise, matmul, views, reductions, indexing, normalisation, attention, loss, creation):
    _rules.register()


def strategies(call: OpCall) -> list[OpPlacements]:
    """Return every strategy of a call on one mesh dimension: all replicate, all partial_grad, and those of its rule.

    A dimension of size 1 is never sharded; other sizes are ignored. The caller drops strategies with uneven slices
    (`layout.is_even` of every input and output). Any combination of one strategy per mesh dimension is a strategy on
    the whole mesh.
    """
    entry = find(call)
    known = [
        everywhere(call, REPLICATE),
        everywhere(call, PARTIAL_GRAD),
        *(entry.rule(call) if entry is not None else ()),
    ]
    return list(dict.fromkeys(known))


def has_rule(call: OpCall) -> bool:
    """Tell whether the operator has a rule; an operator without a rule runs whole on every rank."""
    return find(call) is not None


def own_reductions(call: OpCall, input_layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the all-reduces that the operator itself runs with inputs in these layouts; most operators run none."""
    entry = find(call)
    if entry is None or entry.op_collectives is None:
        return []
    return entry.op_collectives(call, input_layouts, mesh_shape)


def run_local(
    call: OpCall,
    inputs: Sequence[torch.Tensor],
    input_layouts: Sequence[Layout],
    output_layouts: Sequence[Layout],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    all_reduce: AllReduce | None = None,
    stream: str = "",
) -> tuple[torch.Tensor, ...]:
    """Run a rank's part of a call, and return its local outputs. Differentiable by autograd.

    inputs
        Local tensors, one per `OpCall.inputs`: even slices of the whole tensors.
    input_layouts, output_layouts
        One layout per tensor: on each mesh dimension one of `strategies`.
    coordinate
        The rank's index on each mesh dimension.
    all_reduce
        Needed by operators that run collectives themselves (`own_reductions`).
    stream
        Names the call's random numbers, for operators that draw them (`Part.seeded`); the same on all ranks.
    """
    layouts = tuple(input_layouts), tuple(output_layouts)
    part = Part(call, tuple(inputs), *layouts, tuple(mesh_shape), tuple(coordinate), all_reduce, stream)
    entry = find(call)
    with part.seeded() if draws(call) else nullcontext():
        result = part.run() if entry is None or entry.run is None else entry.run(part)
    results = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(tensor for tensor in results if isinstance(tensor, torch.Tensor))
