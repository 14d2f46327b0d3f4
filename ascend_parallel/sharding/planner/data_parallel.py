"""Data parallelism along a mesh dimension: shards the tensors computed from inputs, and keeps parameters whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ascend_parallel.sharding.graph import INPUT, PARAMETER, Graph, Node
from ascend_parallel.sharding.planner.options import Option, is_cut, is_whole

WHOLE = ("replicate", "partial_grad")


def data_parallel_options(
    graph: Graph,
    options: Mapping[str, Sequence[Option]],
    configured: Collection[str],
    semi_auto: bool,
    data: int,
) -> dict[str, Sequence[Option]]:
    """Return the options of each node that data parallelism along mesh dimension `data` allows.

    Along `data`, inputs are sharded on their first dimension, and tensors computed from inputs on any dimension, where
    possible; this includes configured operators, as far as their strategies allow. Parameters are held and read whole
    along `data`. In semi-automatic mode, nodes that are not configured are whole on the other mesh dimensions, except
    for the parameters of configured operators.
    """
    allowed = dict(options)
    from_inputs: set[str] = set()
    read = {value.node for name in configured for value in graph.nodes[name].inputs}
    for name, node in graph.nodes.items():
        if node.kind == INPUT or any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
        kept = list(allowed[name])
        if name not in configured:
            kept = [option for option in kept if _partials_are_produced(allowed, node, option, data)]
            if semi_auto and name not in read:
                kept = [option for option in kept if is_whole(option, data, node.kind == PARAMETER)]
            elif node.kind == PARAMETER:
                kept = [option for option in kept if option.outputs[0][data].kind in WHOLE]
            elif semi_auto:
                kept = [option for option in kept if is_whole(option, data, False)]
        cut = [option for option in kept if name in from_inputs and is_cut(option, data, node.kind == INPUT)]
        others = [index for index, value in enumerate(node.inputs) if value.node not in from_inputs]
        of_batch = [option for option in cut if all(option.inputs[index][data].kind in WHOLE for index in others)]
        allowed[name] = of_batch or cut or kept
    return allowed


def _partials_are_produced(allowed: Mapping[str, Sequence[Option]], node: Node, option: Option, data: int) -> bool:
    """Tell whether each partial tensor that `option` reads along mesh dimension `data` is produced as partial."""
    return all(
        layout[data].kind != "partial"
        or layout[data] in {produced.outputs[value.index][data] for produced in allowed[value.node]}
        for value, layout in zip(node.inputs, option.inputs, strict=True)
    )
