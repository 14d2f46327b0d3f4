"""The gather that the column layers of a module share (PrepareModuleInput).

The module gets the DTensor as its ranks hold it, cut along the rows. To DTensor's operators that is the same tensor.
The first column layer gathers it, and the others read the rows that it has gathered.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import linear

from ascend_parallel.overlap.layer import Layer
from ascend_parallel.overlap.shared_column import shared_column_linear
from ascend_parallel.patches.batch_first import BatchFirstWeightGradient, swapped
from ascend_parallel.patches.framework import Framework
from ascend_parallel.patches.linear_call import LinearCall
from ascend_parallel.settings import Settings

SHARED = "_ascend_parallel_shared"


class SharedGather:
    """The gathered rows of an input, once a layer has gathered them."""

    def __init__(self) -> None:
        """No layer has gathered."""
        self.rows: torch.Tensor | None = None

    def run(self, framework: Framework, call: LinearCall, x: DTensor) -> torch.Tensor:
        """Return the output of a column layer, [B, S, N / R] or [S, ..., N / R]; x is the input that is shared."""
        if self.rows is None:
            group, settings = framework.prepare(call.layer, call.kind, call.x, call.weight, **call.options)
            if settings.enabled:
                y, self.rows = _gathering(framework, call, group, settings)
                return y
            # Tuning keeps the matmul whole: torch's own gather, whose backward sums all readers' gradients.
            self.rows = DTensor.to_local(x.redistribute(placements=[Replicate()]), grad_placements=[Partial()])
        return linear(self.rows, call.weight, call.bias)


def share(x: Any) -> Any:
    """Mark a DTensor whose rows its first reader is to gather. Its `to_local` gathers too, as its users expect."""
    setattr(x, SHARED, SharedGather())
    itself: Any = ref(x)  # a cycle would keep the rows until Python collects garbage
    x.to_local = lambda **options: itself().redistribute(placements=[Replicate()]).to_local(**options)
    return x


def shared_gather(x: DTensor) -> SharedGather | None:
    """Return the gather that readers of x share, or None."""
    return getattr(x, SHARED, None)


def _gathering(
    framework: Framework, call: LinearCall, group: dist.ProcessGroup, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the first layer, and the gathered rows."""
    options: dict[str, Any] = {}
    x, second = call.x, call.sequence_dim == 1
    if second:
        options["weight_gradient"] = BatchFirstWeightGradient(x.shape[0])
    layer = Layer(
        group=group,
        settings=settings,
        sequence_parallel=True,
        before_communicating=framework.confirm(group),
        **options,
    )
    y, rows = shared_column_linear(swapped(x) if second else x, call.weight, call.bias, layer)
    return (swapped(y), swapped(rows)) if second else (y, rows)
