"""The tensors that a planned model is called with, refused unless they are as they were when it was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ascend_parallel.sharding.graph import INPUT, Node, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.planner.plan import ShardingPlan


def given_tensors(
    plan: ShardingPlan,
    coordinate: Sequence[int] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return the tensor given for each input node.

    coordinate
        Of the rank whose parts are given; None: whole tensors are.

    Raises `ValueError` for arguments unlike those that were traced: their number, shapes, dtypes, the values of those
    that are no tensors, and a gradient wanted where there was none.
    """
    nodes = [node for node in plan.graph.nodes.values() if node.kind == INPUT]
    binding = plan.graph.binding
    found = list(args) if binding is None else binding.tensors(args, kwargs)
    if len(found) != len(nodes):
        raise ValueError(f"{len(found)} tensors were given; traced were {', '.join(node.source for node in nodes)}")
    for node, tensor in zip(nodes, found, strict=True):
        _check(plan, coordinate, node, tensor)
    return {node.name: tensor for node, tensor in zip(nodes, found, strict=True)}


def _check(plan: ShardingPlan, coordinate: Sequence[int] | None, node: Node, tensor: torch.Tensor) -> None:
    shape = node.outputs[0].shape
    if coordinate is not None:
        shape = local_shape(shape, plan.layouts[Value(node.name)], plan.mesh.shape, coordinate)
    if tuple(tensor.shape) != shape or tensor.dtype != node.outputs[0].dtype:
        raise ValueError(
            f"{node.source} is {list(tensor.shape)} of {tensor.dtype}; the plan is for {list(shape)} of "
            f"{node.outputs[0].dtype}"
        )
    if tensor.requires_grad and torch.is_grad_enabled() and Value(node.name) not in plan.differentiable:
        raise ValueError(f"{node.source} wants a gradient, and was traced without: trace with inputs that want one")
