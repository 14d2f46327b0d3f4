"""Run a call of a framework's tensor-parallel linear layer: overlapped, checked beside the original, or timed.

A replaced forward describes its call as a `LinearCall` and hands it to `run_linear`, whichever framework it is of:
`run_linear` says how such a call is decided, run and checked, as a `CoveredCall`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.quantised import QuantisedWeight
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.unfinished import plain_tensor
from ascend_parallel.overlap.choices import cast_by_autocast
from ascend_parallel.overlap.layer import ForwardWrapper, ParallelLinear, run_directly
from ascend_parallel.overlap.layer_shape import ROW
from ascend_parallel.overlap.linear import run_column, run_row
from ascend_parallel.overlap.own_matmul import enter_column, leave_row
from ascend_parallel.overlap.quantised import quantised_row_linear
from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.overlap.weight_gradient import Begin, WeightGradient
from ascend_parallel.patches.batch_first import BatchFirstWeightGradient, swapped
from ascend_parallel.patches.check import CheckedCall, CheckedLinear, linear_operands
from ascend_parallel.patches.covered_call import CoveredCall, Run, run_covered
from ascend_parallel.patches.framework import Framework

# Rows of a call without gradients below which the original runs: one token of a generation has nothing to cut.
LEAST_ROWS = 64


@dataclass(kw_only=True, slots=True)  # not frozen: that takes three times as long to make, and each call makes one
class LinearCall:
    """A call of a layer.

    layer, kind
        The module, and "column" or "row".
    x
        [..., K] for a column layer, [..., K / R] for a row layer.
    weight, bias
        What this rank multiplies with, [N / R, K] or [N, K / R], and adds, [N / R] or [N]; None: no bias. The weight of
        a row layer may be in int8.
    parameter
        The module's own weight.
    original
        The framework's own forward, which takes x alone, and returns what the framework's callers expect.
    sequence_dim
        With sequence parallelism the dimension of x that ranks share, 0 or 1; None: without.
    added
        Whether the framework multiplies and then adds the bias; otherwise it calls torch.nn.functional.linear.
    enter, finish
        What the framework does with x before the layer, such as a scatter of its features, and with the output after
        it, such as a gather, or a bias beside it; `original` does it too. None: nothing.
    x_dtensor
        The DTensor whose local tensor x is; None: x is a tensor of its own.
    own_matmul
        What the program has put in place of the matmul, maybe on this rank alone: takes the whole local input, and
        returns the product with the bias, before a row layer's sum. None: nothing.
    takes_product
        Whether `own_matmul` takes, as a second argument, what a column layer's gather has multiplied, or None.
    reduce_input_grad
        Whether the input gradient of a column layer is summed over the ranks.
    parts
        The features of each part of a fused weight on this rank, as of `column_linear`.
    weight_gradient
        Returns where the weight gradient goes, given what observes the start of the backward; None: to `.grad`.
    beside
        Puts a checked call beside the framework's own forward; None: the forward runs on the module, which gets the
        weight of the check.
    """

    layer: Any
    kind: str
    x: torch.Tensor
    weight: Any
    bias: torch.Tensor | None
    parameter: torch.Tensor
    original: Callable[[torch.Tensor], Any]
    added: bool = False
    sequence_dim: int | None = None
    enter: Callable[[torch.Tensor], torch.Tensor] | None = None
    finish: Callable[[torch.Tensor], Any] | None = None
    x_dtensor: DTensor | None = None
    own_matmul: Callable[..., torch.Tensor] | None = None
    takes_product: bool = False
    reduce_input_grad: bool = True
    parts: tuple[int, ...] = ()
    weight_gradient: Callable[[Begin | None], WeightGradient] | None = None
    beside: Callable[[CheckedLinear, Callable[[Begin | None], Any]], CheckedCall] | None = None

    @property
    def dtensors(self) -> tuple[DTensor | None, DTensor | None]:
        """The DTensors whose local tensors x and the weight are."""
        return self.x_dtensor, self.parameter if isinstance(self.parameter, DTensor) else None


def run_linear(framework: Framework, call: LinearCall) -> Any:
    """Return the layer's output, [..., N / R] or [..., N]; compare it with the original's where COC_VERIFY asks.

    With `finish` the output is what that returns, as what `original` returns is.
    """
    group = framework.group_of(call.layer)
    covered = CoveredCall(
        layer=call.layer,
        group=group,
        device=call.x.device,
        agreeing=None,  # a column layer's forward may run on one rank alone
        decide=functools.partial(
            framework.prepare,
            call.layer,
            call.kind,
            call.x,
            call.weight,
            group,
            sequence_parallel=call.sequence_dim is not None,
            reduce_input_grad=call.reduce_input_grad,
        ),
        ours=functools.partial(_run, framework, call, group),
        theirs=functools.partial(call.original, call.x),
        checked=functools.partial(_checked, framework, call, group),
    )
    if framework.region_choice.undecided:
        return framework.timed(call.layer, call.x, functools.partial(run_covered, framework, covered))
    return run_covered(framework, covered)


def begin_call(framework: Framework, call: LinearCall, given: torch.Tensor | None = None) -> bool:
    """Begin a call, in the way of its step while whole steps are timed; tell whether ours may run it.

    The original runs a call of few rows that no backward follows. Its forward communicates in the same calls as ours:
    each rank begins these as often as the others.

    given: a tensor that the gradient goes back through, whoever runs the call; None: the call's DTensor, or its x.
    """
    if framework.decider.undecided:
        x = given if given is not None else call.x if call.x_dtensor is None else call.x_dtensor
        framework.enter(call.layer, x, communicates=call.kind == ROW or call.sequence_dim is not None)
    if framework.settings.arithmetic.forms_every_product:
        return True
    graded = torch.is_grad_enabled() and (call.x.requires_grad or call.weight.requires_grad)
    return graded or call.x.shape[:-1].numel() >= LEAST_ROWS


def _checked(framework: Framework, call: LinearCall, group: dist.ProcessGroup, known: Known, run: Run) -> CheckedCall:
    """Return the call, which `run` runs, beside the framework's own forward."""
    linear = CheckedLinear(
        layer=call.layer,
        kind=call.kind,
        x=call.x,
        weight=call.parameter if isinstance(call.weight, QuantisedWeight) else call.weight,
        group=group,
        settings=framework.settings,
        known=known,
        sequence_parallel=call.sequence_dim is not None,
        reduces=call.reduce_input_grad,
    )
    if call.beside is not None:
        return call.beside(linear, run)
    return linear.beside(
        functools.partial(_by_framework, call),
        run,
        backward_operands=functools.partial(_backward_operands, call, group.rank()),
        name=framework.name_of(call.layer),
    )


