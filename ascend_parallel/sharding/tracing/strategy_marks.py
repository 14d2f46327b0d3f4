"""Strategies that `shard` leaves on function calls. While a model is traced, they mark the operator of the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import resolve_name

from ascend_parallel.sharding.graph import Graph, Mark

try:
    from torch.fx.traceback import annotate
except ImportError as error:
    raise ImportError(
        f"auto parallel (ascend_parallel.sharding and .training) needs a newer torch than {torch.__version__}, which "
        "has no torch.fx.traceback.annotate: 2.13 and 2.15 are tested; patches of frameworks run without it"
    ) from error

Params = ParamSpec("Params")
Result = TypeVar("Result")
KEY = "ascend_parallel_mark"
_NOTE: ContextVar[Callable[[Any], None] | None] = ContextVar("ascend_parallel_note_mark", default=None)


def marking(function: Callable[Params, Result], in_strategy: Any, out_strategy: Any) -> Callable[Params, Result]:
    """Return a wrapper of `function` that marks the operator of the call while a model is traced.

    While a model is traced, the wrapper raises `ValueError` if the call runs several operators or none.
    """

    @wraps(function)
    def marked(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not torch.compiler.is_exporting():
            return function(*args, **kwargs)
        if (note := _NOTE.get()) is not None:
            note((_name(function), repr(in_strategy), repr(out_strategy)))
        mode = get_proxy_mode()
        if mode is None:
            return function(*args, **kwargs)
        mark, nodes = Mark(_name(function), (in_strategy, out_strategy)), mode.tracer.graph.nodes
        before = len(nodes)
        with annotate({KEY: mark}):
            result = function(*args, **kwargs)
        new = [str(node.target) for node in itertools.islice(reversed(nodes), len(nodes) - before)]
        _check_single(mark, new[::-1])
        return result

    return marked


@contextmanager
def noting_marks(note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with the function and the strategies of each marked call inside the context."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)


def mark_of(node: torch.fx.Node) -> Mark | None:
    """Return the mark that a call left on a traced node."""
    mark = (node.meta.get("custom") or {}).get(KEY)
    return mark if isinstance(mark, Mark) else None


def check_marks(graph: Graph) -> None:
    """Raise `ValueError` if tracing split the operator of a marked call into several operators."""
    ran: dict[Mark, list[str]] = {}
    for node in graph.nodes.values():
        if node.call is not None and node.mark is not None:
            ran.setdefault(node.mark, []).append(node.call.name)
    for mark, names in ran.items():
        _check_single(mark, names)


def _check_single(mark: Mark, targets: Iterable[str]) -> None:
    ran = [name for name in targets if "." in name and not name.startswith("aten._assert")]
    if len(ran) != 1:
        what = f"{len(ran)} operators ({', '.join(ran)})" if ran else "no operator"
        raise ValueError(f"{mark}: its call runs {what}: give the strategy to a function that runs 1 operator")


def _name(function: Callable[..., Any]) -> str:
    name = resolve_name(function) or getattr(function, "__qualname__", type(function).__name__)
    return str(name).replace("torch.nn.functional.", "F.").replace("torch.functional.", "torch.")
