"""The forward that is installed on a linear layer of a style.

torch's hooks make the input a DTensor before it, and redistribute the output after it. The forward takes and gives
DTensors, and runs torch's own where it does not cover the layer or the call, and after a revert.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.patches.base import Function, full_name
from ascend_parallel.patches.compiled import Compiled, in_whole_graph, outside_graphs, skip_frame
from ascend_parallel.patches.dtensor_linear import (
    INSTALLED,
    Installation,
    InstalledLayers,
    compiled_note,
    framework_of_call,
    installed_on,
    positive,
    replicated,
)
from ascend_parallel.patches.linear_call import (
    LinearCall,
    begin_call,
    column_input,
    layer_around,
    row_output,
    run_linear,
)
from ascend_parallel.patches.torch_native.shared import SharedGather, shared_gather

# The attribute of a row layer's partial result that torch is to sum.
LEFT = "_ascend_parallel_left"
# Nothing to overlap: the layer itself does not communicate.
GATHERED = "its input was gathered before it, for all who read it"


@dataclass(frozen=True, kw_only=True)
class InstallationByStyle(Installation):
    """What a style installed on a module.

    output
        The layout that a row layer's style gives its output.
    """

    output: Any = None

    def left_alone(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, or None."""
        if self.mesh.ndim > 1:
            return f"its style has a mesh of {self.mesh.ndim} dimensions"
        if _simulated():
            return "torch's LocalTensorMode simulates its ranks in one process"
        return super().left_alone(module)

    def uncovered_call(self, x: Any, own_input: bool) -> str | None:
        """Return the reason why a call with the input x runs torch's own forward, or None.

        own_input: whether a column layer's hook has made x of a plain tensor, so that no other layer reads it.
        """
        if not isinstance(x, DTensor) or x.device_mesh != self.mesh:
            return "it is called with something else than one DTensor on the mesh of its style"
        (placement,) = positive(x.placements, x.ndim)
        if self.kind == "row":
            if placement != Shard(x.ndim - 1):
                return f"its input is placed as {placement}"
            scatters = self.output != Replicate()
            return f"it scatters {self.output}" if scatters and not self._sequence(self.output, x) else None
        if placement == Replicate():
            framework = self.active_patch.framework
            every = framework is not None and framework.settings.arithmetic.forms_every_product
            return None if every or own_input else GATHERED
        return None if self._sequence(placement, x) else f"its input is placed as {placement}"

    def _sequence(self, placement: Any, x: torch.Tensor) -> bool:
        """Tell whether a placement cuts the rows of x, in equal parts."""
        dim = sequence_dim(placement, x.ndim)
        return dim is not None and x.shape[dim] % self.group.size() == 0


def _simulated() -> bool:
    """Tell whether torch computes all ranks' parts in this process, where there is nothing to communicate."""
    mode = getattr(sys.modules.get("torch.distributed._local_tensor"), "local_tensor_mode", None)
    return mode is not None and mode() is not None


def sequence_dim(placement: Any, ndim: int) -> int | None:
    """Return the dimension of the rows that `placement` cuts, 0 or 1 of three; None: it cuts no rows."""
    if type(placement) is not Shard:
        return None
    dim = placement.dim % ndim
    return dim if dim == 0 < ndim - 1 or (dim == 1 and ndim == 3) else None


class _OfModule:
    """Answers for a forward that is the same function on all modules, by what a style installed on the module."""

    def uncovered(self, module: Any) -> str | None:
        """Ask `Installation.uncovered`."""
        return installed_on(module).uncovered(module)

    def compiled_away(self, module: Any, how: Compiled) -> bool:
        """Ask `Installation.compiled_away`."""
        return installed_on(module).compiled_away(module, how)


