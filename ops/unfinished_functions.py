"""Autograd functions of others that work row by row, run on the rows that have arrived, forward and backward.

A fused norm or activation of training is a `torch.autograd.Function` around a kernel that takes raw pointers: torch
would refuse it unfinished rows. `RowFunction` stands in place of its forward and its backward. The function's own code
runs chunk by chunk, as `by_rows` runs a module, with a context of this file in place of autograd's. Autograd records
the function as always, with what its forward saves: so backward is the function's own, on all rows or on some.

How a function deals with rows is found by two calls with zeros, of two numbers of rows, once for each kind of call:
which of what it saves and returns has rows. What cannot be told so, such as an attribute that depends on the number of
rows, has the function run on all rows, once they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished, given_away, once_all, plain_tensor
from ascend_parallel.ops.unfinished_modules import by_rows, rows_to_come
from ascend_parallel.ops.without_modes import without_grad_and_modes

# Rows of the two calls with zeros.
TRIED = (16, 8)
# The attributes of autograd's context that keep the call for backward, and tell that a method of the function's runs.
CALL, RUNNING = "_ascend_parallel_call", "_ascend_parallel_running"


class _NotByRowsError(Exception):
    """The function does what is not known to work row by row."""


class Context:
    """Stands for autograd's context of a function: takes what a forward saves, gives it to a backward."""

    def __init__(
        self, needs: Sequence[bool], saved: Sequence[Any] = (), attributes: dict[str, Any] | None = None
    ) -> None:
        """Hold what a backward asks for; a forward sets attributes of its own beside these."""
        vars(self).update(attributes or {})
        self.needs_input_grad = tuple(needs)
        self.saved_tensors = tuple(saved)

    def save_for_backward(self, *tensors: Any) -> None:
        """Note what the backward needs."""
        self.saved_tensors = tensors

    def mark_dirty(self, *_: Any) -> None:
        """Refuse: rows that are to come cannot be changed before."""
        raise _NotByRowsError

    mark_non_differentiable = set_materialize_grads = save_for_forward = mark_dirty

    def attributes(self) -> dict[str, Any]:
        """Return what a forward has set."""
        own = ("needs_input_grad", "saved_tensors")
        return {name: value for name, value in vars(self).items() if name not in own}


class _Like(NamedTuple):
    """A tensor among the arguments of a call."""

    shape: Sizes
    dtype: torch.dtype
    device: torch.device


class _Constant(NamedTuple):
    """Another argument of a call."""

    kind: type
    value: Any


@dataclass(frozen=True)
class _Rows:
    """The shape of a tensor with rows: [rows * times, *rest]."""

    times: int
    rest: Sizes

    def shape(self, rows: int) -> torch.Size:
        """Return the shape for a number of rows."""
        return torch.Size((rows * self.times, *self.rest))

    @staticmethod
    def of(first: Sizes, second: Sizes) -> _Rows:
        """Return the shape behind the shapes of the two calls with zeros."""
        if not first or not second or first[1:] != second[1:] or first[0] * TRIED[1] != second[0] * TRIED[0]:
            raise _NotByRowsError
        if not first[0] or first[0] % TRIED[0]:
            raise _NotByRowsError
        return _Rows(first[0] // TRIED[0], tuple(first[1:]))


@dataclass(frozen=True)
class _Saved:
    """A saved tensor: an argument, a result or a new one, by its place among these; or None."""

    source: str  # "argument", "result", "new" or "none"
    place: int = 0
    rows: _Rows | None = None  # None: it has no rows


@dataclass(frozen=True)
class _Gradient:
    """A gradient with rows [rows, *rest]; or of `shape`; or the same tensor as that of number `same_as`; or None."""

    rest: Sizes | None = None
    shape: Sizes | None = None
    dtype: torch.dtype = torch.float32
    same_as: int | None = None


class _Key:
    """The forward or backward of a plan, for `by_rows`."""


@dataclass(frozen=True)
class _Plan:
    """How a function deals with rows in one kind of call.

    results     [rows, *rest] each
    kind        the sequence that holds several results; None: it returns one tensor
    attributes  what its forward sets in the context; a `_Rows` stands for a shape
    """

    results: int
    kind: type | None
    saved: tuple[_Saved, ...]
    attributes: dict[str, Any]
    gradients: tuple[_Gradient, ...]
    forward: _Key = field(default_factory=_Key)
    backward: _Key = field(default_factory=_Key)

    def context(self, needs: Sequence[bool], saved: Sequence[Any], rows: int) -> Context:
        """Return a context for a backward of so many rows, with saved tensors in any shape."""
        shaped = [
            x if each.rows is None else x.reshape(each.rows.shape(rows)).contiguous()
            for x, each in zip(saved, self.saved, strict=True)
        ]
        return Context(needs, shaped, self.attributes_of(rows))

    def attributes_of(self, rows: int) -> dict[str, Any]:
        """Return what a forward of so many rows sets."""
        return {
            name: value.shape(rows) if isinstance(value, _Rows) else value for name, value in self.attributes.items()
        }


@dataclass(frozen=True, eq=False)
class _Call:
    """What backward needs of a call.

    arguments  without values
    needs      which arguments need gradients
    autocast   the type of device and the dtype, if it was on
    by_rows    the plan and the leading dimensions of a call that ran by rows
    """

    arguments: tuple[_Like | _Constant, ...]
    needs: tuple[bool, ...]
    autocast: tuple[str, torch.dtype] | None
    by_rows: tuple[_Plan, torch.Size] | None = None

    def casting(self) -> AbstractContextManager[object]:
        """Return a context with the autocast of the call, without which rows that come later are computed."""
        return nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])


