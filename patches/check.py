"""Compare calls of patched layers with the framework's own code on the same operands.

`Verifier` selects the calls, `CheckedCall` describes one, and `Check` compares it.

The call runs on the run's own operands, and autograd's edges give its gradients. The framework's own code runs twice on
aliases: beside the call's forward, and with its backward beside the call's backward, on the operands which that has.
Nothing but the operands is held in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ascend_parallel.diagnostics.verify import (
    LEDGER,
    Difference,
    VerificationError,
    default_limit,
    difference,
    worst_place,
)
from ascend_parallel.ops.call import ALL_REDUCE, with_scales
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.operators import decision_for
from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.known import known_in_call
from ascend_parallel.overlap.layer_shape import FORWARD, LayerOperator, LayerShape
from ascend_parallel.overlap.quantised import int8_weight
from ascend_parallel.overlap.selective_checkpoint import (
    hide_from_selective_checkpoint,
    random_states,
    without_trace,
)
from ascend_parallel.overlap.weight_gradient import Begin
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import is_capturing, store_all_gather
from ascend_parallel.settings import Settings

Tensors = Mapping[str, torch.Tensor]  # operands or results by name
Gradient = tuple[torch.Tensor | None, float]  # the gradient (None: zeros), and the largest rounding error of main_grad
Pair = tuple[torch.Tensor, torch.Tensor, float]  # actual, expected, and the largest rounding error of actual
OperatorsRan = Callable[[str], str]  # a sentence about the operators of "forward" or "backward"


class Gradients:
    """Reads the gradients of a call; frameworks that keep gradients elsewhere derive from this class."""

    def begin(self) -> None:
        """Note what has to be known of the time before the backward, which starts now."""

    def read(self, name: str, gradient: torch.Tensor | None) -> Gradient | str:
        """Return an operand's gradient, for which autograd has got `gradient`; or why it cannot be known."""
        return gradient, 0.0


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """A call of a patched layer, or of a part of a region, beside the framework's own code.

    path
        What the layer does, in words: "column, sequence parallel".
    group
        The ranks that call the layer alike.
    operands
        The tensors whose gradients are compared, by name; "input" is one of them.
    run
        Runs the call; its argument observes the start of the backward.
    results
        Returns the call's outputs by name, from what `run` returned.
    original
        Runs the framework's own code on aliases of `operands`; returns its outputs by the names of `results`.
    operators
        Returns what tells the operators of a pass in words. Called after `run`, when this needs no communication.
    gradients
        Reads the gradients.
    backward_operands
        Returns the operands that the backward has, from what `Begin` is called with; those not named are as they are
        when the backward runs.
    inside
        The names of operands whose gradients are accumulated while the backward runs, not given by it: parameters that
        a graph inside the call reads.
    of_rank
        The names of operands that one rank may have, and another may not.
    name
        The layer's name in its model, as its framework says; empty: it is looked for among the process's modules.
    """

    layer: Any
    path: str
    group: dist.ProcessGroup
    operands: Tensors
    run: Callable[[Begin | None], Any]
    results: Callable[[Any], Tensors]
    original: Callable[[Tensors], Tensors]
    operators: Callable[[], OperatorsRan]
    gradients: Gradients = field(default_factory=Gradients)
    backward_operands: Callable[[torch.Tensor | None, torch.Tensor | None], Tensors] = lambda kept, weight: {}
    inside: frozenset[str] = frozenset()
    of_rank: frozenset[str] = frozenset()
    name: str = ""

    @property
    def graded(self) -> bool:
        """Whether a backward can follow."""
        return torch.is_grad_enabled() and any(operand.requires_grad for operand in self.operands.values())


@dataclass(frozen=True)
class CheckRules:
    """How the calls of a framework's layers are compared.

    limit
        The largest error, None: by the dtype.
    by
        Whose the original code is, in words.
    beside_run
        Returns a context in which the original code leaves no trace in the framework's state.
    """

    limit: float | None
    by: str
    beside_run: Callable[[], AbstractContextManager[None]]


