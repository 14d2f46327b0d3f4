"""Data parallelism: tensors computed from inputs are cut along one mesh dimension, and parameters are whole there."""

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
    """Return those of each node's options that data parallelism along mesh dimension `data` allows.

    Inputs are cut along their first dimension, and tensors computed from them along any dimension, where possible;
    also those of configured operators, where the strategies say nothing else. Parameters are whole there, and read
    whole. In semi-automatic mode, nodes that are not configured are whole on the other mesh dimensions, except for the
    parameters of configured operators.
    """
    left = dict(options)
    from_inputs: set[str] = set()
    read = {value.node for name in configured for value in graph.nodes[name].inputs}
    for name, node in graph.nodes.items():
        if node.kind == INPUT or any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
        kept = list(left[name])
        if name not in configured:
            kept = [option for option in kept if _parts_are_produced(left, node, option, data)]
            if semi_auto and name not in read:
                kept = [option for option in kept if is_whole(option, data, node.kind == PARAMETER)]
            elif node.kind == PARAMETER:
                kept = [option for option in kept if option.outputs[0][data].kind in WHOLE]
            elif semi_auto:
                kept = [option for option in kept if is_whole(option, data, False)]
        cut = [option for option in kept if name in from_inputs and is_cut(option, data, node.kind == INPUT)]
        others = [index for index, value in enumerate(node.inputs) if value.node not in from_inputs]
        of_batch = [option for option in cut if all(option.inputs[index][data].kind in WHOLE for index in others)]
        left[name] = of_batch or cut or kept
    return left


def _parts_are_produced(left: Mapping[str, Sequence[Option]], node: Node, option: Option, data: int) -> bool:
    """Tell whether each partial sum that `option` reads along mesh dimension `data` is produced as one."""
    return all(
        layout[data].kind != "partial"
        or layout[data] in {produced.outputs[value.index][data] for produced in left[value.node]}
        for value, layout in zip(node.inputs, option.inputs, strict=True)
    )
