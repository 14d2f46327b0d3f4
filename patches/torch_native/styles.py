"""The patched methods of torch's styles.

Written against torch 2.7 to 2.15, torch/distributed/tensor/parallel/style.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.dtensor_linear import InForce, Installed
from ascend_parallel.patches.torch_native.layers import OWN, InstalledByStyle, install, sequence_dim

IN_FORCE = InForce()


def column_apply(original: Function) -> Function:
    """Make the method that replaces ``ColwiseParallel._apply``."""

    @functools.wraps(original)
    def apply(self: Any, module: Any, device_mesh: Any) -> Any:
        returned = original(self, module, device_mesh)
        if type(module) is torch.nn.Linear:
            reason = _same_style(self, "ColwiseParallel")
            if self.desired_input_layouts != (Replicate(),):
                reason = f"its style wants the input as {self.desired_input_layouts}"
            installed = InstalledByStyle(in_force=IN_FORCE, kind="column", mesh=device_mesh, reason=reason)
            install(module, installed)
        return returned

    return apply


def row_apply(original: Function) -> Function:
    """Make the method that replaces ``RowwiseParallel._apply``."""

    @functools.wraps(original)
    def apply(self: Any, module: Any, device_mesh: Any) -> Any:
        returned = original(self, module, device_mesh)
        if type(module) is torch.nn.Linear:
            reason = _same_style(self, "RowwiseParallel")
            (output,) = self.output_layouts
            if output != Replicate() and type(output) is not Shard:
                reason = f"its style wants the output as {output}"
            installed = InstalledByStyle(in_force=IN_FORCE, kind="row", mesh=device_mesh, reason=reason, output=output)
            install(module, installed)
        return returned

    return apply


def prepare_column_input(original: Function) -> Function:
    """Make the function that replaces ``ColwiseParallel._prepare_input_fn``.

    torch redistributes the input to Replicate() here. For a layer that is covered the input becomes a DTensor of its
    own layout, and the layer gathers.
    """

    @functools.wraps(original)
    def prepare(input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        installed = getattr(vars(mod).get("forward"), "ascend_parallel", None)
        x = inputs[0]
        if not isinstance(installed, Installed) or installed.uncovered(mod) is not None or len(inputs) > 1:
            return original(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        if not isinstance(x, DTensor):
            (layout,) = input_layouts
            if layout != Replicate() and sequence_dim(layout, x.ndim) is None:
                return original(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
            setattr(x, OWN, True)
            return x
        gathers = input_layouts != desired_input_layouts and x.device_mesh == device_mesh
        if gathers and sequence_dim(x.placements[0], x.ndim) is not None:
            return x
        return original(input_layouts, desired_input_layouts, mod, inputs, device_mesh)

    return prepare


def _same_style(style: Any, name: str) -> str | None:
    kind = type(style)
    if (kind.__module__, kind.__name__) != ("torch.distributed.tensor.parallel.style", name):
        return f"its style {kind.__name__} is a class of its own"
    return None
