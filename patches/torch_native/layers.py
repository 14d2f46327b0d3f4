"""The forward that is installed on a linear layer of a style.

torch's hooks make the input a DTensor before it, and redistribute the output after it. The forward takes and gives
DTensors, and runs torch's own where it does not cover the layer or the call, and after a revert.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.dtensor_linear import Installed, InstalledLayers, positive
from ascend_parallel.patches.linear_call import LinearCall, run_linear, too_few_rows
from ascend_parallel.patches.torch_native.shared import SharedGather, shared_gather

# The attribute of an input that a column layer's hook has made of a plain tensor: no other layer reads the DTensor.
OWN = "_ascend_parallel_own"
# Nothing to overlap: the layer itself does not communicate.
GATHERED = "its input was gathered before it, for all who read it"


@dataclass(frozen=True, kw_only=True)
class InstalledByStyle(Installed):
    """What a style installed on a module.

    output
        The layout that a row layer's style gives its output.
    """

    output: Any = None

    def uncovered(self, module: Any) -> str | None:
        """Return the reason why the module's own forward must run, or None."""
        if self.mesh.ndim > 1:
            return f"its style has a mesh of {self.mesh.ndim} dimensions"
        return super().uncovered(module)

    def uncovered_call(self, x: Any) -> str | None:
        """Return the reason why a call with the input x runs torch's own forward, or None."""
        if not isinstance(x, DTensor) or x.device_mesh != self.mesh:
            return "it is called with something else than one DTensor on the mesh of its style"
        (placement,) = positive(x.placements, x.ndim)
        if self.kind == "row":
            if placement != Shard(x.ndim - 1):
                return f"its input is placed as {placement}"
            scatters = self.output != Replicate()
            return f"it scatters {self.output}" if scatters and not self._sequence(self.output, x) else None
        if placement == Replicate():
            framework = self.in_force.framework
            in_tree = framework is not None and framework.settings.at_every_degree
            return None if in_tree or hasattr(x, OWN) else GATHERED
        return None if self._sequence(placement, x) else f"its input is placed as {placement}"

    def _sequence(self, placement: Any, x: torch.Tensor) -> bool:
        """Tell whether a placement cuts the rows of x, in equal parts."""
        dim = sequence_dim(placement, x.ndim)
        return dim is not None and x.shape[dim] % self.group.size() == 0


def sequence_dim(placement: Any, ndim: int) -> int | None:
    """Return the dimension of the rows that `placement` cuts, 0 or 1 of three; None: it cuts no rows."""
    if type(placement) is not Shard:
        return None
    dim = placement.dim % ndim
    return dim if dim == 0 < ndim - 1 or (dim == 1 and ndim == 3) else None


class InstalledForward:
    """The forward of a module; a deep copy of the module gets its own, with the copy's weights.

    module, own
        The module, and a forward that had been put on it before; None: its class's, whichever class it has when called.
    """

    def __init__(self, module: Any, own: Function | None, installed: InstalledByStyle) -> None:
        """Run `own` where `installed` does not cover a call."""
        self.module, self.own, self.ascend_parallel = module, own, installed

    def __deepcopy__(self, memo: dict[int, Any]) -> InstalledForward:
        """Return the forward of the module's copy."""
        return InstalledForward(deepcopy(self.module, memo), deepcopy(self.own, memo), self.ascend_parallel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or what its module would run without this forward."""
        module, installed = self.module, self.ascend_parallel
        inner = self.own or type(module).forward.__get__(module)
        framework = installed.in_force.framework
        if framework is None or torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs else None
        gather = shared_gather(x)
        if gather is not None:
            x = gather.whole() if gather.changed else gather.x
        reason = installed.uncovered(module) or installed.sharded_twice(module) or installed.uncovered_call(x)
        if reason is None:
            return _run(framework, module, installed, inner, x, gather)
        if reason != GATHERED:
            framework.log_uncovered(module, reason)
        return inner(*args, **kwargs)


def install(module: Any, installed: InstalledByStyle) -> None:
    """Put the forward on `module`, over its own."""
    installed.in_force.add(module, installed)
    module.forward = InstalledForward(module, vars(module).get("forward"), installed)


def _run(
    framework: InstalledLayers,
    module: Any,
    installed: InstalledByStyle,
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
        partial = [Partial()] if not column and dim is not None and not framework.settings.at_every_degree else None
        bias = bias.to_local(grad_placements=partial)
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
    )
    if column and gather is not None:
        y = gather.run(framework, call)
    else:
        y = original(call.x) if too_few_rows(framework, call) else run_linear(framework, call)
    return DTensor.from_local(y, mesh, [given], run_check=False)
