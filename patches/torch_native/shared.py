"""The gather that the column layers of a module share (PrepareModuleInput).

The module gets a DTensor that is not gathered yet. Its first column layer gathers it, and the others read the rows that
it has gathered. Whatever else reads the DTensor first, maybe on one rank alone, gathers by the same collectives. So
it is Replicate() to everyone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_map_only

from ascend_parallel.ops.decision import Known
from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import COLUMN
from ascend_parallel.overlap.linear import column_linear
from ascend_parallel.overlap.shared_column import shared_column_linear
from ascend_parallel.patches.batch_first import BatchFirstWeightGradient, swapped
from ascend_parallel.patches.covered_call import CoveredCall, run_covered
from ascend_parallel.patches.dtensor_linear import replicated
from ascend_parallel.patches.framework import Framework
from ascend_parallel.patches.linear_call import LinearCall, column_input, torch_linear

GATHER = "_ascend_parallel_gather"
_TENSOR: Any = torch.Tensor
# What describes a tensor alike before and after the gather.
_DESCRIBING = {
    getattr(_TENSOR, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "layout")
} | {_TENSOR.size, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.numel, _TENSOR.is_floating_point, _TENSOR.is_complex}
# What asks for the whole gradient, which reaches the rows that are not gathered.
_OF_GRADIENT = {
    torch.autograd.grad,
    torch.autograd.backward,
    _TENSOR.register_hook,
    _TENSOR.retain_grad,
    _TENSOR.grad.__get__,
    _TENSOR.retains_grad.__get__,
}


class SharedGather:
    """The rows of a DTensor that layers have gathered.

    x
        The DTensor as its ranks hold it, cut along the rows.
    classes
        Whether a column layer is of another class than torch.nn.Linear: all then read one DTensor, whose gradients
        torch adds in the order of a plain run.
    """

    def __init__(self, x: DTensor, framework: Framework, first: Any, sequence_dim: int, classes: bool = False) -> None:
        """Nothing has been gathered; the column layer `first` decides about the collectives, whoever reads first."""
        self.x, self.classes = x, classes
        self._framework, self._first, self._sequence_dim = framework, first, sequence_dim
        self._gathered_dtensor: DTensor | None = None
        self._rows: dict[tuple[bool, torch.dtype], tuple[Any, torch.Tensor]] = {}

    def run(self, call: LinearCall) -> torch.Tensor:
        """Return the output of a column layer, [B, S, N / R] or [S, ..., N / R].

        Rows that were gathered without gradients, or in autocast's dtype, are for such calls alone. The layer that
        came first gathers again when it is called again: recompute then saves what the forward has saved.
        """
        if self.classes and call.own_matmul is not None:
            products: list[torch.Tensor] = []
            whole = self.gathered(products if call.takes_product and call.layer is self._first else None)
            return call.own_matmul(whole, *products)
        key = (torch.is_grad_enabled() and self.x.requires_grad, operand_dtype(call.x))
        first, rows = self._rows.get(key, (None, None))
        y = None
        if rows is None or first is call.layer:
            y, rows = self._gather(call)
        self._rows[key] = (first or call.layer, rows)
        return _reading(self._framework, call, rows) if y is None else y

    def _gather(
        self, call: LinearCall | None, products: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the output of the call, if the gather runs under its matmul, and the gathered rows.

        products: gets the product with the first layer's weight, as of `enter_column`.
        """
        framework, first = self._framework, self._first
        weight, x, group = first.weight.to_local(), DTensor.to_local(self.x), framework.group_of(first)
        if framework.decider.undecided:
            framework.enter(first, self.x, communicates=True)

        def ours(known: Known, _: object) -> tuple[torch.Tensor | None, torch.Tensor]:
            if call is not None and call.layer is first and call.own_matmul is None:
                return _gathering(framework, call, group, known)
            layer = _gathering_layer(framework, group, known)
            return None, column_input(x, weight.detach(), layer, self._sequence_dim, products)

        def theirs() -> tuple[None, torch.Tensor]:  # torch's own gather, whose backward sums all readers' gradients
            return None, self.x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        gather = CoveredCall(
            layer=first,
            group=group,
            device=x.device,
            agreeing=None,
            decide=functools.partial(framework.prepare, first, COLUMN, x, weight, group, sequence_parallel=True),
            ours=ours,
            theirs=theirs,
            checked=None,  # layers share no gather where they are checked (styles.py)
        )
        output, rows = run_covered(framework, gather)
        return output, rows

    def gathered(self, products: list[torch.Tensor] | None = None) -> DTensor:
        """Return the gathered DTensor, for other readers than the layers; `products` as of `_gather`."""
        if self._gathered_dtensor is None:
            key = (self.x.requires_grad, self.x.dtype)
            if key not in self._rows:
                with torch.set_grad_enabled(self.x.requires_grad):
                    self._rows[key] = (None, self._gather(None, products)[1])
            with torch.set_grad_enabled(self.x.requires_grad):
                self._gathered_dtensor = replicated(self._rows[key][1], self.x.device_mesh)
        return self._gathered_dtensor

    @property
    def changed(self) -> bool:
        """Whether an operator has changed the gathered DTensor in place."""
        return self._gathered_dtensor is not None and self._gathered_dtensor._version > 0