class InstalledForward:
    """What the forward of a module holds, which is its method; a deep copy of the module gets its own.

    torch.compile takes another object for other code, and would compile each layer of a model anew; a method is known
    by its function.

    module, own
        The module, and a forward that had been put on it before; None: its class's, whichever class it has when called.
    own_input
        Whether the hook before the next call has made the input of a plain tensor. A mark on the input would be lost
        where a backward hook, maybe on this rank alone, puts a view in its place.
    """

    def __init__(self, module: Any, own: Function | None, installed: InstallationByStyle) -> None:
        """Run `own` where `installed` does not cover a call."""
        self.module, self.own, self.installed = module, own, installed
        self._note = compiled_note(installed.active_patch, module)
        self.own_input = False

    def __deepcopy__(self, memo: dict[int, Any]) -> InstalledForward:
        """Return the forward of the module's copy."""
        return InstalledForward(deepcopy(self.module, memo), deepcopy(self.own, memo), self.installed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or what its module would run without this forward."""
        module, installed = self.module, self.installed
        inner = self.own or type(module).forward.__get__(module)
        framework, own_input = framework_of_call(installed.active_patch, module, self._note), self.own_input
        self.own_input = False
        if framework is None:
            return inner(*args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs else None
        gather = shared_gather(x)
        if gather is not None:
            x = gather.gathered() if gather.changed else gather.x
        reason = (
            installed.left_alone(module) or installed.sharded_twice(module) or installed.uncovered_call(x, own_input)
        )
        if reason is None:
            return _run(framework, module, installed, inner, x, gather)
        if reason != GATHERED:
            framework.log_uncovered(module, reason)
        y = inner(*args, **kwargs)
        if reason != GATHERED and isinstance(y, DTensor):
            setattr(y, LEFT, True)
        return y


vars(InstalledForward.forward)["ascend_parallel"] = _OfModule()  # coverage asks it


class InstalledCall:
    """The call of a module with its hooks, which make DTensors of tensors: torch.compile breaks its graph before it.

    It stands as an attribute of the module where torch looks for the method `_call_impl`, and goes with deep copies as
    `InstalledForward` does.
    """

    def __init__(self, module: Any) -> None:
        """Stand for the call of `module`."""
        self.module = module
        self._uncompiled = outside_graphs(self._run)
        skip_frame(InstalledCall.call)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstalledCall:
        """Return the call of the module's copy."""
        return InstalledCall(deepcopy(self.module, memo))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module)._call_impl(self.module, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, between two graphs or in a whole one."""
        off = vars(self.module)[INSTALLED].active_patch.framework is None
        if off or (torch.compiler.is_compiling() and in_whole_graph()):
            return self._run(*args, **kwargs)
        return self._uncompiled(*args, **kwargs)


def install(module: Any, installed: InstallationByStyle) -> None:
    """Put the forward on `module`, over its own."""
    installed.active_patch.add(module, installed)
    module.forward = InstalledForward(module, vars(module).get("forward"), installed).forward
    if installed.between_graphs:
        vars(module)["_call_impl"] = InstalledCall(module).call


def installed_by_style(module: Any) -> InstallationByStyle | None:
    """Return the installation of a style on a module, whichever forward the module has now, or None."""
    found = vars(module).get(INSTALLED)
    return found if isinstance(found, InstallationByStyle) else None


def entered_column(module: Any, x: DTensor) -> DTensor | None:
    """Return the input of a column layer, whole on every rank, for a forward that is not the layer's; None: torch does.

    Its gradient is summed over the ranks. The collectives are those of the layer.
    """
    (placement,) = positive(x.placements, x.ndim)
    dim = sequence_dim(placement, x.ndim)
    local = DTensor.to_local(x)
    layer = _overlapped_layer(module, "column", local, dim, x)
    if layer is None:
        return None
    return replicated(column_input(local, module.weight.to_local(), layer, dim), x.device_mesh)


def summed_row(module: Any, y: DTensor) -> DTensor | None:
    """Return the sum over ranks of what another forward than the row layer's gives; None: torch has to sum."""
    installed = installed_by_style(module)
    assert installed is not None
    (output,) = positive(installed.output, y.ndim) if isinstance(installed.output, tuple) else (installed.output,)
    dim = sequence_dim(output, y.ndim)
    if output != Replicate() and (dim is None or y.shape[dim] % installed.group.size()):
        return None
    weight, product = module.weight.to_local(), y.to_local(grad_placements=[Replicate()])
    x = product.new_empty(1).expand(*product.shape[:-1], weight.shape[1])  # its shape counts
    if product.requires_grad:
        x = x.requires_grad_()
    layer = _overlapped_layer(module, "row", x, dim, y)
    if layer is None:
        return None
    return DTensor.from_local(row_output(product, x, weight, layer, dim), y.device_mesh, [output], run_check=False)


def _overlapped_layer(
    module: Any, kind: str, x: torch.Tensor, dim: int | None, given: DTensor
) -> ParallelLinear | None:
    """Return the layer whose collectives run around another forward; None: its calls run torch's own collectives.

    given: what the layer or that forward has made, which the gradient goes back through.
    """
    installed = installed_by_style(module)
    assert installed is not None and installed.active_patch.framework is not None
    framework, weight = installed.active_patch.framework, module.weight.to_local()
    call = LinearCall(
        layer=module,
        kind=kind,
        x=x,
        weight=weight,
        bias=None,
        parameter=module.weight,
        original=module.forward,
        sequence_dim=dim,
    )
    if not begin_call(framework, call, given):
        return None
    framework.log_replaced(module, f"its forward is {full_name(module.forward)}, on top of the layer's or in its place")
    return layer_around(framework, call)


def _run(
    framework: InstalledLayers,
    module: Any,
    installed: InstallationByStyle,
    inner: Function,
    x: Any,
    gather: SharedGather | None,
) -> Any:
    """Return the output as a DTensor in the layout of the style; `gather`: that x shares with other readers."""
    mesh, column = installed.mesh, installed.kind == "column"
    (taken,) = positive(x.placements, x.ndim)
    rows = taken if column else installed.output
    dim = sequence_dim(rows, x.ndim)
    given = Shard(x.ndim - 1) if column else Replicate() if dim is None else Shard(dim)

    def original(x_local: torch.Tensor) -> torch.Tensor:
        given_to_torch = x if x_local is call.x else DTensor.from_local(x_local, mesh, [taken], run_check=False)
        if column:
            given_to_torch = given_to_torch.redistribute(placements=[Replicate()])
        y: torch.Tensor = inner(given_to_torch).redistribute(placements=[given]).to_local()
        return y

    bias = module.bias
    if bias is not None:  # the bias of a row layer is added to this rank's rows
        summed_by_torch = not column and dim is not None and not framework.settings.arithmetic.sums_shared_rows
        bias = bias.to_local(grad_placements=[Partial()] if summed_by_torch else None)
    call = LinearCall(
        layer=module,
        kind=installed.kind or "",
        x=DTensor.to_local(x),
        weight=module.weight.to_local(),
        bias=bias,
        parameter=module.weight,
        original=original,
        sequence_dim=dim,
        x_dtensor=x,
        **installed.own_matmul(module, inner, beside_others=gather is not None and gather.classes),
    )
    if column and gather is not None:
        y = gather.run(call)
    else:
        y = run_linear(framework, call) if begin_call(framework, call) else original(call.x)
    return DTensor.from_local(y, mesh, [given], run_check=False)
