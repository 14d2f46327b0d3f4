"""Join a model and its loss into one module, with the model's names, and trace them as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import PARAMETER, Graph, Value
from ascend_parallel.sharding.tracing.marked_tensors import ATTRIBUTE, placements_of
from ascend_parallel.sharding.tracing.trace import TraceError, trace
from ascend_parallel.training.options import GradientMerge, StrategyOptionError

COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Loss = Callable[..., Any]
"""``loss(model, *batch)`` returns the mean loss, ``(sum, count)`` with an integer count, or `WeightedLoss`."""

RETURNS = (
    "loss(model, *batch) must return the mean, a tensor without dimensions, or (sum, count) with an integer count, or "
    "WeightedLoss(total, weight) to divide by another number"
)

LEARNED_WEIGHT = (
    "the loss is a WeightedLoss, and its weight depends on parameters: gradients flow through the total alone; "
    "detach() the weight, or return the mean"
)


class WeightedLoss(NamedTuple):
    """A loss whose mean is ``total / weight``: the sums of the weighted losses and of their weights.

    A loss function may return it in place of ``(sum, count)`` where the divisor is no integer.
    """

    total: torch.Tensor
    weight: torch.Tensor | float


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch.

    total, count
        The sum of the losses, and the count that divides it and its gradients. If the loss function returns a mean,
        `total` is the mean loss and `count` is None.
    """

    total: torch.Tensor
    count: torch.Tensor | None = None

    @property
    def mean(self) -> torch.Tensor:
        """The mean loss: ``total / count``, or `total` without a count."""
        return self.total if self.count is None else self.total / self.count


class GradientDivisor:
    """The number that divides the gradients of the batches between two steps of the optimizer."""

    def __init__(self, merge: GradientMerge) -> None:
        """Start without batches."""
        self._merge = merge
        self._count: float | None = None

    def add(self, loss: BatchLoss) -> None:
        """Add a batch's count. Raises `StrategyOptionError` if the strategy asks for the sum of several means."""
        if loss.count is None:
            return
        if self._merge.steps > 1 and not self._merge.average:
            raise StrategyOptionError(
                f"gradient_merge.average=False with steps={self._merge.steps} and a loss that returns (sum, count): a "
                "sum of means over different counts cannot be computed from sums; give average=True, the mean over all"
            )
        self._count = (self._count or 0.0) + float(loss.count)

    def clear(self) -> None:
        """Drop all counts."""
        self._count = None

    @property
    def value(self) -> float:
        """The divisor. Raises `ValueError` unless the counts add up to a finite number above 0."""
        if self._count is None:
            return 1.0
        if not 0 < self._count < float("inf"):
            raise ValueError(
                f"the loss returned (sum, count) with a count of {self._count:g} in all: give a number above 0, such "
                "as of the targets that are not ignored; leave out batches without any"
            )
        return self._count / self._merge.steps


class Losses:
    """Accumulates the losses of a batch's micro-batches."""

    def __init__(self, micro_batches: int, factor: float = 1.0) -> None:
        """Start a batch of `micro_batches` micro-batches, whose gradients are multiplied by `factor`."""
        self._micro_batches, self._factor = micro_batches, factor
        self._totals: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def add(self, returned: Any) -> torch.Tensor:
        """Add a micro-batch's mean, or its sum and count; return its share of the differentiated loss."""
        if isinstance(returned, torch.Tensor):
            self._totals.append(returned.detach())
            return returned * (self._factor / self._micro_batches)
        total, count = returned
        self._totals.append(_wide(total.detach()))
        self._counts.append(torch.as_tensor(count, device=total.device).detach())
        return cast(torch.Tensor, total * self._factor)

    def batch(self) -> BatchLoss:
        """Return the mean of the means, or the sum of the sums and the sum of the counts."""
        assert len(self._totals) == self._micro_batches, f"{len(self._totals)} losses of {self._micro_batches}"
        if not self._counts:
            return BatchLoss(torch.stack(self._totals).mean())
        return BatchLoss(torch.stack(self._totals).sum(), torch.stack(self._counts).sum())


def _wide(number: torch.Tensor) -> torch.Tensor:
    return number.float() if number.element_size() == 2 else number


class WithLoss(nn.Module):
    """Runs ``loss(model, *batch)``; its parameters, buffers and modules are the model's, under the same names."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Join them. A parameter replaced here is replaced in the model."""
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(model)[name]
        vars(self)[ATTRIBUTE] = placements_of(model)
        self.training = model.training
        self._run = (model, loss)  # a tuple, so that the model is not registered as a submodule

    def forward(self, *batch: Any) -> Any:
        """Return the mean loss, its sum and count, or a `WeightedLoss`."""
        model, loss = self._run
        return loss(model, *batch)


def mean_loss(model: nn.Module, *batch: Any) -> Any:
    """Return ``model(*batch)``, for models that return their loss."""
    return model(*batch)


def trace_with_loss(model: nn.Module, loss: Loss, batch: Sequence[Any]) -> Graph:
    """Return the graph of ``loss(model, *batch)`` in the model's current mode, training or evaluation.

    Raises `TraceError`, also if the loss is neither one number nor a sum and a count.
    """
    try:
        graph = trace(WithLoss(model, loss), tuple(batch))
    except TraceError as error:
        message = str(error).replace("WithLoss", f"{type(model).__name__} with its loss", 1)
        if "positional argument" in message:
            called = "model(*batch), which returns the loss" if loss is mean_loss else "loss(model, *batch)"
            message += f"; it was called as {called}" + (": give loss= if it does not" if loss is mean_loss else "")
        raise TraceError(message) from error
    described = pytree.tree_map_only(Value, graph.meta, graph.outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
    if problem := loss_problem(described):
        raise TraceError(problem)
    if isinstance(graph.outputs, WeightedLoss) and _has_gradient(graph, graph.outputs.weight):
        raise TraceError(LEARNED_WEIGHT)
    return graph


def _has_gradient(graph: Graph, value: Any) -> bool:
    """Tell whether a number is computed from parameters, or from inputs with a gradient, without detach()."""
    waiting, seen = [value.node] if isinstance(value, Value) else [], set[str]()
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.kind == PARAMETER or node.name in graph.with_gradient:
            return True
        if node.name not in seen and not (node.call is not None and node.call.name == "aten.detach.default"):
            seen.add(node.name)
            waiting += [source.node for source in node.inputs if graph.meta(source).dtype.is_floating_point]
    return False


def loss_problem(returned: Any) -> str:
    """Return the fault of a loss function's value, of tensors or their metas; "" without one."""
    numbers = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if len(numbers) not in (1, 2) or not all(map(_is_number, numbers)) or isinstance(numbers[0], (int, float)):
        return f"the loss has to be one number: {RETURNS}"
    if len(numbers) == 1:
        return ""
    if isinstance(returned, WeightedLoss):
        return LEARNED_WEIGHT if getattr(returned.weight, "requires_grad", False) else ""
    kind = numbers[1].dtype if hasattr(numbers[1], "dtype") else type(numbers[1]).__name__
    if kind == "int" or (isinstance(kind, torch.dtype) and kind in COUNTS):
        return ""
    return (
        f"the loss function returned two numbers, of which the second is a {kind} and not a count: the step would "
        f"divide by it. {RETURNS}; return metrics by other means, such as a closure"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def loss_value(graph: Graph) -> Value:
    """Return the mean loss, or the sum, of a graph with its loss."""
    loss = graph.outputs if isinstance(graph.outputs, Value) else graph.outputs[0]
    assert isinstance(loss, Value)
    return loss
