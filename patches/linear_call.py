"""Run a call of a tensor-parallel linear layer of a framework that keeps gradients in `.grad`, as torch does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.unfinished import whole
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.layer import ForwardWrapper, ParallelLinear, run_directly
from ascend_parallel.overlap.linear import run_column, run_module_row, run_row
from ascend_parallel.overlap.own_matmul import enter_column, leave_row
from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.overlap.weight_gradient import Begin, WeightGradient
from ascend_parallel.patches.batch_first import BatchFirstWeightGradient, swapped
from ascend_parallel.patches.check import CheckedCall, CheckedLinear, linear_operands
from ascend_parallel.patches.framework import Framework

# Rows of a call without gradients below which the original runs: one token of a generation has nothing to cut.
LEAST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """A call of a layer.

    layer, kind
        The module, and "column" or "row".
    x
        [..., K] for a column layer, [..., K / R] for a row layer.
    weight, bias
        What this rank multiplies with, [N / R, K] or [N, K / R], and adds, [N / R] or [N]; None: no bias.
    parameter
        The module's own weight.
    original
        The framework's own forward, which takes x alone.
    sequence_dim
        With sequence parallelism the dimension of x that ranks share, 0 or 1; None: without.
    added
        Whether the framework multiplies and then adds the bias; otherwise it calls torch.nn.functional.linear.
    finish
        What the framework does with the output of the layer, such as a gather of its features; `original` does it too.
    x_dtensor
        The DTensor whose local tensor x is; None: x is a tensor of its own.
    own_matmul
        What the program has put in place of the matmul, maybe on this rank alone: takes the whole local input, and
        returns the product with the bias, before a row layer's sum. None: nothing.
    module_weight
        Of a row layer that multiplies with a kernel of its own, which adds this rank's part of the bias, and has no
        backward. Of `weight` the shape, dtype and device count then. None: the layer multiplies with `weight`.
    """

    layer: Any
    kind: str
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    parameter: torch.Tensor
    original: Callable[[torch.Tensor], torch.Tensor]
    added: bool = False
    sequence_dim: int | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    x_dtensor: DTensor | None = None
    own_matmul: Callable[[torch.Tensor], torch.Tensor] | None = None
    module_weight: ModuleWeight | None = None

    @property
    def dtensors(self) -> tuple[DTensor | None, DTensor | None]:
        """The DTensors whose local tensors x and the weight are."""
        return self.x_dtensor, self.parameter if isinstance(self.parameter, DTensor) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call that the tuner distinguishes."""
        return {} if self.sequence_dim is None else {"sequence_parallel": True}


def run_linear(framework: Framework, call: LinearCall) -> torch.Tensor:
    """Return the layer's output, [..., N / R] or [..., N]; compare it with the original's where COC_VERIFY asks."""
    if (verifier := framework.verifier) is not None and call.module_weight is None:
        y: torch.Tensor = framework.timed(call.layer, call.x, lambda: verifier.run(_checked(framework, call)))
    elif framework.region_choice.undecided:
        y = framework.timed(call.layer, call.x, lambda: _run(framework, call))
    else:
        y = _run(framework, call)
    return y


def too_few_rows(framework: Framework, call: LinearCall) -> bool:
    """Tell whether the original should run because the call has few rows, and no backward follows."""
    if framework.settings.at_every_degree:
        return False
    graded = torch.is_grad_enabled() and (call.x.requires_grad or call.weight.requires_grad)
    return not graded and call.x.shape[:-1].numel() < LEAST_ROWS


def _checked(framework: Framework, call: LinearCall) -> CheckedCall:
    """Return the call beside the framework's own forward."""
    group = framework.group_of(call.layer)
    linear = CheckedLinear(
        layer=call.layer,
        kind=call.kind,
        x=call.x,
        weight=call.weight,
        group=group,
        settings=lambda: framework.settings_for(call.layer, call.kind, call.x, call.weight, **call.options),
        sequence_parallel=call.sequence_dim is not None,
    )
    return linear.beside(
        functools.partial(_by_framework, call),
        functools.partial(_run, framework, call),
        backward_operands=functools.partial(_backward_operands, call, group.rank()),
    )


