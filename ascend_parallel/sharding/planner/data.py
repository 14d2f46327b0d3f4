"""Data parallelism: what comes from the inputs is cut along one mesh dimension, and parameters are whole there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_parallel.sharding.graph import INPUT, PARAMETER, Node
from ascend_parallel.sharding.planner.options import Option, is_cut, is_whole

if TYPE_CHECKING:
    from ascend_parallel.sharding.planner.search import Search

WHOLE = ("replicate", "copy")


def keep_data_parallel(search: Search, data: int) -> None:
    """Leave of each node's options those that data parallelism along a mesh dimension has.

    Inputs are cut along their first dimension, and what is computed from them somehow, where it can be, also by
    configured operators where their strategies say nothing else. Parameters are whole there, and read whole. In
    semi-automatic mode what is not configured is whole on the other dimensions, but for the parameters of configured
    operators.
    """
    from_inputs: set[str] = set()
    read = {value.node for name in search.configured for value in search.graph.nodes[name].inputs}
    for name, node in search.graph.nodes.items():
        if node.kind == INPUT or any(value.node in from_inputs for value in node.inputs):
            from_inputs.add(name)
        kept = list(search.options[name])
        if name not in search.configured:
            kept = [one for one in kept if _is_given(search, node, one, data)]
            if search.semi_auto and name not in read:
                kept = [one for one in kept if is_whole(one, data, node.kind == PARAMETER)]
            elif node.kind == PARAMETER:
                kept = [one for one in kept if one.outputs[0][data].kind in WHOLE]
            elif search.semi_auto:
                kept = [one for one in kept if is_whole(one, data, False)]
        cut = [one for one in kept if name in from_inputs and is_cut(one, data, node.kind == INPUT)]
        others = [index for index, value in enumerate(node.inputs) if value.node not in from_inputs]
        of_batch = [one for one in cut if all(one.inputs[index][data].kind in WHOLE for index in others)]
        search.options[name] = of_batch or cut or kept


def _is_given(search: Search, node: Node, option: Option, data: int) -> bool:
    """Tell whether the parts of sums that an option reads along a mesh dimension are given so."""
    return all(
        layout[data].kind != "partial" or layout[data] in {given[data] for given in search.produced(value)}
        for value, layout in zip(node.inputs, option.inputs, strict=True)
    )
