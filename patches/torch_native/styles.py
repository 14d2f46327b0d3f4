"""The patched methods of torch's styles.

Written against torch 2.7 to 2.15, torch/distributed/tensor/parallel/style.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.compiled import runs_compiled
from ascend_parallel.patches.dtensor_linear import COMPILED, ActivePatch, InstalledLayers, calls_linear, is_linear
from ascend_parallel.patches.norms import install_norm, run_norm
from ascend_parallel.patches.torch_native.layers import (
    LEFT,
    InstallationByStyle,
    InstalledForward,
    entered_column,
    install,
    installed_by_style,
    sequence_dim,
    summed_row,
)
from ascend_parallel.patches.torch_native.shared import SharedGather, share, shared_gather
from ascend_parallel_autoload.frameworks import TORCH

ACTIVE_PATCH = ActivePatch()
# The attribute of a PrepareModuleInput that holds its module that is being called.
CALLED = "_ascend_parallel_called"


def followed_by(install_on: Callable[[Any, Any, Any], None], original: Function) -> Function:
    """Make the method that replaces ``_apply`` of a style: ``install_on(style, module, mesh)`` follows the original."""

    @functools.wraps(original)
    def apply(self: Any, module: Any, device_mesh: Any) -> Any:
        returned = original(self, module, device_mesh)
        install_on(self, module, device_mesh)
        return returned

    return apply


def install_column(style: Any, module: Any, mesh: Any) -> None:
    """Put the overlapped forward on a layer of ColwiseParallel."""
    if isinstance(module, torch.nn.Linear):
        reason = _same_style(style, "ColwiseParallel") or _computes_otherwise(module)
        if style.desired_input_layouts != (Replicate(),):
            reason = f"its style wants the input as {style.desired_input_layouts}"
        install(module, InstallationByStyle(active_patch=ACTIVE_PATCH, kind="column", mesh=mesh, reason=reason))


def install_row(style: Any, module: Any, mesh: Any) -> None:
    """Put the overlapped forward on a layer of RowwiseParallel."""
    if isinstance(module, torch.nn.Linear):
        reason = _same_style(style, "RowwiseParallel") or _computes_otherwise(module)
        (output,) = style.output_layouts
        if output != Replicate() and type(output) is not Shard:
            reason = f"its style wants the output as {output}"
        install(
            module, InstallationByStyle(active_patch=ACTIVE_PATCH, kind="row", mesh=mesh, reason=reason, output=output)
        )


def install_sequence(style: Any, module: Any, mesh: Any) -> None:
    """Put the forward in blocks of rows on a norm of SequenceParallel."""
    if any(True for _ in module.parameters()):
        install_norm(module, functools.partial(_norm, mesh), ACTIVE_PATCH.sums_shared_rows)


def _norm(mesh: Any, module: Any, own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module of SequenceParallel: with COC_DETERMINISTIC=tp in blocks of rows."""
    framework = ACTIVE_PATCH.framework
    assert framework is not None
    if torch.compiler.is_compiling():
        framework.log_uncovered(module, COMPILED)
    (x, *more), parameters = args, dict(module.named_parameters())
    dim = sequence_dim(x.placements[0], x.ndim) if isinstance(x, DTensor) and mesh.ndim == 1 else None
    if dim is None or more or kwargs or parameters.keys() != module._parameters.keys():
        framework.log_uncovered(module, "it is more than a norm of rows that ranks share, in one DTensor")
    local = {name: each.to_local(grad_placements=[Replicate()]) for name, each in parameters.items()}
    y = run_norm(module, own, x.to_local(), local, RowBlocks(group=mesh.get_group(), dim=dim or 0))
    return DTensor.from_local(y, mesh, x.placements, run_check=False)


