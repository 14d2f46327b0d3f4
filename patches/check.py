"""Compare a call of a patched layer with the framework's own forward and backward on the same input.

The patched layer runs on the run's own operands. Its gradients are read from autograd's edges. A framework that keeps
gradients elsewhere, or whose layers cannot run twice as they are, derives its own call, check and reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

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
    cast_by_autocast,
    column_backward_settings,
    column_operators,
    row_operators,
)
from ascend_parallel.overlap.quantised import int8_weight
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.patches.reference import PlainReference, Reference
from ascend_parallel.process_groups import describe
from ascend_parallel.settings import Settings

Gradient = tuple[torch.Tensor | None, float]  # the gradient (None: zeros), and the largest rounding error of main_grad
Pair = tuple[torch.Tensor, torch.Tensor, float]  # actual, expected, and the largest rounding error of actual


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """A call of a patched layer.

    path
        "column" or "row".
    weight
        The weight that the patched layer multiplies with.
    patched
        Runs the call; its argument observes the start of the backward.
    original
        Runs the framework's own forward on an alias of x.
    settings
        Returns the operators' settings; called after `patched`, when this needs no communication.
    parameter
        What the framework's own forward reads as the weight, None: `weight` itself.
    sequence_parallel, reduces
        Whether the layer gathers or scatters rows; whether the input gradient of a column layer is summed.
    by
        Whose the original is, in words.
    """

    layer: Any
    path: str
    x: torch.Tensor
    weight: torch.Tensor
    patched: Callable[[Begin | None], Any]
    original: Callable[..., Any]
    settings: Callable[[], Settings]
    parameter: torch.Tensor | None = None
    sequence_parallel: bool = False
    reduces: bool = True
    by: str = "the framework's own"

    @property
    def graded(self) -> bool:
        """Whether a backward can follow."""
        return torch.is_grad_enabled() and (self.x.requires_grad or self.weight.requires_grad)

    @property
    def communicates(self) -> Any:
        """The layer whose group the call uses."""
        return self.layer

    def output(self, returned: Any) -> torch.Tensor:
        """Return the layer's output from what its forward returned."""
        output: torch.Tensor = returned
        return output

    def reference(self, rank: int) -> Reference:
        """Return the original computation of this call; `rank`: this process's in the layer's group."""
        parameter = self.weight if self.parameter is None else self.parameter
        return PlainReference(self.x, parameter, lambda x: self.output(self.original(x)))

    def check(self, group: dist.ProcessGroup, number: int, limit: float | None) -> Check:
        """Return the check of this call, the layer's `number`-th."""
        return Check(self, group, number, limit)


