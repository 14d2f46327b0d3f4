"""The patched methods of torch's styles.

Written against torch 2.7 to 2.15, torch/distributed/tensor/parallel/style.py.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.dtensor_linear import InForce, InstalledLayers
from ascend_parallel.patches.norms import install_norm, run_norm
from ascend_parallel.patches.torch_native.layers import OWN, InstalledByStyle, InstalledForward, install, sequence_dim
from ascend_parallel.patches.torch_native.shared import share, shared_gather

IN_FORCE = InForce()
# The attribute of a PrepareModuleInput that holds its module that is being called.
CALLED = "_ascend_parallel_called"
# The attribute of a function that torch.compile has made.
COMPILED = "_torchdynamo_orig_callable"


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


def sequence_apply(original: Function) -> Function:
    """Make the method that replaces ``SequenceParallel._apply``."""

    @functools.wraps(original)
    def apply(self: Any, module: Any, device_mesh: Any) -> Any:
        returned = original(self, module, device_mesh)
        if any(True for _ in module.parameters()):
            install_norm(module, functools.partial(_norm, device_mesh))
        return returned

    return apply


def _norm(mesh: Any, module: Any, own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module of SequenceParallel: with COC_DETERMINISTIC=tp in blocks of rows."""
    framework = IN_FORCE.framework
    if framework is None or not framework.settings.at_every_degree:
        return own(*args, **kwargs)
    if torch.compiler.is_compiling():
        framework.log_uncovered(module, "it is being compiled, and a process group cannot be")
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
    own layout, and the layer gathers.
    """

    @functools.wraps(original)
    def prepare(input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        forward, x = vars(mod).get("forward"), inputs[0]
        ours = isinstance(forward, InstalledForward)  # a forward on top may read what torch gives it
        if not ours or forward.ascend_parallel.uncovered(mod) is not None or len(inputs) > 1:
            return original(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        if shared_gather(x) is not None:
            return x
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
        framework = IN_FORCE.framework
        gathers = isinstance(input, torch.Tensor) and input_layout not in (None, desired_layout)
        kept = desired_layout == Replicate() and not self.use_local_output
        if kept and shared_gather(input) is not None and input.device_mesh == mesh:
            return input  # a module around this one shares it
        if framework is None or not (gathers and kept) or not _shares(framework, self, input, mesh, input_layout):
            return original(self, input, mesh, input_layout, desired_layout)
        x = input if isinstance(input, DTensor) else DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        return share(x)

    return prepare


def _shares(framework: InstalledLayers, style: Any, x: torch.Tensor, mesh: Any, layout: Any) -> bool:
    """Tell whether the column layers of the module that is being called can gather x for each other."""
    if framework.settings.at_every_degree:
        return False
    if torch.compiler.is_compiling() or framework.verifier is not None or framework.settings.fused or mesh.ndim > 1:
        return False
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            return False
        (layout,) = x.placements
    dim = sequence_dim(layout, x.ndim)
    of_all_ranks = isinstance(x, DTensor)
    if dim is None or (of_all_ranks and x.shape[dim] % mesh.size()):
        return False
    module = vars(style)[CALLED]() if CALLED in vars(style) else None
    if module is None or _has_backward_hooks(module) or any(map(_runs_compiled, module.modules())):
        return False
    return _columns_covered(module)


def _runs_compiled(module: Any) -> bool:
    """Tell whether torch.compile made the call, the forward or another method of a module: it takes torch's DTensor."""
    methods = (*vars(module).values(), *vars(type(module)).values())
    return module._compiled_call_impl is not None or any(hasattr(method, COMPILED) for method in methods)


def _has_backward_hooks(module: Any) -> bool:
    """Tell whether hooks get the whole gradient of the module's input."""
    everywhere: Any = torch.nn.modules.module
    hooks = (module._backward_hooks, module._backward_pre_hooks)
    return any((*hooks, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks))


def _columns_covered(module: Any) -> bool:
    """Tell whether a module has column layers, and all of them are covered."""
    forwards = (vars(each).get("forward") for each in module.modules())
    ours = [forward for forward in forwards if isinstance(forward, InstalledForward)]
    columns = [(each.module, each.ascend_parallel) for each in ours if each.ascend_parallel.kind == "column"]
    return bool(columns) and all(
        (found.uncovered(each) or found.sharded_twice(each)) is None for each, found in columns
    )


def _same_style(style: Any, name: str) -> str | None:
    kind = type(style)
    if (kind.__module__, kind.__name__) != ("torch.distributed.tensor.parallel.style", name):
        return f"its style {kind.__name__} is a class of its own"
    return None