def prepare_column_input(original: Function) -> Function:
    """Make the function that replaces ``ColwiseParallel._prepare_input_fn``.

    torch redistributes the input to Replicate() here. For a layer that is covered the input becomes a DTensor of its
    own layout, and the layer gathers. A forward on top of the layer's, maybe on this rank alone, reads what torch gives
    it: then the collectives that the layer has run around it.
    """

    @functools.wraps(original)
    def prepare(input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        installed, x = installed_by_style(mod), inputs[0]
        own = functools.partial(original, input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        if installed is None or installed.left_alone(mod) is not None or len(inputs) > 1:
            return own()
        if shared_gather(x) is not None:
            return x
        if not isinstance(x, DTensor):
            (layout,) = input_layouts
            if layout != Replicate() and sequence_dim(layout, x.ndim) is None:
                return own()
            x, own_input = DTensor.from_local(x, device_mesh, input_layouts, run_check=False), True
        elif (
            input_layouts == desired_input_layouts
            or x.device_mesh != device_mesh
            or sequence_dim(x.placements[0], x.ndim) is None
        ):
            return own()
        else:
            own_input = False
        forward = getattr(vars(mod).get("forward"), "__self__", None)
        if isinstance(forward, InstalledForward):
            forward.own_input = own_input
            return x
        uncovered = installed.sharded_twice(mod) or installed.uncovered_call(x, own_input)
        around = None if uncovered else entered_column(mod, x)
        return own() if around is None else around

    return prepare


def prepare_row_output(original: Function) -> Function:
    """Make the function that replaces ``RowwiseParallel._prepare_output_fn``.

    torch sums over ranks here. A covered layer has done so, unless a forward was put in its place, maybe on this rank
    alone: then the collectives that the layer would have run sum its result.
    """

    @functools.wraps(original)
    def prepare(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        installed = installed_by_style(mod)
        partial = isinstance(outputs, DTensor) and outputs.placements == (Partial(),) and not hasattr(outputs, LEFT)
        if installed is not None and partial and not (installed.left_alone(mod) or installed.sharded_twice(mod)):
            summed = summed_row(mod, outputs)
            outputs = outputs if summed is None else summed
        return original(output_layouts, use_local_output, mod, outputs, device_mesh)

    return prepare


def module_input_apply(original: Function) -> Function:
    """Make the method that replaces ``PrepareModuleInput._apply``.

    A style may belong to several modules, and its hook does not tell which one is called: a hook before it does.
    """

    @functools.wraps(original)
    def apply(self: Any, module: Any, device_mesh: Any) -> Any:
        module.register_forward_pre_hook(lambda called, _: vars(self).update({CALLED: ref(called)}))
        return original(self, module, device_mesh)

    return apply


def prepare_module_input(original: Function) -> Function:
    """Make the method that replaces ``PrepareModuleInput._prepare_input_arg``.

    torch gathers the rows here, for all layers of the module. If every column layer of the module is covered, the first
    of them gathers under its matmul, for the others too.
    """

    @functools.wraps(original)
    def prepare(self: Any, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        framework = ACTIVE_PATCH.framework
        gathers = isinstance(input, torch.Tensor) and input_layout not in (None, desired_layout)
        kept = desired_layout == Replicate() and not self.use_local_output
        if kept and shared_gather(input) is not None and input.device_mesh == mesh:
            return input  # a module around this one shares it
        if framework is None or not (gathers and kept):
            return original(self, input, mesh, input_layout, desired_layout)
        gather = _shared(framework, self, input, mesh, input_layout)
        if gather is None:
            return original(self, input, mesh, input_layout, desired_layout)
        module = vars(self)[CALLED]()
        # Hooks get the whole gradient of the input, and compiled functions take torch's DTensor.
        reads = _has_backward_hooks(module) or any(map(runs_compiled, module.modules()))
        return gather.gathered() if reads else share(gather)

    return prepare


def _shared(framework: InstalledLayers, style: Any, x: torch.Tensor, mesh: Any, layout: Any) -> SharedGather | None:
    """Return the gather of x by the column layers of the module that is being called; None: torch gathers."""
    if ACTIVE_PATCH.between_graphs:  # a graph may be what reads x
        return None
    if framework.settings.arithmetic.forbids("layers would add their gradients before the sum"):
        return None
    if torch.compiler.is_compiling() or framework.verifier is not None or framework.settings.fused or mesh.ndim > 1:
        return None
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            return None
        (layout,) = x.placements
    dim = sequence_dim(layout, x.ndim)
    if dim is None or (isinstance(x, DTensor) and x.shape[dim] % mesh.size()):
        return None
    module = vars(style)[CALLED]() if CALLED in vars(style) else None
    columns = [] if module is None else _columns_of(module)
    if not columns or any(found.left_alone(each) or found.sharded_twice(each) for each, found in columns):
        return None
    whole_x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (layout,), run_check=False)
    classes = any(not is_linear(type(each)) for each, _ in columns)
    return SharedGather(whole_x, framework, columns[0][0], dim, classes)


def _has_backward_hooks(module: Any) -> bool:
    """Tell whether hooks get the whole gradient of the module's input."""
    everywhere: Any = torch.nn.modules.module
    hooks = (module._backward_hooks, module._backward_pre_hooks)
    return any((*hooks, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks))


def _columns_of(module: Any) -> list[tuple[Any, InstallationByStyle]]:
    """Return the column layers of a module, each with what a style installed on it."""
    installed = ((each, installed_by_style(each)) for each in module.modules())
    return [(each, found) for each, found in installed if found is not None and found.kind == "column"]


def _computes_otherwise(module: Any) -> str | None:
    return None if calls_linear(type(module)) else "its class does not call torch.nn.Linear's forward"


def _same_style(style: Any, name: str) -> str | None:
    kind = type(style)
    if (kind.__module__, kind.__name__) != (TORCH.module, name):
        return f"its style {kind.__name__} is a class of its own"
    return None
