"""Warn about means over unequal counts: then the mean of the micro-batches' means is not the batch's mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, Graph, Node, Value
from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules.axes import arguments, is_float, place
from ascend_parallel.sharding.rules.loss import MEAN
from ascend_parallel.training.batch_checks import EVERY, is_due

log = logging.getLogger("ascend_parallel")

BY_CLASS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
CURE = (
    "have the loss return (sum, count), such as cross_entropy(..., reduction='sum') and (targets != -100).sum(): the "
    "step then divides by the total count"
)


class MaskedMeans:
    """Compares, on rank 0, the divisors of the means in a planned loss between micro-batches, and warns once."""

    def __init__(self, plan: ShardingPlan, micro_batches: int) -> None:
        """Find these means: cross-entropies that ignore targets, and numbers divided by a number of the batch alone."""
        self._graph, self._micro_batches, self._seen = plan.graph, micro_batches, 0
        needed = micro_batches > 1 and isinstance(plan.graph.outputs, Value) and dist.get_rank() == 0
        self._means = list(_means(plan)) if needed else []

    def check(self, batch: Sequence[Any]) -> None:
        """Warn if the counts of the batch's micro-batches differ; the batch is whole or this rank's part."""
        number, self._seen = self._seen, self._seen + 1
        if not self._means or not is_due(number, EVERY):
            return
        tensors = [leaf for leaf in pytree.tree_leaves(list(batch)) if isinstance(leaf, torch.Tensor)]
        parts = list(zip(*(tensor.chunk(self._micro_batches) for tensor in tensors), strict=True))
        for node, value, ignored in self._means:
            try:
                counts = [_count(self._graph, value, ignored, part) for part in parts]
            except RuntimeError:  # sizes in the graph are those of the whole batch, not of a rank's part
                continue
            if len(set(counts)) > 1:
                shown = ", ".join(f"{count:g}" for count in counts[:8])
                log.warning(
                    "the loss is a mean over %s of the batch (%s), and micro-batches count %s%s: the mean of their "
                    "means is not the batch's; %s",
                    "the targets that are not ignored" if ignored is not None else "a number",
                    f"{node.module} {node.name}".strip(),
                    shown,
                    ", ..." if len(counts) > 8 else "",
                    CURE,
                )
                self._means = []
                return


class CountedMeans(TorchFunctionMode):
    """Counts, in a model that is not traced, the targets over which its cross-entropies take means."""

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the targets of cross_entropy and nll_loss; run every function unchanged."""
        named = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss) and named.get("reduction", "mean") == "mean":
            target = args[1] if len(args) > 1 else named["target"]
            if not target.is_floating_point():
                self.count += int((target != named.get("ignore_index", -100)).sum())
        return func(*args, **named)


def warn_of_replicas(count: int, group: dist.ProcessGroup) -> bool:
    """Warn on rank 0 if the counts differ between the ranks of `group`; return, on all of them, whether they do."""
    extremes = torch.tensor([count, -count], device=default_device())
    run_collective("the comparison of counts", dist.all_reduce, extremes, group=group, op=dist.ReduceOp.MAX)
    most, least = int(extremes[0]), -int(extremes[1])
    if most != least and dist.get_rank() == 0:
        log.warning(
            "the loss is a mean over the targets that are not ignored, of which replicas have between %d and %d: the "
            "mean of their means is not the batch's; %s",
            least,
            most,
            CURE,
        )
    return most != least


def _means(plan: ShardingPlan) -> Iterator[tuple[Node, Value, int | None]]:
    """Yield each mean's node, the value that holds its count, and the ignored class (None: the value is the count)."""
    graph = plan.graph
    for node in graph.nodes.values():
        if node.kind != CALL or node.call is None:
            continue
        name = node.call.name.split(".")[1]
        if name in BY_CLASS:
            named = arguments(node.call)
            target = place(named["target"])
            if target is None or int(named["reduction"]) != MEAN or is_float(node.call.inputs[target]):
                continue
            counted, ignored = node.inputs[target], int(named["ignore_index"])
        elif name == "div" and len(node.inputs) == 2 and all(meta.shape == () for meta in node.call.inputs):
            counted, ignored = node.inputs[1], None
        else:
            continue
        if _of_batch(graph, counted):
            yield node, counted, ignored


def _of_batch(graph: Graph, value: Value) -> bool:
    """Tell whether a tensor is computed from inputs, and otherwise only from constants."""
    kinds = {graph.nodes[name].kind for name in graph.needed_for([value])}
    return INPUT in kinds and kinds <= {INPUT, CONSTANT, CALL}


def _count(graph: Graph, value: Value, ignored: int | None, part: Sequence[torch.Tensor]) -> float:
    """Return the number that a micro-batch's mean divides by."""
    names = [node.name for node in graph.inputs]
    with torch.no_grad():
        counted = _compute(graph, value, dict(zip(names, part, strict=True)))
    return float(counted if ignored is None else (counted != ignored).sum())


def _compute(graph: Graph, value: Value, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute a value of the graph from its inputs."""
    node = graph.nodes[value.node]
    if node.kind == INPUT:
        return inputs[node.name]
    if node.call is None:
        constant: torch.Tensor = graph.constants[node.source]
        return constant
    returned = node.call.run([_compute(graph, source, inputs) for source in node.inputs])
    result: torch.Tensor = returned if isinstance(returned, torch.Tensor) else returned[value.index]
    return result
