"""The operator of a mixture of experts in a model that is traced, its rule, and a rank's part.

How many tokens an expert gets depends on data, which torch.export does not trace. `mixture_of_experts` is one operator
whose output is as large as its input: on one card it runs all experts, in a plan a rank runs its part.

    placements on a mesh dimension, x [..., H]    tokens        experts' weights    output
    data                                          S(dim)        whole               S(dim)
    exchange: two all-to-alls in each direction   S(dim)        S(0), of E          S(dim)
    the rank's experts of all tokens              whole         S(0), of E          partial
    tensor parallel experts                       whole         S(1), S(2) of F     partial

The exchange is `run_experts` (overlap/experts.py): in overlapped groups of experts, no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional as F

from ascend_parallel.ops.expert_exchange import ExpertGroup, exchange_counts
from ascend_parallel.overlap.experts import LocalExperts, run_experts
from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import SUM, Layout, Shape, bounds, largest_local_shape, shard
from ascend_parallel.sharding.rules.axes import Axis, arguments, cut
from ascend_parallel.sharding.rules.local import ExchangeRanks, Part
from ascend_parallel.sharding.rules.registry import Exchange, OpPlacements, register_rule
from ascend_parallel.tuning.cost_model.experts import SORT_ACCESSES

NAME = "ascend_parallel_moe::mixture_of_experts"
OPERATOR = "mixture_of_experts"
CALL = f"ascend_parallel_moe.{OPERATOR}.default"
"""Its name in a graph."""
SCHEMA = (
    "(Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, Tensor? gate=None, str activation='silu')"
    " -> Tensor"
)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
X, INDEX, WEIGHT, UP, DOWN = 0, 1, 2, 3, 4
"""The places of the inputs."""

Tensors = Sequence[torch.Tensor]


def mixture_of_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """Return for each token the weighted sum of the experts that the router chose; traceable by torch.export.

    x           [..., H]    tokens
    index       [..., k]    integers: the experts of each token; a number outside of 0 to E - 1 chooses none
    weight      [..., k]    their weights
    up, gate    [E, F, H]   the experts' first layers; with gate ``act(gate x) * (up x)``, without ``act(up x)``
    down        [E, H, F]   their last layer
    returns     [..., H], in the dtype of x

    activation: "silu", "gelu", "gelu_tanh" or "relu". On one card backward computes the experts a second time; in a
    plan it does not. Raises `ValueError` for shapes that do not fit, and for another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mixture_of_experts: activation={activation!r}; give one of {', '.join(ACTIVATIONS)}")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"mixture_of_experts: index is {index.dtype}; give integers, the experts of each token")
    fits = up.dim() == 3 and tuple(down.shape) == (up.shape[0], up.shape[2], up.shape[1])
    fits = fits and (gate is None or gate.shape == up.shape) and x.dim() > 1 and x.shape[-1] == up.shape[-1]
    if not fits or index.shape != weight.shape or index.shape[:-1] != x.shape[:-1]:
        shapes = {"x": x, "index": index, "weight": weight, "up": up, "down": down, "gate": gate}
        given = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shapes.items() if tensor is not None)
        raise ValueError(
            f"mixture_of_experts: {given}; give x [..., H], index and weight [..., k], up and gate [E, F, H], "
            "down [E, H, F]"
        )
    out: torch.Tensor = _operator(x, index, weight, up, down, gate, activation)
    return out


def _whole(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Run all experts."""
    weights = [up, down] if gate is None else [up, down, gate]
    return _mixture(x, index, weight, weights, activation, [range(up.shape[0])], None)


_operator = torch.library.custom_op(NAME, _whole, mutates_args=(), schema=SCHEMA)


@_operator.register_fake
def _(x: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    *tensors, activation = inputs
    ctx.activation = activation  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]


def _backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Run the experts again, with autograd."""
    inputs = [
        None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        for tensor in ctx.saved_tensors  # type: ignore[attr-defined]
    ]
    with torch.enable_grad():
        x, index, weight, up, down, gate = inputs
        y = _whole(x, index, weight, up, down, gate, ctx.activation)  # type: ignore[arg-type, attr-defined]
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, dy))
    return (*(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs), None)


