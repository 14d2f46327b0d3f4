"""A model and its loss as one module, whose parts have the model's names, and as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.graph import Graph, Value
from ascend_parallel.sharding.trace import TraceError, trace

Loss = Callable[..., torch.Tensor]
"""Called as ``loss(model, *batch)``; returns the mean loss of the batch, one number."""


class WithLoss(nn.Module):
    """Runs ``loss(model, *batch)``; its parameters, buffers and modules are the model's, under the same names."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Join them. What is put in the place of a parameter here is put there in the model."""
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(model)[name]
        self.training = model.training
        self._run = (model, loss)  # in a tuple: neither is a module of this one

    def forward(self, *batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        model, loss = self._run
        return loss(model, *batch)


def mean_loss(model: nn.Module, *batch: Any) -> torch.Tensor:
    """Return ``model(*batch)``: for models that return their loss."""
    found: torch.Tensor = model(*batch)
    return found


def trace_with_loss(model: nn.Module, loss: Loss, batch: Sequence[Any]) -> Graph:
    """Return the graph of ``loss(model, *batch)`` as the model is, in training or in evaluation mode.

    Raises `TraceError`, also if the loss is not one number.
    """
    try:
        graph = trace(WithLoss(model, loss), tuple(batch))
    except TraceError as error:
        said = str(error).replace("WithLoss", f"{type(model).__name__} with its loss", 1)
        if "positional argument" in said:
            called = "model(*batch), which returns the loss" if loss is mean_loss else "loss(model, *batch)"
            said += f"; it was called as {called}" + (": give loss= if it does not" if loss is mean_loss else "")
        raise TraceError(said) from error
    if not isinstance(graph.outputs, Value) or graph.meta(graph.outputs).shape != ():
        raise TraceError("the loss has to be one number: loss(model, *batch) returns a tensor of no dimension")
    return graph
