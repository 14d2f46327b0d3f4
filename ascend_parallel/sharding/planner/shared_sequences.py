"""Attention of sequences that ranks share (`sequence_dim`): which calls exchange, in which way, and in how many groups.

Before a search, calls that can exchange get a `SharedSequence`, and with it a strategy of their own. Its price has what
stays exposed; of the ways that are not given a search takes that of least price, option by option, and the plan says
which, with the price of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd

from ascend_parallel.ops.key_gather import EXCHANGES, GATHER, HEADS
from ascend_parallel.ops.registry import usual_chunks
from ascend_parallel.settings import MAX_CHUNKS, Settings
from ascend_parallel.sharding.graph import Graph, Node, OpCall, SharedSequence, Value
from ascend_parallel.sharding.layout import Layout, shard
from ascend_parallel.sharding.planner.operator_cost import passes
from ascend_parallel.sharding.planner.operator_strategy import where
from ascend_parallel.sharding.planner.options import Option, differentiable_values
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.rules.attention import (
    HEADS_DIM,
    NAME,
    SEQUENCE_DIM,
    exchange_dims,
    shared_attention,
)
from ascend_parallel.sharding.rules.axes import arguments, place
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.shared_attention import ExchangePrice

Readers = Mapping[Value, Sequence[tuple[str, int]]]
"""The readers of each tensor, as `Graph.readers` returns them."""

# What may stand between the repetition of keys and attention, and moves no head.
AFTER_REPEATING = ("reshape", "view", "_unsafe_view", "clone", "contiguous")
# What may stand between attention and its projection, and leaves the numbers where they are.
BEFORE_PROJECTION = ("transpose", "permute", "contiguous", "reshape", "view", "_unsafe_view", "flatten")


def check_exchange(exchange: str | None, groups: int | None, *, shared: bool, option: str = "sequence") -> None:
    """Raise `ValueError` for a way to share sequences, or a number of groups, that is not allowed.

    shared: whether ranks share sequences. option: the first part of the options' names.
    """
    if exchange is not None and exchange not in EXCHANGES:
        raise ValueError(f"{option}_exchange={exchange!r}: give one of {', '.join(EXCHANGES)}; a plan runs no ring")
    if groups is not None and (type(groups) is not int or not 1 <= groups <= MAX_CHUNKS):
        raise ValueError(f"{option}_groups={groups!r}: give a whole number from 1 to {MAX_CHUNKS}")
    if not shared and (exchange, groups) != (None, None):
        given = f"{option}_exchange={exchange!r}" if exchange is not None else f"{option}_groups={groups}"
        raise ValueError(f"{given}: no ranks share a sequence")


def sharing_of(
    exchange: str | None, groups: int | None, settings: Settings, overlap: Settings | None
) -> tuple[str, int] | None:
    """Return the way and the groups of a plan's exchanges, "" and 0 if the search chooses; None: nothing is exchanged.

    Groups that are not given are those of the settings. overlap: the settings by which a plan runs overlapped; None: it
    does not, and one group runs. With COC_DETERMINISTIC=tp nothing is exchanged: weight gradients have no tree.
    """
    if not settings.arithmetic.hides_sums:
        return None
    if groups is None:
        measured = overlap is not None and bool(overlap.auto or overlap.tune or overlap.plan is not None)
        groups = 0 if measured else 1 if overlap is None else usual_chunks(overlap)
    return exchange or "", groups


def with_shared_sequences(graph: Graph, ranks: int, exchange: str = "", groups: int = 0) -> Graph:
    """Return the graph with a `SharedSequence` for each attention that `ranks` ranks can exchange.

    exchange, groups: as in `SharedSequence`.
    """
    if ranks == 1:
        return graph
    nodes, differentiable = {}, differentiable_values(graph)
    for name, node in graph.nodes.items():
        call = node.call
        fits = call is not None and call.name.startswith(NAME) and _fits(call, ranks)
        if call is not None and fits and not _mask_is_learnt(node, differentiable):
            repeats = gcd(*(_repeats(graph, node.inputs[index]) for index in (1, 2)))
            call = replace(call, sequence=SharedSequence(exchange=exchange, groups=groups, repeats=repeats))
            node = replace(node, call=call)
        nodes[name] = node
    return replace(graph, nodes=nodes)


def _fits(call: OpCall, ranks: int) -> bool:
    """Tell whether an attention's queries and keys are of one sequence, of tensors that an exchange takes."""
    named, (query, key, value) = arguments(call), (meta.shape for meta in call.inputs[:3])
    if {len(query), len(key), len(value)} != {4}:
        return False
    alike = query[0] == key[0] == value[0] and query[2] == key[2] == value[2] and key[1] == value[1]
    heads = query[1] % key[1] == 0 and query[3] == key[3]
    return alike and heads and not query[SEQUENCE_DIM] % ranks and not named["dropout_p"] and _mask_fits(call)


