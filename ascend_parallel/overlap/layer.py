"""The options of an overlapped layer, which all its calls share, and the wrappers of its forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ascend_parallel.ops.arithmetic import Arithmetic
from ascend_parallel.ops.blocks import BLOCKS
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.host_lead import LEADS
from ascend_parallel.ops.operators import any_autocast, autocast_off
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.quantised import Weight
from ascend_parallel.ops.quantised_rows import Input, quantise_rows
from ascend_parallel.ops.record import BESIDE, RECORDING, compute, recorded_pass
from ascend_parallel.ops.unfinished import (
    in_backward,
    may_be_filled_later,
    may_stay_unfinished,
    plain_tensor,
    unfinished,
)
from ascend_parallel.overlap.digests import write_digests
from ascend_parallel.overlap.known import known_in_call, known_in_pass
from ascend_parallel.overlap.layer_shape import BACKWARD, LayerShape
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.overlap.weight_gradient import WeightGradient
from ascend_parallel.settings import Settings

Pass = Callable[..., Any]
Products = tuple[torch.Tensor, torch.Tensor | None]
"""A layer's output, and the gathered input that its backward needs, if the layer keeps it."""
ForwardWrapper = Callable[[Callable[[], Products]], Products]
"""``forward_wrapper(forward)`` runs `forward`, or returns its saved products during recompute."""

_NOTHING: AbstractContextManager[object] = nullcontext()


def run_directly(forward: Callable[[], Products]) -> Products:
    """Return ``forward()``."""
    return forward()


@dataclass(frozen=True, kw_only=True)
class ParallelLinear:
    """The options of a linear layer, as of `column_linear`. A caller with many calls makes the layer once.

    kind
        "column" or "row".
    known
        What decides its chunks beside the settings.
    arithmetic
        How its products are formed and sums taken: as `known` says, else the settings.
    """

    kind: str
    group: dist.ProcessGroup
    settings: Settings
    known: Known
    arithmetic: Arithmetic
    sequence_parallel: bool = False
    reduce_input_grad: bool = True
    weight_gradient: WeightGradient = field(default_factory=WeightGradient)
    before_communicating: Callable[[], None] | None = None
    forward_wrapper: ForwardWrapper = run_directly
    leaves_rows: int = 0  # results in chunks of as many rows stay unfinished; 0: none
    finishes: bool = False  # in this pass all the same no rows stay unfinished
    dtensors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    parts: tuple[int, ...] = ()  # features of a fused weight's parts on this rank; empty: one part
    input_grain: str | None = None  # rounds inputs to int8, with scales as of `quantise_rows`
    comm_scales: CommScales | None = None  # ranks exchange int8

    @property
    def in_backward(self) -> ParallelLinear:
        """The layer with what is known of its backward."""
        return self if self.known.plan is None and not self.settings.fused else self._in_planned_backward

    @cached_property
    def _in_planned_backward(self) -> ParallelLinear:
        known = known_in_pass(self.settings, self.known, self.kind, BACKWARD)
        return self if known is self.known else self._with(known=known)

    def _with(self, **options: Any) -> ParallelLinear:
        """Return the layer with other options; each backward asks, and `dataclasses.replace` is ten times as slow."""
        changed = object.__new__(ParallelLinear)
        vars(changed).update(vars(self), **options)
        vars(changed).pop("_in_planned_backward", None)
        return changed

    def write_digest(self, kind: str, name: str, tensor: torch.Tensor | None, dim: int | None) -> None:
        """Write the digest of a tensor of a "column" or "row" layer, whose dimension `dim` ranks share, if asked to.

        With dim=None every rank has the tensor whole, or with sequence parallelism its rows: blocks are of rows.
        """
        if self.settings.digests is None or tensor is None:
            return
        write = functools.partial(write_digests, self.settings.digests, f"{kind} layer", name)
        if dim is not None:
            write(tensor, self.group, dim, self.parts)
            return
        rows = tensor.reshape(-1, tensor.shape[-1])
        if self.sequence_parallel:
            write(rows, self.group, 0)
        else:
            write(rows, None, 0 if rows.shape[0] and rows.shape[0] % BLOCKS == 0 else None)

    def refuse_partial_gradient(self, x: torch.Tensor) -> None:
        """Raise `DegreeError` for a column layer whose dx others sum over the ranks, if the sum has to be a tree."""
        partial = not (self.sequence_parallel or self.reduce_input_grad) and x.requires_grad
        if partial:
            self.arithmetic.refuse(
                "a column layer with reduce_input_grad=False leaves the sum of its input gradient to others, whose "
                "bits depend on the number of ranks"
            )

    @property
    def kept_for_backward(self) -> ParallelLinear:
        """The layer without what only its forward calls, which may hold tensors: a checkpoint is to free these."""
        if self.forward_wrapper is run_directly and self.dtensors == (None, None):
            return self
        return self._with(forward_wrapper=run_directly, dtensors=(None, None))

    def input_of(self, x: torch.Tensor) -> Input:
        """Return the left operand of forward: x, or x rounded to int8."""
        return x if self.input_grain is None else compute(BESIDE, "quantise", quantise_rows, x, self.input_grain)

    def known_for(self, direction: str, rows: torch.Tensor, weight: Weight) -> Known:
        """Return what is known of a pass whose rows may be left: of the matmul of `rows` [..., *] and weight [N, K].

        No plan speaks of an int8 weight.
        """
        if not self.leaves_rows or self.known.plan is None or not isinstance(weight, torch.Tensor):
            return self.known
        (n, k), count = weight.shape, rows.shape[:-1].numel()
        fields = {"k": k, "n": n, "dtype": rows.dtype, "device": rows.device.type}
        shape = LayerShape.of_rows(self.kind, count, self.group.size(), self.sequence_parallel, **fields)
        return known_in_call(self.settings, self.known, shape, direction, leaves_rows=True)

    def as_host_allows(self, x: torch.Tensor, *, leaves: bool = True) -> ParallelLinear:
        """Return the layer for a pass with a result like x: rows come later only where the host runs ahead.

        The cut of a pass stays as `leaves_rows` has it, because ranks may differ in this. leaves: the pass may leave
        rows; else at most its weight gradient comes later.
        """
        if not self.leaves_rows or LEADS.host_is_ahead(self.group, x.device, notes=leaves):
            return self
        return self._with(finishes=True)

    def result(self, pending: Pending) -> torch.Tensor:
        """Return the result of a row layer's collectives: finished, or with `leaves_rows` unfinished."""
        return unfinished(pending, self.leaves_rows) if self.leaves_rows and not self.finishes else pending.wait()

    def may_leave(self, pending: Pending) -> bool:
        """Tell whether the rows of an input gradient may stay unfinished: in a backward that autograd runs."""
        may_leave = bool(self.leaves_rows) and not self.finishes and in_backward()
        return may_leave and may_stay_unfinished(pending.sizes, self.leaves_rows)

    @property
    def postpones_weight_gradient(self) -> bool:
        """Whether a weight gradient may come later than the backward, which autograd runs, of its layer."""
        leaves = bool(self.leaves_rows) and not self.finishes
        may_come_later = leaves and in_backward() and may_be_filled_later()
        return may_come_later and self.weight_gradient.may_come_later

    @property
    def multiplies_gradient(self) -> bool:
        """Whether the weight gradient is one product of torch's, which nobody postpones."""
        finishes = self.finishes or not self.leaves_rows
        return finishes and not self.arithmetic.forms_every_product and self.weight_gradient.is_product

    def about_to_communicate(self) -> None:
        """Run `before_communicating`."""
        if self.before_communicating is not None:
            self.before_communicating()


