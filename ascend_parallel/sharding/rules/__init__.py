"""Rules: the placements that an operator allows on one mesh dimension, and how a rank runs its part.

registry.py       registers and finds rules
axes.py           the helpers that rules are built from
local.py          a rank's part of a call: its local tensors and their position in the whole tensors
pointwise.py      elementwise operators, dropout
matmul.py         products: linear, matmul, einsum, convolutions
attention.py      scaled_dot_product_attention, also of sequences that ranks share
views.py          reshape, transpose, slice, split, cat, repeat; arange, zeros, full
reductions.py     sum, mean, softmax, sort: operators along dimensions; pooling; layer, RMS and group norm
experts.py        mixtures of experts
batch_norm.py     batch norm, with the statistics of all ranks or of each
per_sample.py     recurrent layers, Fourier transforms, resampling, distances
indexing.py       embedding, gather, index
loss.py           cross-entropy, also of logits sharded along the classes; elementwise losses
npu.py            torch_npu's fused operators
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import PARTIAL_GRAD, REPLICATE, Layout
from ascend_parallel.sharding.rules import (
    attention,
    batch_norm,
    experts,
    indexing,
    loss,
    matmul,
    npu,
    per_sample,
    pointwise,
    reductions,
    views,
)
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut, draws, everywhere, linear_in
from ascend_parallel.sharding.rules.experts import mixture_of_experts
from ascend_parallel.sharding.rules.local import LocalCall, Part
from ascend_parallel.sharding.rules.registry import Exchange, OpPlacements, Reduction, find, register_rule

__all__ = [
    "Axis",
    "Exchange",
    "LocalCall",
    "OpPlacements",
    "Part",
    "Reduction",
    "allowed",
    "arguments",
    "cut",
    "draws",
    "exchanges",
    "has_rule",
    "linear_in",
    "local_call",
    "mixture_of_experts",
    "own_collectives",
    "register_rule",
    "strategies",
]

for _rules in (pointwise, matmul, attention, views, reductions, batch_norm, per_sample, indexing, loss, npu, experts):
    _rules.register()


def strategies(call: OpCall) -> list[OpPlacements]:
    """Return every strategy of a call on one mesh dimension: all replicate, all partial_grad, and those of its rule.

    A dimension of size 1 is never sharded; other sizes are ignored. The caller drops strategies with uneven slices
    (`layout.is_even` of every input and output). Any combination of one strategy per mesh dimension that is `allowed`
    is a strategy on the whole mesh.
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


def allowed(call: OpCall, input_layouts: Sequence[Layout]) -> bool:
    """Tell whether the operator's strategies on the single mesh dimensions go together."""
    entry = find(call)
    return entry is None or entry.allows is None or entry.allows(call, input_layouts)


def own_collectives(
    call: OpCall, input_layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> Sequence[Reduction | Exchange]:
    """Return the collectives that the operator itself runs with inputs in these layouts; most operators run none."""
    entry = find(call)
    if entry is None or entry.op_collectives is None:
        return []
    return entry.op_collectives(call, input_layouts, mesh_shape)


def exchanges(call: OpCall, input_layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> bool:
    """Tell whether an operator exchanges tokens or heads with other ranks: again in every second run."""
    return any(isinstance(own, Exchange) for own in own_collectives(call, input_layouts, mesh_shape))


def local_call(
    call: OpCall,
    input_layouts: Sequence[Layout],
    output_layouts: Sequence[Layout],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> LocalCall:
    """Compile a rank's part of a call.

    input_layouts, output_layouts
        One layout per tensor: on each mesh dimension one of `strategies`.
    coordinate
        The rank's index on each mesh dimension.
    """
    entry = find(call)
    layouts = tuple(input_layouts), tuple(output_layouts)
    run = None if entry is None else entry.run
    return LocalCall(call, *layouts, tuple(mesh_shape), tuple(coordinate), run, draws(call))