class SharedInput(DTensor):
    """A DTensor whose rows its first reader gathers. Operators and DTensor's methods make torch gather it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on gathered tensors, unless it asks for nothing that a gather changes."""
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        of_gradient = func in _OF_GRADIENT

        def given(shared: Any) -> Any:
            gather = vars(shared)[GATHER]
            return gather.x if of_gradient else gather.gathered()

        args, kwargs = tree_map_only(cls, given, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the rows of this rank: nothing is gathered."""
        return repr(vars(self)[GATHER].x)

    @property
    def device_mesh(self) -> Any:
        """The mesh."""
        return vars(self)[GATHER].x.device_mesh

    @property
    def placements(self) -> Any:
        """Where the gathered tensor lies."""
        return (Replicate(),)

    @property
    def _spec(self) -> Any:  # type: ignore[override]
        return vars(self)[GATHER].gathered()._spec

    @property
    def _local_tensor(self) -> Any:  # type: ignore[override]
        return vars(self)[GATHER].gathered()._local_tensor

    def to_local(self, **options: Any) -> Any:
        """Return the gathered rows."""
        return vars(self)[GATHER].gathered().to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        """Redistribute the gathered tensor."""
        return vars(self)[GATHER].gathered().redistribute(*args, **options)

    def full_tensor(self, **options: Any) -> Any:
        """Return the gathered rows."""
        return vars(self)[GATHER].gathered().full_tensor(**options)


def share(gather: SharedGather) -> DTensor:
    """Return a DTensor whose rows its first reader is to gather."""
    shared: Any = gather.x.view_as(gather.x)
    shared.__class__ = SharedInput
    vars(shared)[GATHER] = gather
    assert isinstance(shared, SharedInput)
    return shared


def shared_gather(x: Any) -> SharedGather | None:
    """Return the gather that readers of x share, or None."""
    return vars(x)[GATHER] if isinstance(x, SharedInput) else None


def _reading(framework: Framework, call: LinearCall, rows: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer from gathered rows; the rows' gradient is this rank's part of the sum."""
    if call.own_matmul is not None:
        return call.own_matmul(rows)
    return column_linear(
        rows,
        call.weight,
        call.bias,
        group=framework.group_of(call.layer),
        settings=framework.settings,
        reduce_input_grad=False,
        forward_wrapper=torch_linear(replace(call, x=rows)),
        dtensors=(None, call.dtensors[1]),
    )


def _gathering(
    framework: Framework, call: LinearCall, group: dist.ProcessGroup, known: Known
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the first layer, and the gathered rows."""
    options: dict[str, Any] = {}
    x, second = call.x, call.sequence_dim == 1
    if second:
        options["weight_gradient"] = BatchFirstWeightGradient(x.shape[0])
    layer = _gathering_layer(framework, group, known, dtensors=(None, call.dtensors[1]), **options)
    y, rows = shared_column_linear(swapped(x) if second else x, call.weight, call.bias, layer)
    return (swapped(y), swapped(rows)) if second else (y, rows)


def _gathering_layer(framework: Framework, group: dist.ProcessGroup, known: Known, **options: Any) -> ParallelLinear:
    """Return the column layer that gathers the rows of a shared input."""
    return ParallelLinear(
        kind=COLUMN,
        group=group,
        settings=framework.settings,
        known=known,
        arithmetic=known.arithmetic(framework.settings),
        sequence_parallel=True,
        before_communicating=framework.confirm(group),
        **options,
    )