def _mask_fits(call: OpCall) -> bool:
    """Tell whether a mask is the same for all heads, and has a place for each key."""
    mask = place(arguments(call)["attn_mask"])
    if mask is None:
        return True
    shape, length = call.inputs[mask].shape, call.inputs[0].shape[SEQUENCE_DIM]
    return len(shape) >= 2 and shape[-1] == length and (len(shape) < 3 or shape[-3] == 1)


def _mask_is_learnt(node: Node, differentiable: Collection[Value]) -> bool:
    """Tell whether a mask has a gradient, which would be a sum over the ranks."""
    assert node.call is not None
    mask = place(arguments(node.call)["attn_mask"])
    return mask is not None and node.inputs[mask] in differentiable


def _repeats(graph: Graph, value: Value) -> int:
    """Return the number of consecutive copies of each head that the graph makes of a tensor [B, N, S, D]; 1: none."""
    shape, node = graph.meta(value).shape, graph.nodes[value.node]
    while node.call is not None and node.call.operator in AFTER_REPEATING:
        node = graph.nodes[node.inputs[0].node]
    if node.call is None:
        return 1
    made, named = node.outputs[0].shape, arguments(node.call)
    if node.call.operator == "repeat_interleave" and made == shape:
        along_heads = named.get("dim") in (HEADS_DIM, HEADS_DIM - len(made))
        return int(named["repeats"]) if along_heads and isinstance(named.get("repeats"), int) else 1
    if node.call.operator == "expand" and len(made) == 5 and (made[0], made[1] * made[2], *made[3:]) == tuple(shape):
        return int(made[2]) if node.call.inputs[0].shape[-3:-2] == (1,) else 1
    return 1


def projection_of(graph: Graph, readers: Readers, node: Node) -> Node | None:
    """Return the linear layer that alone reads an attention's output, with all features of a token as a row, or None.

    readers: of the graph.

    Whether it does so on a rank, its layouts say (runtime/compiler.py).
    """
    batch, heads, length, width = node.outputs[0].shape
    value = Value(node.name)
    while len(reading := readers[value]) == 1 and value not in graph.returned:
        ((name, place),) = reading
        reader = graph.nodes[name]
        if reader.call is None or place:
            return None
        if reader.call.operator == "linear":
            return reader if reader.call.inputs[0].shape == (batch, length, heads * width) else None
        if reader.call.operator not in BEFORE_PROJECTION or len(reader.outputs) != 1:
            return None
        value = Value(name)
    return None


