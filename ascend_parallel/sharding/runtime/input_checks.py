"""Checks before a planned model runs: its inputs are as traced, and all ranks have the same plan and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.process_groups.consistency import confirm_same, fingerprint
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import Graph, Node, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.recompute_config import Recompute


def input_tensors(
    plan: ShardingPlan,
    coordinate: Sequence[int] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return the input tensor of each input node.

    coordinate
        The rank's coordinate if the arguments are its local parts; None if they are global tensors.

    Raises `ValueError` if the arguments differ from the traced arguments: in number, shape, dtype, the values of
    arguments that are not tensors, or by requiring a gradient that the traced input did not require.
    """
    pairs = bound_inputs(plan.graph, args, kwargs)
    for node, tensor in pairs:
        _check(plan, coordinate, node, tensor)
    return {node.name: tensor for node, tensor in pairs}


def bound_inputs(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Node, torch.Tensor]]:
    """Return each input node and its tensor; raise `ValueError` for another number of tensors than traced."""
    nodes = graph.inputs
    tensors = list(args) if graph.binding is None else graph.binding.tensors(args, kwargs)
    if len(tensors) != len(nodes):
        raise ValueError(f"{len(tensors)} tensors were given; traced were {', '.join(node.source for node in nodes)}")
    return list(zip(nodes, tensors, strict=True))


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
        raise ValueError(
            f"{node.source} requires a gradient, and did not when traced: trace with an input that requires a gradient"
        )


def refuse_every_degree(settings: Settings) -> None:
    """Raise `DegreeError` if the settings ask for bits that a model does not have which its own Python runs."""
    settings.arithmetic.refuse(
        "a marked or eager model, a pipeline, and a plan without overlap or with compile have other bits on another "
        "mesh: use a graph of the whole model (ShardedModule, train_step) with overlap"
    )


def confirm_same_plan(
    plan: ShardingPlan,
    model: torch.nn.Module,
    settings: Settings,
    *,
    overlap: bool,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 0,
    recompute: Recompute | None = None,
    compile: str | None = None,
    in_tree: bool = False,
) -> int:
    """Return a seed that is the same on all ranks of `group`, by default of the default group.

    Raises `DisagreementError` on every rank unless plan, settings, options and the model's values agree on all ranks,
    and `DegreeError` if the bits are to be the same at every degree, unless what runs the plan sees to it (`in_tree`).
    """
    mine = {"the sharding plan": plan.digest, "overlap": str(overlap), "the model's parameters": fingerprint(model)}
    mine |= {"bucket_bytes": str(bucket_bytes), "recompute": repr(recompute or Recompute())}
    mine |= {"compile": str(compile)}
    mine |= {name: str(value) for name, value in settings.as_dict().items()}
    problem = "ranks call parallelize with different plans, settings or models"
    cure = "Give all ranks the same, and seed them alike or load one checkpoint"
    seed = confirm_same(group or dist.group.WORLD, "parallelize", mine, problem, cure)
    if not in_tree:
        refuse_every_degree(settings)
    return seed