class RowFunction:
    """What stands in place of the forward and backward of an autograd function that works row by row."""

    def __init__(
        self, name: str, forward: Callable[..., Any], backward: Callable[..., Any], places: Sizes, *, writes: bool
    ) -> None:
        """Run a function's own `forward` and `backward`; its arguments `places` have rows; as in `RowWiseFunction`."""
        self._name, self._forward, self._backward = name, forward, backward
        self._places, self._writes = places, writes
        self._plans: dict[Hashable, _Plan | None] = {}

    def forward(self, ctx: Any, *args: Any) -> Any:
        """Return the function's results: unfinished where rows of its arguments are to come."""
        call = self._call(ctx, args)
        setattr(ctx, CALL, call)
        first = next((x for x in args if isinstance(x, UnfinishedTensor)), None)
        if first is None:
            return _run(self._forward, ctx, *args)
        lead = first.shape[: first._rows.lead]
        places = self._places_of(args)
        inputs = _flat([args[place] for place in places], lead)
        plan = None if inputs is None or not rows_to_come(inputs) else self._plan(call, len(lead))
        if plan is None:
            return _run(self._forward, ctx, *(finished(x) if torch.is_tensor(x) else x for x in args))
        assert inputs is not None and call is not None
        # Operands as small as a row, such as a norm's weight, may change before the rows come.
        kept = [x.clone() if torch.is_tensor(x) and place not in places else x for place, x in enumerate(args)]
        new = [place for place, each in enumerate(plan.saved) if each.source == "new"]

        def run(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, context = list(kept), Context(call.needs)
            for place, x in zip(places, rows, strict=True):
                given[place] = x
            with call.casting():
                results = _listed(self._forward(context, *given))
            saved = [context.saved_tensors[place] for place in new]
            return (*results, *(x.reshape(rows[0].shape[0], -1, *x.shape[1:]) for x in saved))

        made = by_rows(plan.forward, run, *inputs, keeps=False, name=self._name)
        results = [x.view(*lead, *x.shape[1:]) for x in made[: plan.results]]
        sources = {"argument": args, "result": results, "new": made[plan.results :], "none": (None,)}
        ctx.save_for_backward(*(sources[each.source][each.place] for each in plan.saved))
        vars(ctx).update(plan.attributes_of(lead.numel()))
        setattr(ctx, CALL, replace(call, by_rows=(plan, lead)))
        return results[0] if plan.kind is None else plan.kind(results)

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of the arguments: those with rows unfinished where rows of `gradients` are to come."""
        call: _Call | None = getattr(ctx, CALL, None)
        first = next((x for x in gradients if isinstance(x, UnfinishedTensor)), None)
        if call is None or (first is None and call.by_rows is None):
            return _run(self._backward, ctx, *gradients)
        saved = ctx.saved_tensors
        plan, lead = (None, torch.Size(())) if call.by_rows is None else call.by_rows
        if first is not None and not torch.is_grad_enabled():
            lead_here = first.shape[: first._rows.lead]
            inputs = _flat(gradients, lead_here)
            if inputs is not None and rows_to_come(inputs):
                known = plan if lead_here == lead else self._plan(call, len(lead_here))
                if known is not None:
                    return self._by_rows(known, call, inputs, saved, lead_here)
        plain = given_away if self._writes and not torch.is_grad_enabled() else plain_tensor
        saved = [plain(x) if torch.is_tensor(x) else x for x in saved]
        gradients = tuple(plain(x) if torch.is_tensor(x) else x for x in gradients)
        if plan is not None:
            return self._whole(plan, call, gradients, saved, lead)
        attributes = {name: value for name, value in vars(ctx).items() if name not in (CALL, RUNNING)}
        context = Context(call.needs, saved, attributes)
        made = self._backward(context, *gradients)
        vars(ctx).update(context.attributes())
        return made

    def _whole(
        self, plan: _Plan, call: _Call, gradients: Sequence[Any], saved: Sequence[Any], lead: torch.Size
    ) -> tuple[Any, ...]:
        """Return the gradients of the arguments of a call that ran by rows, from finished tensors."""
        m = lead.numel()
        flat = (x.reshape(m, *x.shape[len(lead) :]) if torch.is_tensor(x) else x for x in gradients)
        made = _listed(self._backward(plan.context(call.needs, saved, m), *flat))
        return tuple(
            x if x is None or each.shape is not None else x.reshape(*lead, *x.shape[1:])
            for x, each in zip(made, _resolved(plan.gradients), strict=True)
        )

    def _by_rows(
        self, plan: _Plan, call: _Call, gradients: Sequence[torch.Tensor], saved: Sequence[Any], lead: torch.Size
    ) -> tuple[Any, ...]:
        """Return the gradients of the arguments; those without rows once all rows are there, by one whole call."""
        m, count = gradients[0].shape[0], len(gradients)
        with_rows = {place: each.rows for place, each in enumerate(plan.saved) if each.rows is not None}
        kept = [x.clone() if torch.is_tensor(x) and place not in with_rows else x for place, x in enumerate(saved)]
        inputs = [*gradients, *(saved[place].reshape(m, -1, *rows.rest) for place, rows in with_rows.items())]
        of_rows = [place for place, each in enumerate(plan.gradients) if each.rest is not None]
        sums = [place for place, each in enumerate(plan.gradients) if each.shape is not None]

        def run(wanted: Sequence[int], rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            there = list(kept)
            for place, x in zip(with_rows, rows[count:], strict=True):
                there[place] = x
            context = plan.context(call.needs, there, rows[0].shape[0])
            with call.casting():
                made = _listed(self._backward(context, *rows[:count]))
            return tuple(made[place] for place in wanted)

        def run_all(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(sums, [x.clone() for x in rows] if self._writes else rows)

        made: dict[int | None, Any] = {}
        if of_rows:
            found = by_rows(
                plan.backward,
                lambda *rows: run(of_rows, rows),
                *inputs,
                writes=self._writes,
                keeps=False,
                name=f"the backward of {self._name}",
            )
            made.update((place, x.view(*lead, *x.shape[1:])) for place, x in zip(of_rows, found, strict=True))
        if sums:
            shapes = [(each.shape, each.dtype) for each in plan.gradients if each.shape is not None]
            made.update(zip(sums, once_all(self._name, run_all, inputs, shapes, inputs), strict=True))
        return tuple(
            made.get(place if each.same_as is None else each.same_as) for place, each in enumerate(plan.gradients)
        )

    def _places_of(self, args: Sequence[Any]) -> list[int]:
        return [place for place in self._places if place < len(args) and torch.is_tensor(args[place])]

    def _call(self, ctx: Any, args: Sequence[Any]) -> _Call | None:
        """Describe a call; None: it has arguments that are not known to work."""
        if not self._places_of(args) or not all(torch.is_tensor(x) or isinstance(x, Hashable) for x in args):
            return None
        device = args[self._places_of(args)[0]].device.type
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        arguments = tuple(
            _Like(x.shape, x.dtype, x.device) if torch.is_tensor(x) else _Constant(type(x), x) for x in args
        )
        return _Call(arguments, tuple(ctx.needs_input_grad), autocast)

    def _plan(self, call: _Call | None, lead: int) -> _Plan | None:
        """Return how the function deals with rows, of which `lead` dimensions count; None: not by rows."""
        if call is None:
            return None
        likes = tuple(
            each._replace(shape=each.shape[lead:]) if isinstance(each, _Like) and place in self._places else each
            for place, each in enumerate(call.arguments)
        )
        key = likes, call.needs, call.autocast
        if key not in self._plans:
            try:
                with without_grad_and_modes(), call.casting():
                    self._plans[key] = _plan_of(*(self._tried(likes, call.needs, rows) for rows in TRIED))
            except Exception:  # noqa: BLE001 - it takes no such rows; of all rows its own error is raised
                self._plans[key] = None
        return self._plans[key]

    def _tried(self, likes: Sequence[_Like | _Constant], needs: tuple[bool, ...], rows: int) -> _Trial:
        """Call the function with so many rows of zeros."""
        args: list[Any] = []
        for place, like in enumerate(likes):
            if isinstance(like, _Constant):
                args.append(like.value)
                continue
            shape = (rows, *like.shape) if place in self._places else like.shape
            args.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        context = Context(needs)
        results = self._forward(context, *args)
        listed, kind = _listed(results), None if torch.is_tensor(results) else type(results)
        if any(vars(x) for x in args if torch.is_tensor(x)):
            raise _NotByRowsError  # what is noted on a tensor would be lost
        saved, sources = context.saved_tensors, [_source(x, args, listed) for x in context.saved_tensors]
        gradients: Sequence[Any] = ()
        if any(needs):
            in_backward = Context(needs, saved, context.attributes())
            gradients = _listed(self._backward(in_backward, *map(torch.zeros_like, listed)))
        shapes = [None if x is None else tuple(x.shape) for x in saved]
        return _Trial(listed, kind, sources, shapes, context.attributes(), gradients)


class _Trial(NamedTuple):
    """What a call with zeros has made."""

    results: Sequence[torch.Tensor]
    kind: type | None
    sources: list[tuple[str, int]]
    shapes: list[Sizes | None]
    attributes: dict[str, Any]
    gradients: Sequence[Any]


def _plan_of(first: _Trial, second: _Trial) -> _Plan:
    """Return the plan that follows from two calls with zeros; raises `_NotByRowsError` if none does."""
    if first.sources != second.sources or first.attributes.keys() != second.attributes.keys():
        raise _NotByRowsError
    for x, y in zip(first.results, second.results, strict=True):
        if not torch.is_tensor(x) or _Rows.of(x.shape, y.shape).times != 1:
            raise _NotByRowsError
    saved: list[_Saved] = []
    count = 0
    for (source, place), shape, other in zip(first.sources, first.shapes, second.shapes, strict=True):
        rows = None if shape is None or other is None or shape == other else _Rows.of(shape, other)
        if source == "new":
            if rows is None:
                raise _NotByRowsError
            place, count = count, count + 1
        saved.append(_Saved(source, place, rows))
    attributes = {name: _attribute(value, second.attributes[name]) for name, value in first.attributes.items()}
    gradients = [_gradient(first.gradients, second.gradients, place) for place in range(len(first.gradients))]
    return _Plan(len(first.results), first.kind, tuple(saved), attributes, tuple(gradients))


def _attribute(value: Any, other: Any) -> Any:
    """Return an attribute that a forward sets, or the `_Rows` behind a shape."""
    if type(value) is not type(other) or torch.is_tensor(value):
        raise _NotByRowsError
    if value == other:
        return value
    if not isinstance(value, torch.Size):
        raise _NotByRowsError
    return _Rows.of(value, other)


def _gradient(made: Sequence[Any], others: Sequence[Any], place: int) -> _Gradient:
    x, y = made[place], others[place]
    if x is None and y is None:
        return _Gradient()
    if not torch.is_tensor(x) or not torch.is_tensor(y):
        raise _NotByRowsError
    for earlier in range(place):
        if made[earlier] is x:
            return _Gradient(same_as=earlier)
    if x.shape == y.shape:
        return _Gradient(shape=tuple(x.shape), dtype=x.dtype)
    rows = _Rows.of(x.shape, y.shape)
    if rows.times != 1:
        raise _NotByRowsError
    return _Gradient(rest=rows.rest, dtype=x.dtype)


def _resolved(gradients: Sequence[_Gradient]) -> list[_Gradient]:
    """Return the gradients, each that is the same tensor as an earlier one as that is."""
    return [each if each.same_as is None else gradients[each.same_as] for each in gradients]


def _source(x: Any, args: Sequence[Any], results: Sequence[torch.Tensor]) -> tuple[str, int]:
    """Return the kind of a saved tensor, as in `_Saved`."""
    if x is None:
        return "none", 0
    for name, tensors in (("argument", args), ("result", results)):
        for place, other in enumerate(tensors):
            if torch.is_tensor(other) and (other.data_ptr(), other.numel(), other.dtype) == (
                x.data_ptr(),
                x.numel(),
                x.dtype,
            ):
                return name, place
    return "new", 0


def _flat(tensors: Sequence[Any], lead: torch.Size) -> list[torch.Tensor] | None:
    """Return tensors [*lead, ...] as [rows, ...]; None: one has other leading dimensions."""
    count = len(lead)
    if not all(torch.is_tensor(x) and x.shape[:count] == lead and x.dim() > count for x in tensors):
        return None
    return [x.reshape(lead.numel(), *x.shape[count:]) for x in tensors]


def _run(method: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    """Run a function's own method with autograd's context: a method of its base that it calls is the base's own."""
    setattr(ctx, RUNNING, True)
    try:
        return method(ctx, *args)
    finally:
        delattr(ctx, RUNNING)


def _listed(results: Any) -> Sequence[Any]:
    """Return the results of a function, one or several, as a sequence."""
    return (results,) if results is None or torch.is_tensor(results) else results
