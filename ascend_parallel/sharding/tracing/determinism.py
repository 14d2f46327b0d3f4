"""Checks that a model's forward does the same in every run: a traced graph repeats the traced run.

The forward of a copy of the model runs twice with fake tensors, which compute nothing. The check compares the calls of
torch's functions with their constants, Python's and numpy's random states, and the modules' attributes. Where runs
differ, a third run finds the source line.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS, name_of
from ascend_parallel.sharding.tracing.grad_mode_scopes import autocast_switched_off
from ascend_parallel.sharding.tracing.model_files import calling_line, is_model_frame, is_of_fake_tensors, line_of
from ascend_parallel.sharding.tracing.same_blocks import ForwardNotes, replaced_forward

# Attributes that every nn.Module has.
MODULE_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
MAX_DEPTH = 4
REMEDY = "compute it with tensors, give it as an argument, or take it out of the forward"


class ForwardChangesError(ValueError):
    """The forward differs from run to run."""


@dataclass(frozen=True)
class CheckedForward:
    """What the runs of a forward have shown.

    only_in_python
        A side effect that a graph would leave out, such as "changes steps in every run"; or "".
    notes
        What the first run did; None if the forward could not be run by itself.
    failure
        Why it could not.
    """

    only_in_python: str = ""
    notes: ForwardNotes | None = None
    failure: str = ""


def checked_forward(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CheckedForward:
    """Run a copy of the model twice, and return what it did.

    Side effects are changed attributes (``self.steps += 1``) and hooks set on tensors. Raises `ForwardChangesError`
    for a forward that cannot be traced at all: it draws random numbers of Python or numpy, or its calls or constants
    differ from run to run. A model may be one that cannot be copied or run by itself; then runs are not compared.
    """
    with random_states_kept():
        try:
            return _RepeatedForward(model, args, kwargs).compare()
        except ForwardChangesError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
            message = next(iter(str(error).splitlines()), "")
            return CheckedForward(failure=f"{type(error).__name__}: {message}")


_Call = tuple[Callable[..., Any], tuple[Any, ...], str]  # the function, its constants, file and line of the call


class _RepeatedForward:
    """A copy of a model whose forward runs several times."""

    def __init__(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._name, self._fake = type(model).__name__, FakeTensorMode(allow_non_fake_inputs=True)
        self._model = _copied(model, self._fake)
        self._arguments = pytree.tree_map_only(torch.Tensor, self._fake.from_tensor, (tuple(args), dict(kwargs)))

    def compare(self) -> CheckedForward:
        """Run twice; see `checked_forward`."""
        states, notes = _random_states(), ForwardNotes({})
        first, between = self._noted(notes), _attributes(self._model)
        second, after = self._run(), _attributes(self._model)
        for name, state in _random_states().items():
            if state != states[name]:
                line = self._line(lambda name=name: _random_states()[name])  # type: ignore[misc]
                raise ForwardChangesError(
                    f"the forward of {self._name} draws from {name}{line}: a graph repeats the numbers that were drawn "
                    f"while tracing; {REMEDY}"
                )
        self._check_same_calls(first, second)
        for key, value in after.items():
            if between.get(key, value) != value:
                line = self._line(lambda key=key: _attributes(self._model).get(key))  # type: ignore[misc]
                return CheckedForward(f"changes {'.'.join(key).lstrip('.')} in every run{line}", notes)
        hooked = next((place for function, _, place in second if function in HOOKS), None)
        return CheckedForward("" if hooked is None else f"sets a hook on a tensor ({hooked})", notes)

    def _run(self) -> list[_Call]:
        (args, kwargs), recorder = self._arguments, _CallRecorder()
        with _compiling_state_context(), enable_python_dispatcher(), self._fake, recorder:
            self._model(*args, **kwargs)
        return recorder.calls

    def _noted(self, notes: ForwardNotes) -> list[_Call]:
        run = partial(notes.run, self._model)
        with autocast_switched_off(), notes.noting_blocks(self._model), replaced_forward(self._model, run):
            return self._run()

    def _check_same_calls(self, first: Sequence[_Call], second: Sequence[_Call]) -> None:
        for before, after in zip_longest(first, second):
            if before is None or after is None or before[:2] != after[:2]:
                was, now = (_shown(call) if call is not None else "it has ended" for call in (before, after))
                raise ForwardChangesError(
                    f"the forward of {self._name} differs from run to run: {now}, where in the run before {was}. A "
                    f"traced graph does the same every time; {REMEDY}"
                )

    def _line(self, state: Callable[[], Any]) -> str:
        """Run the forward again, and return the line that changes the state."""
        before, previous, changing = state(), "", ""

        def look(frame: FrameType, _event: str, _argument: Any) -> Any:
            nonlocal previous, changing
            if not changing and previous and state() != before:
                changing = previous
            previous = line_of(frame)
            return look

        tracing = sys.gettrace()
        sys.settrace(lambda frame, _event, _argument: look if is_model_frame(frame) else None)
        try:
            self._run()
        finally:
            sys.settrace(tracing)
        return f" ({changing})" if changing else ""


class _CallRecorder(TorchFunctionMode):
    """Records the calls of torch's functions inside the context, but those that read no element of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in METADATA_FUNCTIONS or is_of_fake_tensors():
            return function(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, dict(kwargs or {})))
        constants = tuple("a tensor" if isinstance(leaf, torch.Tensor) else _plain(leaf, {}) for leaf in leaves)
        self.calls.append((function, constants, calling_line()))
        return function(*args, **(kwargs or {}))


def _shown(call: _Call) -> str:
    function, constants, place = call
    return f"{place} calls {name_of(function)}({', '.join(map(str, constants))})"


def _copied(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """Return a copy with fake tensors, so that the runs leave the model itself unchanged."""
    tensors = [*model.parameters(), *model.buffers()]
    attributes = [value for module in model.modules() for value in vars(module).values()]
    tensors += [value for value in attributes if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(tensor): fake.from_tensor(tensor) for tensor in tensors})


def _attributes(model: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return the plain values among the modules' attributes, by (module path, attribute name)."""
    known: dict[int, Any] = {}
    return {
        (path, name): _plain(value, known)
        for path, module in _modules(model)
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES and not name.endswith("_hooks") and not isinstance(value, torch.nn.Module)
    }


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules with their paths, also modules in tuples, which are not registered as children (`WithLoss`)."""
    for path, module in model.named_modules():
        yield path, module
        items = (item for value in vars(module).values() if isinstance(value, tuple) for item in value)
        yield from ((path, item) for item in items if isinstance(item, torch.nn.Module))


def _plain(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """Return a comparable form of a value: numbers and text, also inside containers and objects."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    if isinstance(value, (float, complex, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or depth == MAX_DEPTH:
        return type(value)
    if id(value) not in known:
        known[id(value)] = type(value)  # a value that contains itself
        known[id(value)] = (type(value), tuple(_plain(item, known, depth + 1) for item in _contents(value)))
    return known[id(value)]


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python and numpy at the end of the context."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
