"""Layers in programs of torch.compile: the original is part of a graph, or the overlapped layer runs between two.

A graph cannot have a process group. For an overlapped layer torch.compile ends its graph before the call, and begins
another behind it (a graph break); it never looks into this package. docs/compile.md.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ascend_parallel.ops.unfinished import UnfinishedTensor, plain_tensor
from ascend_parallel.patches.base import Function

COMPILED_AWAY = "compiled: the original runs"
# The attribute of a function that torch.compile or torch.compiler.disable has made, and that of the latter alone.
COMPILED_FROM, DISABLED = "_torchdynamo_orig_callable", "_torchdynamo_disable"
# What torch.compile calls for each function that runs between graphs; None: nothing is compiled.
GRAPH_CALLBACK = torch._C._dynamo.eval_frame.get_eval_frame_callback


class Compiled(enum.Enum):
    """How torch.compile compiles a layer, as far as the modules around it, and layers of its class, tell.

    Its tracing does not tell: torch.compile traces one of several blocks that are alike, and runs all of them by that.
    """

    NOT = "no module that has it is compiled"
    BY_FUNCTION = "nor is one, but a compiled function has called another layer of its class"
    IN_GRAPHS = "a module that has it is compiled, in graphs that may break"
    IN_ONE_GRAPH = "a module that has it is compiled, in a graph that must not break"


def at_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile call a function while it traces, as Python, and take its result as a constant.

    It is ``torch.compiler.assume_constant_result``, which imports torch's tracer.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@at_tracing
def in_whole_graph() -> bool:
    """Tell whether the graph that is traced must not break (``fullgraph=True``, export)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx()
    return bool(getattr(tracer, "one_graph", False) or getattr(tracer, "error_on_graph_break", False))


def between_graphs(run: Function, traced: Function, always: Callable[..., bool] = lambda *_: False) -> Function:
    """Return a function that is ``run``, before which torch.compile breaks its graph.

    traced
        What a graph has instead where it must not break.
    always
        Tells of the first argument, if there is one, whether a graph that may break has `traced` too. Where that breaks
        the graph itself, it is compiled in pieces, as without this function.
    """
    uncompiled = outside_graphs(run)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and GRAPH_CALLBACK() in (None, False):
            return run(*args, **kwargs)
        if always(*args[:1]) or (torch.compiler.is_compiling() and in_whole_graph()):
            return traced(*args, **kwargs)
        return uncompiled(*args, **kwargs)

    skip_frame(call)
    skip_frame(always)
    return call


def within_graphs(run: Function, traced: Function) -> Function:
    """Return a function that is `run`, and `traced` in what torch.compile compiles, in the pieces of that alone."""
    return between_graphs(run, traced, lambda *_: True)


def outside_graphs(run: Function) -> Function:
    """Return a function that is ``run``, into which torch.compile never looks; a graph gets finished results of it."""

    def finished_run(*args: Any, **kwargs: Any) -> Any:
        return _finished(run(*args, **kwargs))

    uncompiled = torch.compiler.disable(finished_run)  # type: ignore[no-untyped-call]

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or GRAPH_CALLBACK() not in (None, False):
            return uncompiled(*args, **kwargs)
        return run(*args, **kwargs)

    skip_frame(call)
    return call


def _finished(result: Any) -> Any:
    """Return the results of a layer with all their rows."""
    if isinstance(result, tuple):
        return tuple(_finished(each) for each in result)
    if isinstance(result, DTensor) and isinstance(result._local_tensor, UnfinishedTensor):
        local, (shape, stride) = plain_tensor(result.to_local()), (result.shape, result.stride())
        return DTensor.from_local(
            local, result.device_mesh, result.placements, run_check=False, shape=shape, stride=stride
        )
    return plain_tensor(result) if isinstance(result, torch.Tensor) else result


def skip_frame(function: Any) -> None:
    """Have torch.compile compile a function only as a part of its caller.

    Behind a graph break each function that is called is compiled by itself: this one would be once for each layer.
    """
    from torch._dynamo import eval_frame

    eval_frame.skip_code(function.__code__)


def runs_compiled(module: torch.nn.Module) -> bool:
    """Tell whether torch.compile made the call, the forward or another method of a module."""
    return bool(_compiled_methods(module))


def _compiled_methods(module: torch.nn.Module) -> list[Any]:
    """Return what torch.compile made of the call, the forward or other methods of a module."""
    methods = (*vars(module).values(), *vars(type(module)).values())
    return [each for each in methods if hasattr(each, COMPILED_FROM) and not hasattr(each, DISABLED)]


def _in_one_graph(compiled: Any) -> bool:
    """Tell whether what torch.compile made has to be one graph (``fullgraph=True``); an older torch does not tell."""
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None) or ()
    held = {} if code is None else dict(zip(code.co_freevars, cells, strict=True))
    context = held["self"].cell_contents if "self" in held else None
    return any(getattr(context, name, None) for name in ("fullgraph", "error_on_graph_break"))


def compiled_modules(model: torch.nn.Module) -> dict[int, Compiled]:
    """Return how torch.compile compiles modules as parts of `model`, or by themselves, by their ids."""
    found: dict[int, Compiled] = {}
    _add_compiled(model, Compiled.NOT, found)
    return found


def _add_compiled(module: torch.nn.Module, around: Compiled, found: dict[int, Compiled]) -> None:
    """Add a module and those inside; `around`: of the module that has it."""
    how, methods = around, _compiled_methods(module)
    if any(map(_in_one_graph, methods)):
        how = Compiled.IN_ONE_GRAPH
    elif methods and around is Compiled.NOT:
        how = Compiled.IN_GRAPHS
    if hasattr(module.forward, DISABLED):
        how = Compiled.NOT
    if how is not Compiled.NOT:
        found[id(module)] = how
    for child in module.children():
        _add_compiled(child, how, found)