class Check:
    """The check of a call: of its forward and, if a backward follows, of its backward."""

    def __init__(self, call: CheckedCall, number: int, rules: CheckRules) -> None:
        """Prepare the check of `call`, the layer's `number`-th."""
        x = call.operands["input"]
        self._call: CheckedCall | None = call
        self._group, self._path, self._number, self._rules = call.group, call.path, number, rules
        self._graded, self._device, self._dtype = call.graded, x.device, operand_dtype(x)
        self._autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        self._limit = default_limit(self._dtype) if rules.limit is None else rules.limit
        shapes = {name: f"{name} {list(operand.shape)}" for name, operand in call.operands.items()}
        self._operands = f"{', '.join(shapes.values())}, {self._dtype}"
        self._alike = ", ".join(text for name, text in shapes.items() if name not in call.of_rank)
        self._record = LEDGER.record(call.layer, call.name)
        self._operators: OperatorsRan | None = None
        self._backward_operands: Tensors = {}
        self._output_gradients: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, Gradient | str] = {}
        self._handles: list[RemovableHandle] = []
        self._random_states: list[torch.Tensor] = []
        LEDGER.rank = dist.get_rank()

    def run(self, call: CheckedCall) -> Any:
        """Run the call and the original code, and compare their results; return what the call returned."""
        self._confirm_same_call(call)
        self._random_states = random_states(self._device)  # the class of a layer may drop elements
        returned = call.run(self._begin if self._graded else None)
        with hide_from_selective_checkpoint(), torch.set_grad_enabled(self._graded):
            self._operators = call.operators()
            results = call.results(returned)
            with self._beside_run():
                expected = {name: y.detach() for name, y in call.original(self._aliases(call)).items()}
            self._judge("forward", {name: (y.detach(), expected[name], 0.0) for name, y in results.items()})
            if self._graded:
                self._hook(call, results)
        return returned

    def _hook(self, call: CheckedCall, results: Tensors) -> None:
        """Have autograd give the gradients of results and operands to this check."""
        for name, y in results.items():
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(functools.partial(self._keep_output_gradient, name, y.output_nr))
        for name, operand in call.operands.items():
            if operand.requires_grad and name in call.inside:
                keep = functools.partial(self._keep_inside, name)
                self._handles.append(operand.register_hook(keep))  # type: ignore[no-untyped-call]
            elif operand.requires_grad:
                node, index = gradient_source(results.values(), operand, call.operands.values())
                node.register_hook(functools.partial(self._keep_gradient, name, index))

    def _begin(self, kept: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Keep the operands from which the call's backward starts."""
        if self._call is not None:
            self._backward_operands = self._call.backward_operands(kept, weight)
            self._call.gradients.begin()

    def _keep_output_gradient(self, name: str, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradient of a result."""
        gradient = gradients[index]
        if self._call is not None and gradient is not None:
            self._output_gradients[name] = gradient.detach()

    def _keep_gradient(self, name: str, index: int, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        """Keep a gradient before it is accumulated or sent, and compare when all gradients have arrived."""
        call = self._call
        if call is None or not self._output_gradients:  # a second backward of a retained graph
            return
        self._gradients[name] = call.gradients.read(name, gradients[index])
        wanted = {name for name, operand in call.operands.items() if operand.requires_grad}
        if wanted - call.inside <= self._gradients.keys():
            self._gradients = {**dict.fromkeys(wanted, (None, 0.0)), **self._gradients}
            self._compare_gradients(call)

    def _keep_inside(self, name: str, gradient: torch.Tensor) -> None:
        """Keep the gradient of a parameter that is accumulated while the call's backward runs, not another call's."""
        call = self._call
        if call is not None and self._output_gradients:
            self._gradients[name] = call.gradients.read(name, gradient.detach())

    def _compare_gradients(self, call: CheckedCall) -> None:
        """Run the original forward and backward, and compare its gradients with those of the call."""
        aliases = self._aliases(call)
        wanted = [alias for alias in aliases.values() if alias.requires_grad]
        with torch.enable_grad(), self._beside_run():
            results = call.original(aliases)
            given = {results[name]: dy for name, dy in self._output_gradients.items() if results[name].requires_grad}
            by_original = torch.autograd.grad(
                list(given), wanted, list(given.values()), allow_unused=True, materialize_grads=True
            )
        gradients, self._gradients, self._output_gradients = self._gradients, {}, {}
        while self._handles:
            self._handles.pop().remove()
        self._call, self._backward_operands = None, {}
        pairs: dict[str, Pair] = {}
        for name, expected in zip((name for name in aliases if aliases[name].requires_grad), by_original, strict=True):
            gradient = gradients[name]
            if isinstance(gradient, str):
                LEDGER.note(f"{self._record.layer}: the {name} gradient {gradient} and is not checked")
            else:
                by_call, rounding = gradient
                by_call = torch.zeros_like(expected) if by_call is None else by_call
                pairs[f"{name} gradient"] = (by_call, expected, rounding)
        self._judge("backward", pairs)

    def _aliases(self, call: CheckedCall) -> dict[str, torch.Tensor]:
        """Return aliases of the operands; in backward of those that the call's backward has."""
        aliases = {name: self._backward_operands.get(name, x).detach() for name, x in call.operands.items()}
        if self._graded:
            for name, operand in call.operands.items():
                aliases[name].requires_grad_(operand.requires_grad)
        return aliases

    @contextmanager
    def _beside_run(self) -> Iterator[None]:
        """Run the original code as the call ran, from the same random states, hidden from the run: these, hooks, and
        autocast's cache.
        """
        enabled, dtype = self._autocast
        autocast = torch.autocast(self._device.type, dtype, enabled, cache_enabled=False)
        with without_trace(self._device, self._random_states), autocast, self._rules.beside_run():
            yield

    def _confirm_same_call(self, call: CheckedCall) -> None:
        """Raise `VerificationError` unless every rank of the group has come to the check of the same call."""
        alike = {name: operand for name, operand in call.operands.items() if name not in call.of_rank}
        graded = ", ".join(f"of {name} {operand.requires_grad}" for name, operand in alike.items())
        mine = f"call {self._number} of a {self._record.kind}: {self._alike}, {self._dtype}; "
        mine += f"gradients {graded}" if self._graded else "no gradients"
        calls_by_rank = store_all_gather(
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

    def _judge(self, direction: str, pairs: dict[str, Pair]) -> None:
        """Compare the pairs; raise on every rank if a rank has an error over the limit."""
        apart = {quantity: difference(*pair) for quantity, pair in pairs.items()}
        for quantity, apart_by in apart.items():
            if apart_by.skipped:
                where = f"{self._record.layer}: where the original's {quantity} is not finite"
                LEDGER.note(f"{where} it is not compared")
        errors = {quantity: apart_by.error for quantity, apart_by in apart.items()}
        over = {quantity: error for quantity, error in errors.items() if not error <= self._limit}
        worst = max(over, key=lambda quantity: over[quantity], default=None)
        failure = None if worst is None else self._failure(direction, worst, pairs[worst], apart[worst])
        what = f"the check of the {direction} of call {self._number} of {self._record.layer}"
        reports = store_all_gather(self._group, what, {"errors": errors, "failure": failure}, VerificationError)
        self._record.add(direction, [report["errors"] for report in reports.values()], self._limit)
        failed = [report for report in reports.values() if report["failure"]]
        if failed:
            raise LEDGER.fail(max(failed, key=lambda report: max(report["errors"].values()))["failure"])

    def _failure(self, direction: str, quantity: str, pair: Pair, apart: Difference) -> str:
        actual, expected, _ = pair
        by = self._rules.by
        if actual.shape == expected.shape:
            place, value, original = worst_place(actual, expected)
            wrong = (
                f"its error is {apart.error:.2e} of the largest magnitude {apart.scale:.3g}, more than {self._limit:g} "
                f"(verify_limit); worst at {place} of {list(actual.shape)}: {value:.6g}, by {by} {original:.6g}"
            )
        else:
            wrong = f"its shape is {list(actual.shape)}, by {by} {list(expected.shape)}"
        assert self._operators is not None
        return (
            f"{self._record.layer} ({self._record.kind}, {self._path}): the {quantity} of call "
            f"{self._number} is wrong on rank {dist.get_rank()} of {describe(self._group)}: {wrong}. Called with "
            f"{self._operands}. {self._operators(direction)}"
        )


@dataclass
class _Calls:
    """A layer's number of calls, and the calls left before the next check, with (True) and without gradients."""

    total: int = 0
    left: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


class Verifier:
    """Checks the first call of each patched layer, then every N-th call."""

    def __init__(
        self, every: int, confirm: Callable[[dist.ProcessGroup], Callable[[], None]], rules: CheckRules
    ) -> None:
        """Count from zero; ``confirm(group)()`` compares the settings of the group's ranks."""
        self._every, self._confirm, self._rules = every, confirm, rules
        self._calls: WeakKeyDictionary[torch.nn.Module, _Calls] = WeakKeyDictionary()

    def run(self, call: CheckedCall) -> Any:
        """Run the call; if its check is due, also run the original and compare.

        Calls with and without gradients are counted separately: activation recomputation alternates between the two,
        so an even N would check only one kind. If a due call does not reach its check (recomputation may stop early),
        the next call is due.
        """
        calls = self._calls.setdefault(call.layer, _Calls())
        calls.total += 1
        graded = call.graded
        if calls.left[graded]:
            calls.left[graded] -= 1
            return call.run(None)
        if is_capturing():
            LEDGER.note("calls captured in a graph are not checked")
            return call.run(None)
        self._confirm(call.group)()
        returned = Check(call, calls.total, self._rules).run(call)
        calls.left[graded] = self._every - 1
        return returned


@dataclass(frozen=True, kw_only=True)
class CheckedLinear:
    """A call of a linear layer that is checked.

    kind
        "column" or "row".
    x, weight
        What the layer multiplies.
    known
        What is known of the call.
    reduces
        Whether the input gradient of a column layer is summed.
    """

    layer: Any
    kind: str
    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup
    settings: Settings
    known: Known
    sequence_parallel: bool
    reduces: bool = True

    def beside(
        self,
        original: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        run: Callable[[Begin | None], Any],
        **options: Any,
    ) -> CheckedCall:
        """Return the call beside ``original(x, weight)``; `run` returns the output, alone or first.

        options: those of `CheckedCall` beside the operands.
        """
        backward_operands = functools.partial(linear_operands, self.x.shape, self.group.rank())
        return CheckedCall(
            layer=self.layer,
            path=f"{self.kind}, sequence parallel" if self.sequence_parallel else self.kind,
            group=self.group,
            operands={"input": self.x, "weight": self.weight},
            run=run,
            results=output_of,
            original=lambda operands: {"output": original(operands["input"], operands["weight"])},
            operators=lambda: functools.partial(self._ran, self.known, operand_dtype(self.x)),
            **{"backward_operands": backward_operands, **options},
        )

    def _ran(self, known: Known, dtype: torch.dtype, direction: str) -> str:
        """Return a sentence with the kernels and chunks of the pass's operators."""
        (n, k), rows, device = self.weight.shape, self.x.shape[:-1].numel(), self.x.device.type
        ranks, parallel = self.group.size(), self.sequence_parallel
        shape = LayerShape(self.kind, rows, k, n, ranks, parallel, dtype, device, self.reduces)
        known = known_in_call(self.settings, known, shape, direction)
        operator = shape.operator(direction) if direction == FORWARD or self.x.requires_grad else None
        return f"Its {direction} ran {'no operator' if operator is None else self._operator(operator, known)}"

    def _operator(self, operator: LayerOperator, known: Known) -> str:
        matmul, int8 = operator.matmul, int8_weight(self.layer)
        if int8 is not None and matmul.operator == ALL_REDUCE:
            matmul = with_scales(matmul, int8)
        # The operator has run, so its decision is cached and needs no communication.
        decision = decision_for(matmul, self.group, self.settings, known, self.weight.device, operator.layout)
        return f"{matmul.in_words} by kernel {decision.kernel} in chunks of rows {list(decision.sizes)}"


def output_of(returned: Any) -> Tensors:
    """Return the results of a call that returns its output, alone or first."""
    return {"output": returned[0] if isinstance(returned, tuple) else returned}


def linear_operands(
    shape: torch.Size, rank: int, kept: torch.Tensor | None, weight: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the operands that a linear layer's backward has: its input has `shape`, and `rank` is this rank's number.

    `kept` and `weight` are what backward starts with (`Begin`). A saved-tensor hook may have given other tensors than
    those of forward, and the weight's data may have been replaced. `kept` is the input, the rows that were gathered
    from all ranks, or this rank's features of it.
    """
    operands = {} if weight is None else {"weight": weight}
    if kept is None:
        return operands
    if kept.numel() < shape.numel():  # the other features are not read
        x = kept.new_zeros(shape)
        x[..., rank * kept.shape[-1] : (rank + 1) * kept.shape[-1]] = kept
        return operands | {"input": x}
    own = rank if kept.numel() > shape.numel() else 0
    return operands | {"input": kept.reshape(-1, *shape)[own]}


def gradient_source(
    results: Iterable[torch.Tensor], x: torch.Tensor, operands: Iterable[torch.Tensor]
) -> tuple[Any, int]:
    """Return the graph node that computes the gradient of x, and the index of this gradient among its outputs.

    Searches from `results`; does not search behind `operands`. Hooking an alias of x would be simpler, but the layer
    would then save the alias, and hooks and swaps of ``x.data`` would act differently from a run without the check.
    """
    target = get_gradient_edge(x)
    seen = {get_gradient_edge(operand).node for operand in operands if operand.requires_grad}
    pending: list[Any] = [y.grad_fn for y in results]
    while pending:
        node = pending.pop()
        for index, (next_node, output_nr) in enumerate(node.next_functions):
            if next_node is target.node and output_nr == target.output_nr:
                return node, index
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)
    raise AssertionError("the call's results do not depend on this operand")