class Check:
    """The check of a call: of its forward and, if a backward follows, of its backward."""

    def __init__(self, call: LayerCall, group: dist.ProcessGroup, number: int, limit: float | None) -> None:
        """Prepare the check of `call`, the layer's `number`-th; `limit` is the largest error, None: by its dtype."""
        self._layer, self._path, self._group, self._number = call.layer, call.path, group, number
        self._sequence_parallel, self._reduces, self._by = call.sequence_parallel, call.reduces, call.by
        self._weight: Any = call.weight  # frameworks attach attributes to it
        self._shape, self._device = call.x.shape, call.x.device.type
        self._graded, self._needs_dx = call.graded, call.x.requires_grad
        self._dtype = cast_by_autocast(call.x.detach()).dtype
        self._limit = default_limit(self._dtype) if limit is None else limit
        self._record = LEDGER.record(call.layer)
        self._settings: Settings | None = None
        self._original: Reference | None = None
        self._dy: torch.Tensor | None = None
        self._saved: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._checked: list[str] = []
        self._gradients: dict[str, Gradient | None] = {}
        LEDGER.rank = dist.get_rank()

    def run(self, call: LayerCall) -> Any:
        """Run the patched layer's forward; return what it returns."""
        self._confirm_same_call()
        return call.patched(self._begin if self._graded else None)

    def compare(self, call: LayerCall, returned: Any) -> None:
        """Run the original's forward and compare its output with that of `run`, whose rows are finished by now."""
        with hide_from_selective_checkpoint(), torch.set_grad_enabled(self._graded):
            self._compare(call, returned)

    def _compare(self, call: LayerCall, returned: Any) -> None:
        """Compare the patched layer's output with the original's, and hook the backward."""
        y = call.output(returned)
        self._settings = call.settings()
        original = call.reference(self._group.rank())
        self._judge("forward", {"output": (y.detach(), original.forward(), 0.0)})
        if self._graded:
            self._original = original
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(self._keep_dy)
            operands = {"weight": call.weight, "input": call.x}
            self._checked = [name for name, operand in operands.items() if operand.requires_grad]
            for name in self._checked:
                node, index = gradient_source(y, operands[name], operands.values())
                node.register_hook(functools.partial(self._keep_gradient, name, index))

    def _begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Keep the tensors from which the patched layer's backward starts."""
        if self._original is not None:
            self._saved = kept, weight

    def _keep_gradient(self, name: str, index: int, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        """Keep a gradient before it is accumulated or sent, and compare when all gradients have arrived."""
        if self._original is None or self._dy is None:  # a second backward of a retained graph
            return
        gradient = gradients[index]
        self._gradients[name] = self._weight_gradient(gradient) if name == "weight" else (gradient, 0.0)
        if len(self._gradients) == len(self._checked):
            self._backward(self._original, self._dy)

    def _backward(self, original: Reference, dy: torch.Tensor) -> None:
        """Run the original's backward and compare its gradients with the patched layer's."""
        expected = dict(zip(("input", "weight"), original.backward(dy, *self._saved), strict=True))
        pairs: dict[str, Pair] = {}
        for name in self._checked:
            by_patched, by_original = self._gradients[name], expected[name]
            if by_patched is not None and by_original is not None:
                gradient, rounding = by_patched
                gradient = torch.zeros_like(by_original) if gradient is None else gradient
                pairs[f"{name} gradient"] = (gradient, by_original, rounding)
        self._judge("backward", pairs)
        self._original, self._dy = None, None
        self._saved, self._gradients = (None, None), {}

    def _confirm_same_call(self) -> None:
        """Raise `VerificationError` unless every rank of the group has come to the check of the same call."""
        graded = f"gradients of input {self._needs_dx}, of weight {self._weight.requires_grad}"
        mine = f"call {self._number} of a {self._record.kind}: {self._operands()}; "
        mine += graded if self._graded else "no gradients"
        calls_by_rank = exchange(
            self._group,
            f"the check of call {self._number} of {self._record.layer}",
            {"call": mine},
            VerificationError,
        )
        if any(value != calls_by_rank[dist.get_rank()] for value in calls_by_rank.values()):
            what = "; ".join(f"rank {rank}: {value['call']}" for rank, value in calls_by_rank.items())
            raise LEDGER.fail(
                f"ranks of {describe(self._group)} came to the checks of different calls ({what}): a layer has to be "
                "called alike on every rank of its group"
            )

    def _keep_dy(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the output's gradient."""
        if self._original is not None and gradients[0] is not None:
            self._dy = gradients[0].detach()

    def _weight_gradient(self, dw: torch.Tensor | None) -> Gradient | None:
        """Return the patched layer's weight gradient; None if it cannot be known."""
        return dw, 0.0

    def _judge(self, direction: str, pairs: dict[str, Pair]) -> None:
        """Compare the pairs; raise on every rank if a rank has an error over the limit."""
        apart = {quantity: difference(*pair) for quantity, pair in pairs.items()}
        for quantity, apart_by in apart.items():
            if apart_by.skipped:
                where = f"{self._record.layer}: where the original's {quantity} is not finite"
                LEDGER.note(f"{where} it is not compared", dist.get_rank())
        errors = {quantity: apart_by.error for quantity, apart_by in apart.items()}
        over = {quantity: error for quantity, error in errors.items() if not error <= self._limit}
        worst = max(over, key=lambda quantity: over[quantity], default=None)
        failure = None if worst is None else self._failure(direction, worst, pairs[worst], apart[worst])
        what = f"the check of the {direction} of call {self._number} of {self._record.layer}"
        reports = exchange(self._group, what, {"errors": errors, "failure": failure}, VerificationError)
        self._record.add(direction, [report["errors"] for report in reports.values()], self._limit)
        failed = [report for report in reports.values() if report["failure"]]
        if failed:
            raise LEDGER.fail(max(failed, key=lambda report: max(report["errors"].values()))["failure"])

    def _failure(self, direction: str, quantity: str, pair: Pair, apart: Difference) -> str:
        actual, expected, _ = pair
        if actual.shape == expected.shape:
            place, value, original = worst_place(actual, expected)
            wrong = (
                f"its error is {apart.error:.2e} of the largest magnitude {apart.scale:.3g}, more than {self._limit:g} "
                f"(verify_limit); worst at {place} of {list(actual.shape)}: {value:.6g}, by {self._by} "
                f"{original:.6g}"
            )
        else:
            wrong = f"its shape is {list(actual.shape)}, by {self._by} {list(expected.shape)}"
        return (
            f"{self._record.layer} ({self._record.kind}, {self._where()}): the {quantity} of call "
            f"{self._number} is wrong on rank {dist.get_rank()} of {describe(self._group)}: {wrong}. Called with "
            f"{self._operands()}. {self._operators(direction)}"
        )

    def _where(self) -> str:
        return f"{self._path}, sequence parallel" if self._sequence_parallel else self._path

    def _operands(self) -> str:
        return f"input {list(self._shape)}, weight {list(self._weight.shape)}, {self._dtype}"

    def _operators(self, direction: str) -> str:
        """Return a sentence with the kernels and chunks of the pass's operators."""
        column, sequence_parallel, settings = self._path == "column", self._sequence_parallel, self._settings
        assert settings is not None
        (n, k), m = self._weight.shape, self._shape[:-1].numel()
        operators = (column_operators if column else row_operators)(m, k, n, self._group.size(), sequence_parallel)
        if direction == "backward":
            settings = column_backward_settings(settings) if column else backward_settings(settings)
            unreduced = column and not sequence_parallel and not self._reduces
            operators = operators if self._needs_dx and not unreduced else []
        texts = [self._operator(operator, settings) for operator in operators if operator.run == direction]
        return f"Its {direction} ran {', '.join(texts) or 'no operator'}"

    def _operator(self, operator: LayerOperator, settings: Settings) -> str:
        m, k, n = operator.m, operator.k, operator.n
        problem = Problem(operator.operator, m, k, n, self._dtype, self._device, self._group.size())
        int8 = int8_weight(self._layer)
        if int8 is not None and operator.operator == ALL_REDUCE:
            problem = with_scales(problem, int8)
        # The operator has run, so its choice is cached and needs no communication.
        choice = choice_for(problem, self._group, settings, self._weight.device, operator.layout)
        return f"{name_of(problem)} by kernel {choice.kernel} in chunks of rows {list(choice.sizes)}"


def gradient_source(y: torch.Tensor, x: torch.Tensor, operands: Iterable[torch.Tensor]) -> tuple[Any, int]:
    """Return the graph node that computes the gradient of x, and the index of this gradient among its outputs.

    Searches from y; does not search behind `operands`. Hooking an alias of x would be simpler, but the layer would then
    save the alias, and hooks and swaps of ``x.data`` would act differently from a run without the check.
    """
    target = get_gradient_edge(x)
    seen = {get_gradient_edge(operand).node for operand in operands if operand.requires_grad}
    pending: list[Any] = [y.grad_fn]
    while pending:
        node = pending.pop()
        for index, (next_node, output_nr) in enumerate(node.next_functions):
            if next_node is target.node and output_nr == target.output_nr:
                return node, index
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)
    raise AssertionError("the layer's output does not depend on its input")
