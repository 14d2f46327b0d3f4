"""The replacements of DeepSpeed's LinearAllreduce.forward and LinearLayer.forward.

Written against DeepSpeed 0.19, deepspeed/module_inject/layers.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import Matmul
from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.patches.base import ConflictError, Function
from ascend_parallel.patches.compiled import at_tracing, skip_frame, within_graphs
from ascend_parallel.patches.framework import ONE_RANK, Framework
from ascend_parallel.patches.linear_call import LinearCall, begin_call, run_linear
from ascend_parallel.settings import Settings
from ascend_parallel_autoload.frameworks import DEEPSPEED

MODULE = DEEPSPEED.module
ROW, COLUMN = "LinearAllreduce", "LinearLayer"
KINDS = {ROW: "row", COLUMN: "column"}


class DeepSpeed(Framework):
    """The installed DeepSpeed, and the settings of its patched layers."""

    def __init__(self, settings: Settings, version: str) -> None:
        """Hold the settings; ranks compare `version`."""
        super().__init__(settings)
        self.version = version
        self.compiles_original = True

    def group_of(self, layer: Any) -> dist.ProcessGroup:
        """Return the tensor-parallel group of a layer."""
        group: dist.ProcessGroup = layer.mp_group
        return group

    def uncovered(self, layer: Any) -> str | None:
        """Return the reason why DeepSpeed's own forward of `layer` must run, or None."""
        own = next(kind.__name__ for kind in type(layer).__mro__ if kind.__module__ == MODULE)
        if own not in KINDS:
            return f"how DeepSpeed's {own} shares its features among ranks is not known here"
        if no_tree := self.settings.arithmetic.forbids("how DeepSpeed cuts fused weights is not known here"):
            return no_tree
        if on_one_rank(layer):
            return ONE_RANK
        if torch.compiler.is_compiling() or layer.defer_collectives_to_compiler:
            return "it is being compiled, and a process group cannot be"
        if len(set(layer._partition_sizes)) > 1:
            return f"its features are shared unevenly among ranks: {list(layer._partition_sizes)}"
        return None

    def shape_ahead(self, layer: Any, group: dist.ProcessGroup, matmul: Matmul) -> LayerShape | None:
        """Return the shape that a call of `layer` will have beside `matmul`, or None."""
        kind = next((KINDS.get(kind.__name__) for kind in type(layer).__mro__ if kind.__module__ == MODULE), None)
        if kind is None or self.uncovered(layer) or self.group_of(layer) is not group or layer.weight.dim() != 2:
            return None
        n, k = layer.weight.shape
        return LayerShape.beside(matmul, kind, k, n, sequence_parallel=False)

    def refuse_conflicts(self, layer: Any) -> None:
        """Raise `ConflictError` if DeepSpeed overlaps the same layers itself."""
        if type(layer).tp_overlap_comm:
            raise ConflictError(
                "tensor_parallel.tp_overlap_comm=true (DeepSpeed's own overlap of tensor-parallel communication) "
                "cannot be used together with overlapped linear layers: set it to false, or unset COC_PARALLEL_NUM "
                "and USE_COC_FUSED_KERNEL"
            )

    def compared(self) -> Mapping[str, Any]:
        """Return the value that all ranks must share: the version."""
        return {"version of deepspeed": self.version}


def on_one_rank(layer: Any) -> bool:
    """Tell whether a layer communicates nothing: it has no tensor-parallel group, or one of one rank."""
    return layer.mp_group is None or bool(layer.mp_group.size() == 1)


def layer_forward(original: Function, owner: str, deepspeed: DeepSpeed) -> Function:
    """Make the method that replaces the forward of the class `owner`."""

    def run(self: Any, input: torch.Tensor) -> torch.Tensor:
        reason = deepspeed.uncovered(self)
        if reason is not None:
            deepspeed.log_uncovered(self, reason)
            whole: torch.Tensor = original(self, input)
            return whole
        call = LinearCall(
            layer=self,
            kind=KINDS[owner],
            x=input,
            weight=self.weight,
            bias=self.bias,
            parameter=self.weight,
            original=lambda x: original(self, x),
            added=True,
            finish=_gather_of(self) if getattr(self, "gather_output", False) else None,
        )
        y: torch.Tensor = run_linear(deepspeed, call) if begin_call(deepspeed, call) else call.original(input)
        return y

    @at_tracing
    def note() -> None:
        deepspeed.note_compiled(owner)

    def noted(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not on_one_rank(self):
            note()
        y: torch.Tensor = original(self, input)
        return y

    for each in (note, noted, on_one_rank):
        skip_frame(each)
    forward: Function = functools.wraps(original)(within_graphs(run, run if deepspeed.settings.insists else noted))
    vars(forward)["ascend_parallel"] = deepspeed
    return forward


def _gather_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that gathers the features of a column layer's output."""
    gather: Any = sys.modules[MODULE].GatherFromTensorParallelRegion
    return lambda y: gather.apply(layer.mp_group, y, layer._partition_sizes)