def _by_framework(call: LinearCall, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the output of the framework's own forward on x and the local weight."""
    with _weight_in_place(call, weight):
        y: torch.Tensor = call.original(x)
    return y


@contextmanager
def _weight_in_place(call: LinearCall, weight: torch.Tensor) -> Iterator[None]:
    """Let the layer have another local weight inside this context."""
    parameter = call.parameter
    if isinstance(parameter, DTensor):
        weight = DTensor.from_local(weight, parameter.device_mesh, parameter.placements, run_check=False)
    attributes: dict[str, Any] = call.layer._parameters
    given: Any = weight
    if "weight" in (parametrizations := call.layer._modules.get("parametrizations", {})):  # a property of its class
        attributes, given = parametrizations._modules, _GivenWeight(weight)
    elif "weight" not in attributes:  # torch.nn.utils.weight_norm makes it a plain attribute
        attributes = vars(call.layer)
    own, attributes["weight"] = attributes["weight"], given
    cached = parametrize._cache.pop((id(call.layer), "weight"), None)  # inside `parametrize.cached()`
    try:
        yield
    finally:
        attributes["weight"] = own
        parametrize._cache.pop((id(call.layer), "weight"), None)
        if cached is not None:
            parametrize._cache[id(call.layer), "weight"] = cached


class _GivenWeight(torch.nn.Module):
    """Stands for the parametrisation of a weight, and gives another one."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self) -> torch.Tensor:
        return self._weight


def _backward_operands(
    call: LinearCall, rank: int, kept: torch.Tensor | None, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the operands that the backward of `call` has, from what it starts with."""
    if call.sequence_dim != 1:
        return linear_operands(call.x.shape, rank, kept, weight)
    operands = linear_operands(call.x.transpose(0, 1).shape, rank, kept, weight)
    return {name: x.transpose(0, 1) if name == "input" else x for name, x in operands.items()}


def _run(
    framework: Framework, call: LinearCall, group: dist.ProcessGroup, known: Known, begin: Begin | None = None
) -> Any:
    """Run the call overlapped; a check observes the start of its backward."""
    layer = layer_of(framework, call, group, known, begin)
    x = call.x if call.enter is None else call.enter(call.x)
    if call.own_matmul is not None:
        y = _run_own_matmul(framework, call, x, layer, call.own_matmul)
        return y if call.finish is None else call.finish(y)
    x = swapped(x) if call.sequence_dim == 1 else x
    if isinstance(call.weight, QuantisedWeight):
        y = _run_int8(x, call.weight, layer)
    elif call.kind == "column":
        y = run_column(x, call.weight, call.bias, layer)
    elif call.bias is not None and call.sequence_dim is not None and layer.arithmetic.sums_shared_rows:
        y = run_row(x, call.weight, layer)
        y = y + RowBlocks(group=layer.group).expand(call.bias, y)
    else:
        y = run_row(x, call.weight, layer, call.bias)
    y = swapped(y) if call.sequence_dim == 1 else y
    return y if call.finish is None else call.finish(y)


def layer_around(framework: Framework, call: LinearCall) -> ParallelLinear | None:
    """Return the layer whose collectives run around another forward than the call's; None: the original runs.

    That forward is the program's, and runs between hooks that begin and end the collectives: no function of ours runs
    the call, so it is no `CoveredCall`.
    """
    group, shared = framework.group_of(call.layer), call.sequence_dim is not None
    known = framework.prepare(call.layer, call.kind, call.x, call.weight, group, sequence_parallel=shared)
    return None if known.original else layer_of(framework, call, group, known)


def layer_of(
    framework: Framework, call: LinearCall, group: dist.ProcessGroup, known: Known, begin: Begin | None = None
) -> ParallelLinear:
    """Return the layer that runs the call, or its collectives around a matmul of the program.

    begin: observes the start of the call's backward.
    """
    settings = framework.settings
    shared, batch_first = call.sequence_dim is not None, call.sequence_dim == 1 and call.x.shape[0] > 1
    direct = call.kind == "row" or call.added or shared or call.own_matmul is not None
    # Each call comes here, and a method costs it a function.
    arithmetic = settings.arithmetic if known.deterministic is None else known.arithmetic(settings)
    direct = direct or arithmetic.forms_every_product
    if call.weight_gradient is not None:
        weight_gradient = call.weight_gradient(begin)
    else:
        weight_gradient = BatchFirstWeightGradient(call.x.shape[0], begin) if batch_first else WeightGradient(begin)
    return ParallelLinear(
        kind=call.kind,
        group=group,
        settings=settings,
        known=known,
        arithmetic=arithmetic,
        sequence_parallel=shared,
        reduce_input_grad=call.reduce_input_grad,
        weight_gradient=weight_gradient,
        before_communicating=framework.unconfirmed(group),
        forward_wrapper=run_directly if direct else torch_linear(call),
        leaves_rows=framework.leaves_rows_of(call.layer),
        dtensors=(
            None if call.sequence_dim == 1 else call.x_dtensor,
            call.parameter if isinstance(call.parameter, DTensor) else None,
        ),
        parts=call.parts,
    )


def _run_int8(x: torch.Tensor, weight: QuantisedWeight, layer: ParallelLinear) -> torch.Tensor:
    """Return the output of a row layer whose weight is in int8."""
    return quantised_row_linear(
        x,
        weight,
        group=layer.group,
        settings=layer.settings,
        known=layer.known,
        sequence_parallel=layer.sequence_parallel,
        before_communicating=layer.before_communicating,
    )


def _run_own_matmul(
    framework: Framework,
    call: LinearCall,
    x: torch.Tensor,
    layer: ParallelLinear,
    own_matmul: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run the collectives of a call with input x around the program's own matmul."""
    # A check looks for the gradients of the call's operands.
    in_place = framework.verifier is not None and call.beside is None
    own_weight = _weight_in_place(call, call.weight) if in_place else nullcontext()
    if call.kind == "column":
        products: list[torch.Tensor] | None = [] if call.takes_product else None
        x = column_input(x, call.weight, layer, call.sequence_dim, products)
        with own_weight:
            return own_matmul(x, *products) if products else own_matmul(x)
    with torch._C.DisableTorchFunction():
        x = plain_tensor(x)
    with own_weight:
        y = own_matmul(x)
    return row_output(y, x, call.weight, layer, call.sequence_dim)


def column_input(
    x: torch.Tensor,
    weight: torch.Tensor,
    layer: ParallelLinear,
    sequence_dim: int | None,
    products: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the whole input of a column layer's matmul, unseen by modes of the program; as in `LinearCall`.

    products: as of `enter_column`.
    """
    with torch._C.DisableTorchFunction():
        if sequence_dim != 1:
            return enter_column(x, weight, layer, products)
        whole_x = swapped(enter_column(swapped(x), weight, layer, products))
        if products:
            products[:] = [y.transpose(0, 1).contiguous() for y in products]
        return whole_x


def row_output(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, layer: ParallelLinear, sequence_dim: int | None
) -> torch.Tensor:
    """Return the sum over ranks of the product y of x and the weight, unseen by modes of the program."""
    with torch._C.DisableTorchFunction():
        if sequence_dim != 1:
            return leave_row(y, x, weight, layer)
        return swapped(leave_row(y, x.transpose(0, 1), weight, layer, batch_first=True))


def torch_linear(call: LinearCall) -> ForwardWrapper:
    """Return a wrapper of a column layer's forward, which communicates nothing: torch.nn.Linear's function runs."""
    bias = None if call.bias is None else cast_by_autocast(call.bias.detach())
    operands = cast_by_autocast(call.x.detach()), cast_by_autocast(call.weight.detach()), bias
    return lambda _: (compute(MATMUL, "matmul", linear, *operands), None)
