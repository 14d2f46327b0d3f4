"""Means over unequal counts, seen and said: the mean of micro-batches' means is then not the batch's mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import CALL, CONSTANT, INPUT, Graph, Node, Ref, Value
from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules.axes import arguments, is_float, place
from ascend_parallel.sharding.rules.loss import MEAN
from ascend_parallel.training.batch_checks import EVERY, is_due

log = logging.getLogger("ascend_parallel")

BY_CLASS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
CURE = (
    "have the loss return (sum, count), such as cross_entropy(..., reduction='sum') and (targets != -100).sum(): the "
    "step then divides by the count of all"
)


class MaskedMeans:
    """Looks, on rank 0, at what the means in a planned loss divide by in each micro-batch, and warns once."""

    def __init__(self, plan: ShardingPlan, micro_batches: int) -> None:
        """Find these means: cross-entropies that ignore targets, and numbers divided by one made of the batch alone."""
        self._graph, self._micro_batches, self._seen = plan.graph, micro_batches, 0
        looks = micro_batches > 1 and isinstance(plan.graph.outputs, Value) and dist.get_rank() == 0
        self._means = list(_means(plan)) if looks else []

    def look(self, batch: Sequence[Any]) -> None:
        """Warn if micro-batches of the batch, whole or this rank's part, count differently."""
        number, self._seen = self._seen, self._seen + 1
        if not self._means or not is_due(number, EVERY):
            return
        tensors = [one for one in pytree.tree_leaves(list(batch)) if isinstance(one, torch.Tensor)]
        parts = list(zip(*(one.chunk(self._micro_batches) for one in tensors), strict=True))
        for node, value, ignored in self._means:
            try:
                counts = [_count(self._graph, value, ignored, part) for part in parts]
            except RuntimeError:  # sizes that stand in the graph are those of the whole batch, not of a rank's part
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
    """Counts, in a model that runs as it is written, what its cross-entropies take the mean of."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at calls of cross_entropy and nll_loss; run all of them."""
        named = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss) and named.get("reduction", "mean") == "mean":
            target = args[1] if len(args) > 1 else named["target"]
            if not target.is_floating_point():
                self.count += int((target != named.get("ignore_index", -100)).sum())
        return func(*args, **named)


def warn_of_replicas(count: int, group: dist.ProcessGroup) -> bool:
    """Warn on rank 0 if ranks of `group` count differently; tell, alike on all of them, whether they do."""
    found = torch.tensor([count, -count], device=default_device())
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    most, least = int(found[0]), -int(found[1])
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
    """Yield what takes a mean, what says of how many, and the class that is ignored (None: it is the number)."""
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
            found, ignored = node.inputs[target], int(named["ignore_index"])
        elif name == "div" and len(node.inputs) == 2 and all(meta.shape == () for meta in node.call.inputs):
            found, ignored = node.inputs[1], None
        else:
            continue
        if _of_batch(graph, found):
            yield node, found, ignored


def _of_batch(graph: Graph, value: Value) -> bool:
    """Tell whether a tensor is made of inputs, and of constants at most."""
    kinds, waiting, seen = set(), [value.node], set[str]()
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.name not in seen:
            seen.add(node.name)
            kinds.add(node.kind)
            waiting += [one.node for one in node.inputs]
    return INPUT in kinds and kinds <= {INPUT, CONSTANT, CALL}


def _count(graph: Graph, value: Value, ignored: int | None, part: Sequence[torch.Tensor]) -> float:
    """Return what a mean of a micro-batch divides by."""
    names = [node.name for node in graph.nodes.values() if node.kind == INPUT]
    with torch.no_grad():
        found = _made(graph, value, dict(zip(names, part, strict=True)))
    return float(found if ignored is None else (found != ignored).sum())


def _made(graph: Graph, value: Value, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run the operators of which a tensor is made."""
    node = graph.nodes[value.node]
    if node.kind == INPUT:
        return given[node.name]
    if node.call is None:
        found: torch.Tensor = graph.constants[node.source]
        return found
    inputs = [_made(graph, one, given) for one in node.inputs]
    args, kwargs = pytree.tree_map(
        lambda leaf: inputs[leaf.index] if isinstance(leaf, Ref) else leaf, (node.call.args, dict(node.call.kwargs))
    )
    returned = node.call.target(*args, **kwargs)
    made: torch.Tensor = returned if isinstance(returned, torch.Tensor) else returned[value.index]
    return made
