"""Check what a search takes: the model, the batch, ranks and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.planner.annotate import annotated
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.training.pipeline.stage_assignment import MARK as STAGE
from ascend_parallel.tuning.cost_model.hardware import find_hardware

MOST_RANKS, MOST_BYTES = 1 << 17, 1e18


def check_job(ranks: int, memory: float, hardware: str) -> None:
    """Raise for a number of ranks or bytes that is not allowed, and for a hardware that is not known."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise StrategyOptionError(f"ranks={ranks!r}: give a whole number from 1 to {MOST_RANKS}")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory <= MOST_BYTES:
        raise StrategyOptionError(f"memory={memory!r}: give the bytes of a rank, such as 60e9")
    find_hardware(hardware)


def check_model(model: nn.Module) -> None:
    """Refuse a model that says itself how it is placed."""
    strategies = annotated(model)
    placed = [path for path, module in model.named_modules() if hasattr(module, STAGE)]
    for what, paths in (("a strategy", list(strategies)), ("a pipeline stage", placed)):
        if paths:
            raise StrategyOptionError(
                f"{paths[0] or 'the model'} has {what}: the search chooses these, leave them out of the model"
            )
    if Recompute.of(model).modules:
        raise StrategyOptionError(
            f"{Recompute.of(model).modules[0] or 'the model'} is marked for recompute: the search chooses this, leave "
            "it out of the model"
        )


def unmarked(graph: Graph) -> Graph:
    """Return the graph; raise if a function in it has a strategy."""
    for node in graph.nodes.values():
        if node.mark is not None:
            raise StrategyOptionError(f"{node.mark} in {node.module or 'the model'}: the search chooses all strategies")
    return graph


def rows_of(batch: Sequence[Any]) -> int:
    """Return the rows of a batch."""
    if isinstance(batch, torch.Tensor) or not isinstance(batch, Sequence):
        raise TypeError(f"batch is a {type(batch).__name__}: give the loss's arguments as a tuple, such as (x,)")
    shapes = [list(value.shape) for value in batch if isinstance(value, torch.Tensor)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or 0 in rows:
        raise StrategyOptionError(
            f"batch has tensors of {shapes}: their first dimension is the batch, and has to be the same, 1 or more"
        )
    return rows.pop()


def rows_part(value: Any, rows: int, dtype: str | None) -> Any:
    """Return the first rows of a tensor of the batch, in the dtype of mixed precision."""
    if not isinstance(value, torch.Tensor):
        return value
    part = value.detach()[:rows]
    return part if dtype is None or not part.is_floating_point() else part.to(getattr(torch, dtype))
