"""Whether a model's forward does the same every time: a traced graph repeats the one run that was traced.

The forward of a copy of the model runs twice with fake tensors, for which nothing is computed. Calls of torch's
functions and their constants, Python's and numpy's random numbers, and the modules' attributes are compared; where
something differs, a third run finds the line.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

log = logging.getLogger("ascend_parallel")

# What a module has beside attributes of its own.
OF_TORCH = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
DEEPEST = 4
# Where a line is not the model's: torch and Python's own library.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(copy.__file__).parent), "<")
SITE = str(Path(torch.__file__).parent.parent)
CURE = "compute it with tensors, give it as an argument, or take it out of the forward"


class ForwardChangesError(ValueError):
    """The forward does not do the same every time."""


def only_in_python(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what the forward does that a graph of it would leave out, such as "changes steps in every run"; or "".

    That are attributes that it changes (``self.steps += 1``), and hooks that it sets on tensors. Raises
    `ForwardChangesError` for what cannot be traced at all: random numbers of Python or numpy, and calls or constants
    that differ from run to run. What cannot be compared, since it cannot be copied or run by itself, is warned of.
    """
    with random_states_kept():
        try:
            return _Repeated(model, args, kwargs).compare()
        except ForwardChangesError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
            said = next(iter(str(error).splitlines()), "")
            name, kind = type(model).__name__, type(error).__name__
            log.warning("whether the forward of %s does the same every time was not checked: %s: %s", name, kind, said)
            return ""


_Noted = tuple[Callable[..., Any], tuple[Any, ...], str]  # a function, its constants, and where it was called


class _Repeated:
    """A copy of a model whose forward runs several times."""

    def __init__(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._name, self._fake = type(model).__name__, FakeTensorMode(allow_non_fake_inputs=True)
        self._model = _copied(model, self._fake)
        self._given = pytree.tree_map_only(torch.Tensor, self._fake.from_tensor, (tuple(args), dict(kwargs)))

    def compare(self) -> str:
        """Run twice; see `only_in_python`."""
        states = _random_states()
        first, between = self._run(), _attributes(self._model)
        second, after = self._run(), _attributes(self._model)
        for name, state in _random_states().items():
            if state != states[name]:
                line = self._line(lambda name=name: _random_states()[name])  # type: ignore[misc]
                raise ForwardChangesError(
                    f"the forward of {self._name} draws from {name}{line}: a graph has what was drawn once; {CURE}"
                )
        self._same_calls(first, second)
        for where, value in after.items():
            if between.get(where, value) != value:
                line = self._line(lambda where=where: _attributes(self._model).get(where))  # type: ignore[misc]
                return f"changes {'.'.join(where).lstrip('.')} in every run{line}"
        hooked = next((place for function, _, place in second if function in HOOKS), None)
        return "" if hooked is None else f"sets a hook on a tensor ({hooked})"

    def _run(self) -> list[_Noted]:
        (args, kwargs), noting = self._given, _Noting()
        with self._fake, noting:
            self._model(*args, **kwargs)
        return noting.calls

    def _same_calls(self, first: Sequence[_Noted], second: Sequence[_Noted]) -> None:
        for one, other in zip_longest(first, second):
            if one is None or other is None or one[:2] != other[:2]:
                was, now = (_shown(call) if call is not None else "it has ended" for call in (one, other))
                raise ForwardChangesError(
                    f"the forward of {self._name} differs from run to run: {now}, where in the run before {was}. A "
                    f"traced graph does the same every time; {CURE}"
                )

    def _line(self, state: Callable[[], Any]) -> str:
        """Run once more, and return the line after which the state is another."""
        before, seen, found = state(), "", ""

        def look(frame: FrameType, _event: str, _argument: Any) -> Any:
            nonlocal seen, found
            if not found and seen and state() != before:
                found = seen
            seen = _place(frame)
            return look

        tracing = sys.gettrace()
        sys.settrace(lambda frame, _event, _argument: look if _is_the_models(frame) else None)
        try:
            self._run()
        finally:
            sys.settrace(tracing)
        return f" ({found})" if found else ""


class _Noting(TorchFunctionMode):
    """Around one forward: notes the calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Noted] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = pytree.tree_leaves((args, dict(kwargs or {})))
        constants = tuple("a tensor" if isinstance(leaf, torch.Tensor) else _plain(leaf, {}) for leaf in leaves)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_the_models(frame):
            frame = frame.f_back
        self.calls.append((function, constants, "" if frame is None else _place(frame)))
        return function(*args, **(kwargs or {}))


def _is_the_models(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    is_librarys = name.startswith(LIBRARIES) and (name.startswith(LIBRARIES[0]) or not name.startswith(SITE))
    return not is_librarys and name != __file__


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _shown(call: _Noted) -> str:
    function, constants, place = call
    name = resolve_name(function) or getattr(function, "__qualname__", repr(function))
    return f"{place} calls {name}({', '.join(map(str, constants))})"


def _copied(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """Return a copy with fake tensors, so that whatever a forward does to the model is undone."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [one for module in model.modules() for one in vars(module).values() if isinstance(one, torch.Tensor)]
    return copy.deepcopy(model, {id(tensor): fake.from_tensor(tensor) for tensor in tensors})


def _attributes(model: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return the plain values that modules have as attributes, by the module's path and the attribute's name."""
    known: dict[int, Any] = {}
    return {
        (path, name): _plain(value, known)
        for path, module in _modules(model)
        for name, value in vars(module).items()
        if name not in OF_TORCH and not name.endswith("_hooks") and not isinstance(value, torch.nn.Module)
    }


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules with their paths, also one that runs inside of another without being its child (`WithLoss`)."""
    for path, module in model.named_modules():
        yield path, module
        inside = (value for value in vars(module).values() if isinstance(value, tuple))
        yield from ((path, one) for value in inside for one in value if isinstance(one, torch.nn.Module))


def _plain(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """Return what can be compared of a value: numbers, text, and what containers and objects have of these."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    if isinstance(value, (float, complex, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, type)) or depth == DEEPEST:
        return type(value)
    if id(value) not in known:
        known[id(value)] = type(value)  # what it has of itself
        known[id(value)] = (type(value), tuple(_plain(one, known, depth + 1) for one in _inside(value)))
    return known[id(value)]


def _inside(value: Any) -> list[Any]:
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
    """Have Python's and numpy's random numbers go on afterwards as if none had been drawn inside."""
    plain, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)
