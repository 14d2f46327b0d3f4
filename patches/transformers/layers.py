"""The forward that is installed on linear layers of a Hugging Face `tp_plan`, styles "colwise" and "rowwise".

transformers puts a forward on each module. The patch calls transformers' own installation, and wraps the forward that
it has installed. The wrapper runs transformers' own where it does not cover the layer or the call, and after a revert.
Written against transformers 5.16 to 5.23, transformers/distributed/tensor_parallel.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.dtensor_linear import InForce, Installed, InstalledLayers
from ascend_parallel.patches.linear_call import LinearCall, run_linear, too_few_rows

KINDS = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
IN_FORCE = InForce()


@dataclass(frozen=True, kw_only=True)
class InstalledByPlan(Installed):
    """What a `tp_plan` installed on a module."""

    def uncovered(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, or None."""
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            return "it is quantised"
        return super().uncovered(module)


def install_forward(original: Function) -> Function:
    """Make the method that replaces ``TensorParallelLayer.install_forward``."""

    @functools.wraps(original)
    def install(self: Any, module: Any, mesh: Any) -> Any:
        returned = original(self, module, mesh)
        if not hasattr(module, "in_features") or "forward" not in vars(module):
            return returned
        inner, installed = module.forward, _installed(self, mesh)
        IN_FORCE.add(module, installed)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if IN_FORCE.framework is None or torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            return _run(IN_FORCE.framework, module, installed, inner, args, kwargs)

        forward.ascend_parallel = installed  # type: ignore[attr-defined]
        module.forward = forward
        return returned

    return install


def _installed(style: Any, mesh: Any) -> Installed:
    """Return what `style` installs: exactly one of the two plain styles, with the layouts that they have by default."""
    kind, reason = type(style), None
    name = kind.__name__
    if kind is not getattr(sys.modules[kind.__module__], name, None) or name not in KINDS:
        return InstalledByPlan(in_force=IN_FORCE, kind=None, mesh=mesh, reason=f"its style {name} is left as it is")
    layouts = (Replicate(), Shard(-1)) if KINDS[name] == "column" else (Shard(-1), Replicate())
    if (style.input_layouts, style.output_layouts) != layouts or not style.use_local_output:
        reason = f"its style makes {style.output_layouts} of {style.input_layouts} in its forward"
    return InstalledByPlan(in_force=IN_FORCE, kind=KINDS[name], mesh=mesh, reason=reason)


def _run(
    framework: InstalledLayers, module: Any, installed: Installed, inner: Function, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    reason = installed.uncovered(module) or installed.sharded_twice(module)
    x = args[0] if len(args) == 1 and not kwargs else None
    if reason is None and (not isinstance(x, torch.Tensor) or isinstance(x, DTensor)):
        reason = "it is called with something else than one plain tensor"
    if reason is not None or not isinstance(x, torch.Tensor):
        framework.log_uncovered(module, reason or "")
        return inner(*args, **kwargs)
    call = LinearCall(
        layer=module,
        kind=installed.kind or "",
        x=x,
        weight=module.weight.to_local(),
        bias=None if module.bias is None else module.bias.to_local(),
        parameter=module.weight,
        original=inner,
    )
    return inner(x) if too_few_rows(call) else run_linear(framework, call)
