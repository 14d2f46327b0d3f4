"""One call of a patched layer, compared with Megatron-core's own forward and backward on the same input.

The patched layer runs on its own operands. Its gradients are taken where autograd hands them on, or from main_grad
before and after, and the original's backward begins with what the patched one's began with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.consistency import exchange
from ascend_parallel.diagnostics.verify import (
    LEDGER,
    Difference,
    VerificationError,
    default_limit,
    difference,
    worst_place,
)
from ascend_parallel.ops.operators import choice_for
from ascend_parallel.ops.problem import ALL_REDUCE, Problem, with_scales
from ascend_parallel.ops.registry import name_of
from ascend_parallel.overlap.choices import (
    LayerOperator,
    backward_settings,
    column_backward_settings,
    column_passes,
    row_passes,
)
from ascend_parallel.overlap.linear import cast_by_autocast
from ascend_parallel.overlap.quantised import int8_weight
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.megatron.original import Forward, Original, Output
from ascend_parallel.patches.megatron.watching import WrapGradient, gradient_source, notify_backward_start, unwrapped
from ascend_parallel.process_groups import describe
from ascend_parallel.settings import Settings

Gradient = tuple[torch.Tensor | None, float]  # None is one of zeros; how far main_grad's rounding may have moved it
Pair = tuple[torch.Tensor, torch.Tensor, float]  # found, expected, and how far rounding may have moved the first


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """One call of a patched layer.

    path
        "column" or "row".
    patched
        Runs it; what becomes of its weight gradient is what the argument makes of it.
    original
        Runs Megatron-core's own forward, of something that has the layer's attributes, on x and weight.
    settings
        Tells what the operators were run with; asked after `patched`, when that needs no communication.
    """

    layer: Any
    path: str
    x: torch.Tensor
    weight: torch.Tensor
    patched: Callable[[WrapGradient], Output]
    original: Forward
    settings: Callable[[], Settings]

    @property
    def graded(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and (self.x.requires_grad or self.weight.requires_grad)


class Check:
    """One call, checked: its forward now and, if one comes, its backward."""

    def __init__(self, call: LayerCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Check `call`, the layer's `number`-th; errors may be up to `limit`, None: what its dtype allows."""
        self._layer, self._path, self._group, self._number = call.layer, call.path, group, number
        self._weight: Any = call.weight  # to which Megatron attaches main_grad
        self._shape, self._device = call.x.shape, call.x.device.type
        self._graded, self._wants_dx = call.graded, call.x.requires_grad
        self._dtype = cast_by_autocast(call.x.detach()).dtype
        self._limit = default_limit(self._dtype) if limit is None else limit
        self._record = LEDGER.record(call.layer)
        self._settings: Settings | None = None
        self._original: Original | None = None
        self._dy: torch.Tensor | None = None
        self._main_grad: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._put_off = 0
        self._begun: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._wanted: list[str] = []
        self._found: dict[str, Gradient | None] = {}
        LEDGER.rank = dist.get_rank()

    def forward(self, call: LayerCall) -> Output:
        """Run both forwards and compare them; return what the patched one returned."""
        self._meet()
        y, bias = call.patched(notify_backward_start(self._begin) if self._graded else unwrapped)
        with hide_from_selective_checkpoint():
            self._compare(call, y)
        return y, bias

    def _compare(self, call: LayerCall, y: torch.Tensor) -> None:
        """Compare the patched layer's output with the original's, and have its backward come here."""
        self._settings = call.settings()
        original = Original(call.layer, call.x, call.weight, self._group.rank())
        self._judge("forward", {"output": (y.detach(), original.forward(call.original), 0.0)})
        if self._graded:
            self._original = original
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(self._take)
            operands = {"weight": call.weight, "input": call.x}
            self._wanted = [which for which, one in operands.items() if one.requires_grad]
            for which in self._wanted:
                node, place = gradient_source(y, operands[which], operands.values())
                node.register_hook(functools.partial(self._arrived, which, place))

    def _begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Take what the patched layer's backward begins with, and main_grad as it is now."""
        if self._original is None:
            return
        self._begun = kept, weight
        self._put_off = self._deferred()
        if self._layer.gradient_accumulation_fusion and self._weight.requires_grad:
            self._main_grad = getattr(self._weight, "main_grad", None)
            self._before = None if self._main_grad is None else self._main_grad.clone()

    def _arrived(self, which: str, place: int, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        """Take a gradient before anybody accumulates or sends it, and compare once all are there."""
        if self._original is None or self._dy is None:  # a second backward of a retained graph
            return
        dw = gradients[place]
        self._found[which] = self._weight_gradient(dw) if which == "weight" else (dw, 0.0)
        if len(self._found) == len(self._wanted):
            self._backward(self._original, self._dy)

    def _backward(self, original: Original, dy: torch.Tensor) -> None:
        """Run the original's backward and compare its gradients with the patched layer's."""
        expected = dict(zip(("input", "weight"), original.backward(dy, *self._begun), strict=True))
        found: dict[str, Pair] = {}
        for which in self._wanted:
            arrived, by_original = self._found[which], expected[which]
            if arrived is not None and by_original is not None:
                gradient, rounding = arrived
                gradient = torch.zeros_like(by_original) if gradient is None else gradient
                found[f"{which} gradient"] = (gradient, by_original, rounding)
        self._judge("backward", found)
        self._original, self._dy, self._before, self._main_grad = None, None, None, None
        self._begun, self._found = (None, None), {}

    def _meet(self) -> None:
        """Make sure that every rank of the group has come to the check of the same call."""
        graded = f"gradients of input {self._wants_dx}, of weight {self._weight.requires_grad}"
        mine = f"call {self._number} of a {self._record.kind}: {self._operands()}; "
        mine += graded if self._graded else "no gradients"
        told = exchange(
            self._group,
            f"the check of call {self._number} of {self._record.layer}",
            {"call": mine},
            VerificationError,
        )
        if any(value != told[dist.get_rank()] for value in told.values()):
            what = "; ".join(f"rank {rank}: {value['call']}" for rank, value in told.items())
            raise LEDGER.fail(
                f"ranks of {describe(self._group)} came to the checks of different calls ({what}): a layer has to be "
                "called alike on every rank of its group"
            )

    def _take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the output's gradient."""
        if self._original is not None and gradients[0] is not None:
            self._dy = gradients[0].detach()

    def _deferred(self) -> int:
        """Return how many of the layer's weight gradients wait to be computed."""
        return len(getattr(self._layer, "grad_output_buffer", None) or ())

    def _weight_gradient(self, dw: torch.Tensor | None) -> Gradient | None:
        """Return the patched layer's weight gradient, None if it is not to be known, which is said."""
        if why := self._unknown():
            LEDGER.note(f"{self._record.layer}: the weight gradient {why} and is not checked", dist.get_rank())
            return None
        main, before = self._main_grad, self._before
        if main is None or before is None:
            return dw, 0.0
        wide = torch.promote_types(main.dtype, torch.float32)
        return main.to(wide) - before, torch.finfo(main.dtype).eps * _magnitude(before)

    def _unknown(self) -> str | None:
        """Say why the weight gradient is not to be known, or None."""
        if self._deferred() > self._put_off:
            return "is deferred (defer_embedding_wgrad_compute)"
        if not self._layer.gradient_accumulation_fusion:
            return None
        if hasattr(self._weight, "__fsdp_param__"):
            return "goes to a buffer of Megatron-FSDP"
        if self._main_grad is None or self._before is None:
            return "has no main_grad to go to"
        if self._weight.main_grad is not self._main_grad:
            return "went to another main_grad than the weight had before"
        return None if math.isfinite(_magnitude(self._before)) else "was added to a main_grad that was not finite"

    def _judge(self, direction: str, found: dict[str, Pair]) -> None:
        """Compare, tell the other ranks, and raise on all of them if one found an error over the limit."""
        apart = {quantity: difference(*pair) for quantity, pair in found.items()}
        for quantity, one in apart.items():
            if one.skipped:
                which = f"{self._record.layer}: where the original's {quantity} is not finite"
                LEDGER.note(f"{which} it is not compared", dist.get_rank())
        errors = {quantity: one.error for quantity, one in apart.items()}
        over = {quantity: error for quantity, error in errors.items() if not error <= self._limit}
        worst = max(over, key=lambda quantity: over[quantity], default=None)
        failure = None if worst is None else self._failure(direction, worst, found[worst], apart[worst])
        what = f"the {direction} of call {self._number} of {self._record.layer}"
        told = exchange(self._group, f"the check of {what}", {"errors": errors, "failure": failure}, VerificationError)
        self._record.add(direction, [value["errors"] for value in told.values()], self._limit)
        failed = [value for value in told.values() if value["failure"]]
        if failed:
            raise LEDGER.fail(max(failed, key=lambda value: max(value["errors"].values()))["failure"])

    def _failure(self, direction: str, quantity: str, pair: Pair, apart: Difference) -> str:
        found, expected, _ = pair
        sequence_parallel = ", sequence parallel" if self._layer.sequence_parallel else ""
        if found.shape == expected.shape:
            place, value, original = worst_place(found, expected)
            wrong = (
                f"its error is {apart.error:.2e} of the largest magnitude {apart.scale:.3g}, more than {self._limit:g} "
                f"(verify_limit); worst at {place} of {list(found.shape)}: {value:.6g}, by megatron-core's own "
                f"{original:.6g}"
            )
        else:
            wrong = f"its shape is {list(found.shape)}, by megatron-core's own {list(expected.shape)}"
        return (
            f"{self._record.layer} ({self._record.kind}, {self._path}{sequence_parallel}): the {quantity} of call "
            f"{self._number} is wrong on rank {dist.get_rank()} of {describe(self._group)}: {wrong}. Called with "
            f"{self._operands()}. {self._operators(direction)}"
        )

    def _operands(self) -> str:
        return f"input {list(self._shape)}, weight {list(self._weight.shape)}, {self._dtype}"

    def _operators(self, direction: str) -> str:
        """Say with which kernels and in which chunks the pass ran its operators."""
        column, sequence_parallel, settings = self._path == "column", self._layer.sequence_parallel, self._settings
        assert settings is not None
        (n, k), m = self._weight.shape, self._shape[:-1].numel()
        passes = (column_passes if column else row_passes)(m, k, n, self._group.size(), sequence_parallel)
        if direction == "backward":
            settings = column_backward_settings(settings) if column else backward_settings(settings)
            unreduced = column and not sequence_parallel and self._layer.disable_grad_reduce
            passes = passes if self._wants_dx and not unreduced else []
        ran = [self._operator(one, settings) for one in passes if one.run == direction]
        return f"Its {direction} ran {', '.join(ran) or 'no operator'}"

    def _operator(self, one: LayerOperator, settings: Settings) -> str:
        problem = Problem(one.operator, one.m, one.k, one.n, self._dtype, self._device, self._group.size())
        int8 = int8_weight(self._layer)
        if int8 is not None and one.operator == ALL_REDUCE:
            problem = with_scales(problem, int8)
        # Known, since the operator has run.
        choice = choice_for(problem, self._group, settings, self._weight.device, one.layout)
        return f"{name_of(problem)} by kernel {choice.kernel} in chunks of rows {list(choice.sizes)}"


def _magnitude(tensor: torch.Tensor) -> float:
    return max(float(bound.abs()) for bound in torch.aminmax(tensor))
