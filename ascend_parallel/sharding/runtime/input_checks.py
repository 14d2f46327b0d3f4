"""Checks before a planned model runs: its tensors are as traced, and all ranks have the same plan and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.consistency import confirm_same, fingerprint
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import INPUT, Node, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.runtime.recompute_config import Recompute


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


def confirm_same_plan(
    plan: ShardingPlan,
    model: torch.nn.Module,
    settings: Settings,
    *,
    overlap: bool,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 0,
    recompute: Recompute | None = None,
) -> int:
    """Return a seed that is the same on all ranks of `group`, by default all ranks.

    Raises `DisagreementError` on every rank unless plan, settings, options and the model's values are the same on all.
    """
    mine = {"the sharding plan": plan.digest, "overlap": str(overlap), "the model's parameters": fingerprint(model)}
    mine |= {"bucket_bytes": str(bucket_bytes), "recompute": repr(recompute or Recompute())}
    mine |= {name: str(value) for name, value in settings.as_dict().items()}
    problem = "ranks call parallelize with different plans, settings or models"
    cure = "Give all ranks the same, and seed them alike or load one checkpoint"
    return confirm_same(group or dist.group.WORLD, "parallelize", mine, problem, cure)
