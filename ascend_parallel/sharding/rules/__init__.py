"""Rules: which states an operator can have on one mesh dimension, and how a rank runs its part.

registry.py       the door through which rules come in
axes.py           what rules are written in
local.py          what a rank has when it runs its part
pointwise.py      operators that work element by element, dropout
matmul.py         products: linear, matmul, einsum, convolutions
views.py          reshape, transpose, slice, split, cat, repeat
reductions.py     sum, mean, softmax, sort: operators along dimensions; pooling
indexing.py       embedding, gather, index
normalisation.py  layer, RMS, group and batch norm
attention.py      scaled_dot_product_attention
loss.py           cross-entropy and losses by element
vocabulary.py     cross-entropy of logits cut along the classes
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
    """Return every strategy of a call on one mesh dimension: all replicated, all copied, and what its rule gives.

    Sizes are not looked at, except that a dimension of size 1 is never cut: a strategy whose pieces would be uneven
    is for the caller to leave out (`layout.is_even` of every input and output). One strategy per mesh dimension, in
    any combination, is a strategy on the whole mesh.
    """
    entry = find(call)
    found = [
        everywhere(call, REPLICATE),
        everywhere(call, PARTIAL_GRAD),
        *(entry.rule(call) if entry is not None else ()),
    ]
    return list(dict.fromkeys(found))


def has_rule(call: OpCall) -> bool:
    """Tell whether the operator has a rule; without one it runs whole on every rank."""
    return find(call) is not None


def own_reductions(call: OpCall, input_layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Reduction]:
    """Return the all-reduces that the operator runs itself where it reads its inputs in these layouts: mostly none."""
    entry = find(call)
    return [] if entry is None or entry.inside is None else entry.inside(call, input_layouts, mesh_shape)


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
    """Run a rank's part of a call, and return its local outputs. Autograd sees through it.

    inputs
        Local tensors, one per `OpCall.inputs`, even pieces of the whole ones.
    input_layouts, output_layouts
        One layout per tensor: one of `strategies` on each mesh dimension.
    coordinate
        The rank's place on each mesh dimension.
    all_reduce
        For operators with collectives of their own (`own_reductions`).
    stream
        Names the random numbers of the call, for operators that draw some (`Part.seeded`); alike on all ranks.
    """
    layouts = tuple(input_layouts), tuple(output_layouts)
    part = Part(call, tuple(inputs), *layouts, tuple(mesh_shape), tuple(coordinate), all_reduce, stream)
    entry = find(call)
    with part.seeded() if draws(call) else nullcontext():
        result = part.run() if entry is None or entry.run is None else entry.run(part)
    results = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(one for one in results if isinstance(one, torch.Tensor))