_operator.register_autograd(_backward, setup_context=_save)


def _mixture(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    weights: Tensors,
    activation: str,
    held: Sequence[range],
    ranks: ExchangeRanks | None,
) -> torch.Tensor:
    """Return the part of the mixture of the experts that the ranks hold.

    weights     up, down and, if there is one, gate: of this rank's experts
    held        the experts of each rank of the exchange, in the order of its group; one range without an exchange

    Tokens of other experts get nothing here.
    """
    tokens, k = x.reshape(-1, x.shape[-1]), index.shape[-1]
    place = _places(index.reshape(-1), held)  # among all held experts, in the order of ranks; the last: held by none
    order = torch.argsort(place, stable=True)
    experts = sum(map(len, held))
    counts = torch.bincount(place, minlength=experts + 1)[:experts].reshape(len(held), -1)
    local = LocalExperts(run=_RunGroup(activation), weights=tuple(weights))
    if ranks is None:
        (sent,) = counts.tolist()
        order = order[: sum(sent)]
        group = ExpertGroup(range(experts), (slice(0, sum(sent)),), (tuple(sent),))
        out = local.run(group, tokens[order // k], None, weights)
    else:
        _, row_counts = exchange_counts(counts, ranks.group)
        order = order[: sum(map(sum, row_counts.sent))]
        out, _ = run_experts(tokens[order // k], row_counts, local, group=ranks.group, settings=ranks.settings)
    chosen = out.new_zeros(len(place), out.shape[-1]).index_copy(0, order, out)
    weighted = chosen.reshape(-1, k, out.shape[-1]) * weight.reshape(-1, k, 1)
    return weighted.sum(1).to(x.dtype).reshape(x.shape)


def _places(index: torch.Tensor, held: Sequence[range]) -> torch.Tensor:
    """Return the place of each chosen expert among all `held` ones; their number for an expert that none holds."""
    numbers = [expert for of_rank in held for expert in of_rank]
    table = torch.full((max(numbers) + 2,), len(numbers), dtype=torch.int64)
    table[numbers] = torch.arange(len(numbers))
    known = (index >= 0) & (index <= max(numbers))
    return table.to(index.device)[torch.where(known, index, max(numbers) + 1)]


@dataclass(frozen=True)
class _RunGroup:
    """Runs a group of experts on its rows, for `LocalExperts`."""

    activation: str

    def __call__(
        self, group: ExpertGroup, rows: torch.Tensor, probs: torch.Tensor | None, weights: Tensors
    ) -> torch.Tensor:
        """Return the experts' outputs of rows [n, H], in the order [source][expert]."""
        parts = torch.split_with_sizes(group.by_expert(rows), group.expert_sizes)
        activate = ACTIVATIONS[self.activation]
        outputs = [
            _expert(part, *of_expert, activate=activate) for part, *of_expert in zip(parts, *weights, strict=True)
        ]
        return group.by_source(torch.cat(outputs))


def _expert(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    wide = F.linear(x, up)
    return F.linear(activate(wide) if gate is None else activate(F.linear(x, gate)) * wide, down)


def placements(call: OpCall) -> list[OpPlacements]:
    """Return the strategies of the table above."""
    dims, more = len(call.inputs[X].shape) - 1, len(call.inputs) - DOWN - 1
    weights = (0,) * (2 + more)
    axes = [Axis((dim, dim, dim, *(None,) * len(weights)), (dim,)) for dim in range(dims)]
    axes.append(Axis((None, None, None, *weights), (None,), SUM))
    axes.append(Axis((None, None, None, 1, 2, *(1,) * more), (None,), SUM))
    exchanges = [
        OpPlacements((*(shard(dim),) * 3, *(shard(0) for _ in weights)), (shard(dim),))
        for dim in range(dims)
        if call.inputs[X].shape[dim] > 1 and call.inputs[UP].shape[0] > 1
    ]
    return [*cut(call, axes), *exchanges]


def exchange_dims(layouts: Sequence[Layout]) -> list[int]:
    """Return the mesh dimensions along which tokens go to their experts."""
    pairs = zip(layouts[X], layouts[UP], strict=True)
    return [dim for dim, (tokens, weights) in enumerate(pairs) if tokens.kind == weights.kind == "shard"]


def collectives(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> list[Exchange]:
    """Return the all-to-alls of a step: dispatch and combine, forward and backward, of equally loaded experts."""
    found = []
    for dim in exchange_dims(layouts):
        x, index = call.inputs[X], call.inputs[INDEX]
        line = x.local_bytes(layouts[X], mesh_shape) * mesh_shape[dim] * index.shape[-1]
        found += [Exchange(dim, line)] * 2 + [Exchange(dim, line, backward=True)] * 2
    return found


def matmuls(
    call: OpCall, inputs: Sequence[Shape], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> tuple[int, tuple[int, int, int]]:
    """Return the number of matmuls of a rank's forward, and their M, K, N, for equally loaded experts."""
    tokens, experts = prod(inputs[X][:-1]) * inputs[INDEX][-1], inputs[UP][0]
    coming = tokens * prod(mesh_shape[dim] for dim in exchange_dims(layouts))
    rows = max(coming // call.inputs[UP].shape[0], 1)
    return experts * (len(inputs) - UP), (rows, inputs[UP][2], inputs[UP][1])


def products(
    call: OpCall, inputs: Sequence[Shape], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> tuple[tuple[int, tuple[int, int, int]], ...]:
    """Return the products of `matmuls` by kind, with their counts: those into an expert's width, and the one back."""
    count, (rows, width, inner) = matmuls(call, inputs, layouts, mesh_shape)
    experts = inputs[UP][0]
    return (count - experts, (rows, width, inner)), (experts, (rows, inner, width))


def moved_elements(
    call: OpCall, inputs: Sequence[Shape], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> float:
    """Return the elements that a rank's forward moves beside its matmuls: the activation, and rows put in order."""
    count, (rows, _, inner) = matmuls(call, inputs, layouts, mesh_shape)
    sent = prod(inputs[X][:-1]) * inputs[INDEX][-1]
    return float(count * rows * inner + SORT_ACCESSES * sent * inputs[X][-1])


def saved_bytes(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> float:
    """Return the bytes that a rank keeps for backward, of equally loaded experts, beside the routing weights.

    Of each row: what it was, what its expert's layers made of it, the activation's result, and what came back.
    """
    item, (experts, _, _) = call.inputs[UP].dtype.itemsize, call.inputs[UP].shape
    (*tokens, width), (own, inner, _) = (
        largest_local_shape(call.inputs[place].shape, layouts[place], mesh_shape) for place in (X, UP)
    )
    sent = prod(tokens) * call.inputs[INDEX].shape[-1]
    rows = sent * prod(mesh_shape[dim] for dim in exchange_dims(layouts)) * own / experts
    kept = 4 if len(call.inputs) > DOWN + 1 else 2  # gate, its activation, up, their product; or up and its activation
    return item * (rows * (width + kept * inner) + sent * width)


def _run(part: Part) -> torch.Tensor:
    x, index, weight, *weights = part.inputs
    activation = arguments(part.call)["activation"]
    (start, stop), *_ = part.input_bounds(UP)
    dims = exchange_dims(part.input_layouts)
    if not dims:
        return _mixture(x, index, weight, weights, activation, [range(start, stop)], None)
    (dim,) = dims
    ranks = part.exchange_ranks(dim)
    shape, layout = part.call.inputs[UP].shape, part.input_layouts[UP]
    held = []
    for place in ranks.places:
        coordinate = (*part.coordinate[:dim], place, *part.coordinate[dim + 1 :])
        held.append(range(*bounds(shape, layout, part.mesh_shape, coordinate)[0]))
    return _mixture(x, index, weight, weights, activation, held, ranks)


def register() -> None:
    """Register the rule. Tokens go to their experts along one mesh dimension."""
    register_rule(
        CALL,
        placements,
        _run,
        collectives,
        allows=lambda call, layouts: len(exchange_dims(layouts)) < 2,
    )