def shared_options(
    graph: Graph,
    options: Mapping[str, Sequence[Option]],
    configured: Collection[str],
    along: int,
    mesh_shape: Sequence[int],
) -> dict[str, Sequence[Option]]:
    """Return the options without those that an exchange inside of the call replaces.

    Left out are heads or slices of queries along the sequence's mesh dimension, between redistributions that run under
    nothing, unless the call is configured. And exchanges along other dimensions, and those in a way for which the heads
    do not suffice: raises `ValueError` if that is the way asked for.
    """
    allowed = dict(options)
    for name, node in graph.nodes.items():
        call = node.call
        if call is None or call.sequence is None:
            continue
        shared = {option for option in options[name] if exchange_dims(call, option.inputs)}
        wanted = [option for option in options[name] if exchange_dims(call, option.inputs) == [along]]
        fits = {option for option in wanted if _allows(call, option.inputs, mesh_shape)}
        if wanted and not fits:
            heads, ranks = call.inputs[0].shape[HEADS_DIM], mesh_shape[along]
            raise ValueError(
                f"sequence_exchange={call.sequence.exchange!r}: {where(node)} has {heads} heads of queries, which "
                f"{ranks} ranks cannot share: give a multiple of the ranks, or 'gather'"
            )
        valid = [option for option in options[name] if option in fits or option not in shared]
        replaced = (shard(HEADS_DIM), shard(SEQUENCE_DIM)) if fits and name not in configured else ()
        allowed[name] = [option for option in valid if option in fits or option.inputs[0][along] not in replaced]
    return allowed


def _allows(call: OpCall, layouts: Sequence[Layout], mesh_shape: Sequence[int]) -> bool:
    assert call.sequence is not None
    shared = shared_attention(call, layouts, mesh_shape)
    return shared.allows(call.sequence.exchange or GATHER)


def exchange_prices(
    call: OpCall, option: Option, costs: MeshCosts, model: CostModel, *, computes: bool = True
) -> list[ExchangePrice]:
    """Return the prices of the ways that a call may take under an option, the best first; empty: it exchanges nothing.

    computes: whether the attention counts, too, under which a part of what is sent disappears.
    """
    found: list[ExchangePrice] = []
    for dim in exchange_dims(call, option.inputs):
        assert call.sequence is not None

        def collective(kind: str, nbytes: float, dim: int = dim) -> float:
            return costs.seconds(kind, nbytes, dim)

        forward, backward = passes(call, option, costs.shape, model) if computes else (0.0, 0.0)
        shared = shared_attention(call, option.inputs, costs.shape)
        wanted = call.sequence.exchange, call.sequence.groups
        found = shared.prices((forward, backward), collective, *wanted)
    return found


def settled(
    graph: Graph, picked: Mapping[str, Option], costs: MeshCosts, model: CostModel, *, computes: bool = True
) -> Graph:
    """Return the graph with the way and the groups of least price for each attention that exchanges."""
    sharing = {name: node for name, node in graph.nodes.items() if node.call is not None and node.call.sequence}
    nodes = dict(graph.nodes)
    for name, node in sharing.items():
        assert node.call is not None and node.call.sequence is not None
        prices = exchange_prices(node.call, picked[name], costs, model, computes=computes)
        if prices:
            best, shared = prices[0], shared_attention(node.call, picked[name].inputs, costs.shape)
            groups = min(best.groups, shared.most_groups(best.exchange))
            sequence = replace(
                node.call.sequence, exchange=best.exchange, groups=groups, reason=_reason(prices, node.call.sequence)
            )
            nodes[name] = replace(node, call=replace(node.call, sequence=sequence))
        else:
            nodes[name] = replace(node, call=replace(node.call, sequence=None))
    return replace(graph, nodes=nodes) if sharing else graph


def _reason(prices: Sequence[ExchangePrice], asked: SharedSequence) -> str:
    """Return the way that was taken, and why, with the price of a step's attention and of what it sends beside it."""
    best, *others = prices
    why = "asked for" if asked.exchange else "the only way" if not others else ""
    other = ", ".join(f"{_words(each)} {_ms(each)}" for each in others)
    return f"{_words(best)}: {_ms(best)} with what stays exposed" + (f"; {other}" if other else f"; {why}")


def _words(price: ExchangePrice) -> str:
    way = "heads exchanged" if price.exchange == HEADS else "keys and values gathered"
    return f"{way} in {price.groups} group{'s' if price.groups > 1 else ''}"


def _ms(price: ExchangePrice) -> str:
    return f"{1e3 * (price.forward + price.backward):.4g} ms"