def checked(operand: torch.Tensor | None, dtensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return what to save of an operand: `dtensor`, if the operand is its local tensor, not a copy that autocast made.

    An operator in place raises the version of a DTensor, which autograd compares in backward, not of its local tensor.
    """
    return operand if operand is None or dtensor is None or dtensor.dtype != operand.dtype else dtensor


def local(saved: Any) -> Any:
    """Return the operand that `checked` saved."""
    return saved.to_local() if hasattr(saved, "to_local") else saved


def in_forward(ctx: Any, kind: str, x: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context of an autograd function's forward: recorded, without autocast and selective checkpoints.

    Operands are cast before. In the usual case, none of the three is active, and the context does nothing.
    """
    active = RECORDING.recorder is not None or torch._C._len_torch_dispatch_stack()
    if active or any_autocast():
        return _guarded_forward(ctx, kind, x)
    return _NOTHING


@contextmanager
def _guarded_forward(ctx: Any, kind: str, x: torch.Tensor) -> Iterator[None]:
    with hide_from_selective_checkpoint(), recorded_pass(ctx, kind, "forward", x.device.type), autocast_off(x):
        yield


def layer_backward(kind: str) -> Callable[[Pass], Pass]:
    """Run an autograd function's ``backward(ctx, dy, ...)`` without autocast, recorded, and not differentiable again.

    In the usual case, none of the three is active: autograd builds no graph of backward. Backward then runs at once.
    """

    def decorate(backward: Pass) -> Pass:
        @once_differentiable
        def guarded(ctx: Any, like: torch.Tensor, *gradients: torch.Tensor | None) -> Any:
            with recorded_pass(ctx, kind, "backward", like.device.type), autocast_off(like):
                return backward(ctx, *gradients)

        def run_guarded(ctx: Any, dy: torch.Tensor | None, *more: Any) -> Any:
            given = next((gradient for gradient in (dy, *more) if gradient is not None), None)
            if given is None:  # nobody needs a gradient
                return (None,) * len(ctx.needs_input_grad)
            active = RECORDING.recorder is not None or torch.is_grad_enabled()
            if active or any_autocast():
                found = guarded(ctx, given, dy, *more)
                return tuple(map(plain_tensor, found)) if torch.is_grad_enabled() else found
            return backward(ctx, dy, *more)

        @functools.wraps(backward)
        def run(ctx: Any, dy: torch.Tensor | None, *more: Any) -> Any:
            active = RECORDING.recorder is not None or torch.is_grad_enabled()
            # A mode of the program sees torch's own backward no more than this.
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():
                    return run_guarded(ctx, dy, *more)
            if dy is None or active or any_autocast():
                return run_guarded(ctx, dy, *more)
            return backward(ctx, dy, *more)

        return run

    return decorate