def _by_framework(call: LinearCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of the framework's own forward on x and the local weight."""
    with _weight_in_place(call, weight):
        return call.original(x)


@contextmanager
def _weight_in_place(call: LinearCall, weight: torch.Tensor) -> Iterator[None]:
    """Let the layer have another local weight inside this context."""
    parameter = call.parameter
    if isinstance(parameter, DTensor):
        weight = DTensor.from_local(weight, parameter.device_mesh, parameter.placements, run_check=False)
    attributes: dict[str, Any] = call.layer._parameters
    if "weight" not in attributes:  # torch.nn.utils.weight_norm makes it a plain attribute
        attributes = vars(call.layer)
    own, attributes["weight"] = attributes["weight"], weight
    try:
        yield
    finally:
        attributes["weight"] = own


def _backward_operands(
    call: LinearCall, rank: int, kept: torch.Tensor | None, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the operands that the backward of `call` has, from what it starts with."""
    if call.sequence_dim != 1:
        return linear_operands(call.x.shape, rank, kept, weight)
    operands = linear_operands(call.x.transpose(0, 1).shape, rank, kept, weight)
    return {name: x.transpose(0, 1) if name == "input" else x for name, x in operands.items()}


def _run(framework: Framework, call: LinearCall, begin: Begin | None = None) -> torch.Tensor:
    """Run the call; a check observes the start of its backward."""
    if call.own_matmul is not None:
        return _around(framework, call, call.own_matmul)
    layer = layer_of(framework, call, begin)
    if layer is None:
        return call.original(call.x)
    if call.module_weight is not None:
        return run_module_row(call.x, call.module_weight, layer)
    x = swapped(call.x) if call.sequence_dim == 1 else call.x
    if call.kind == "column":
        y = run_column(x, call.weight, call.bias, layer)
    else:
        y, bias = run_row(x, call.weight, layer), call.bias
        if bias is not None and call.sequence_dim is not None and layer.settings.at_every_degree:
            bias = RowBlocks(group=layer.group).expand(bias, y)
        y = y if bias is None else y + bias
    y = swapped(y) if call.sequence_dim == 1 else y
    return y if call.finish is None else call.finish(y)


def layer_of(framework: Framework, call: LinearCall, begin: Begin | None = None) -> ParallelLinear | None:
    """Return the layer that runs the call, or its collectives around a matmul of the program; None: the original runs.

    begin: observes the start of the call's backward.
    """
    group, settings = framework.prepare(call.layer, call.kind, call.x, call.weight, **call.options)
    if not settings.enabled:
        return None
    shared, batch_first = call.sequence_dim is not None, call.sequence_dim == 1 and call.x.shape[0] > 1
    direct = call.kind == "row" or call.added or shared or settings.at_every_degree or call.own_matmul is not None
    x_dtensor, weight_dtensor = call.dtensors
    return ParallelLinear(
        group=group,
        settings=settings,
        sequence_parallel=shared,
        weight_gradient=BatchFirstWeightGradient(call.x.shape[0], begin) if batch_first else WeightGradient(begin),
        before_communicating=framework.confirm(group),
        forward_wrapper=run_directly if direct else torch_linear(call),
        leaves_rows=framework.leaves_rows,
        dtensors=(None if call.sequence_dim == 1 else x_dtensor, weight_dtensor),
    )


def _around(framework: Framework, call: LinearCall, own_matmul: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run the collectives of the call around the program's own matmul."""
    layer = layer_of(framework, call)
    if layer is None:
        return call.original(call.x)
    checked = framework.verifier is not None  # a check looks for the gradients of the call's operands
    own_weight = _weight_in_place(call, call.weight) if checked else nullcontext()
    if call.kind == "column":
        x = entered(call.x, call.weight, layer, call.sequence_dim)
        with own_weight:
            y = own_matmul(x)
    else:
        with torch._C.DisableTorchFunction():
            x = whole(call.x)
        with own_weight:
            y = own_matmul(x)
        y = left(y, x, call.weight, layer, call.sequence_dim)
    return y if call.finish is None else call.finish(y)


def entered(x: torch.Tensor, weight: torch.Tensor, layer: ParallelLinear, sequence_dim: int | None) -> torch.Tensor:
    """Return the whole input of a column layer's matmul, unseen by modes of the program; as in `LinearCall`."""
    with torch._C.DisableTorchFunction():
        if sequence_dim != 1:
            return enter_column(x, weight, layer)
        return swapped(enter_column(swapped(x), weight, layer))


def left(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, layer: ParallelLinear, sequence_dim: int | None
) -> torch.Tensor:
    """Return the sum over ranks of the product y of x and the weight, unseen by modes of the program."""
    with torch._C.DisableTorchFunction():
        if sequence_dim != 1:
            return leave_row(y, x, weight, layer)
        return swapped(leave_row(swapped(y), x.transpose(0, 1), weight, layer))


def torch_linear(call: LinearCall) -> ForwardWrapper:
    """Return what runs the forward of a column layer, which communicates nothing, with the bits of torch.nn.Linear."""
    bias = None if call.bias is None else cast_by_autocast(call.bias.detach())
    operands = cast_by_autocast(call.x.detach()), cast_by_autocast(call.weight.detach()), bias
    return lambda _: (compute(MATMUL, "matmul", linear, *operands), None)
