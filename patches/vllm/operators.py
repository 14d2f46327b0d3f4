"""A row layer as one operator of vLLM's compiled graphs, which decides inside about the tokens of this call.

A graph is traced once, for every number of tokens, and nothing that waits may be in it. So the graph has one call for
the matmul and its all-reduce, and what the layer does eagerly runs inside: chunks, or the two calls of vLLM's own
forward for few tokens. As vLLM's attention, the operator finds its layer by name in the context of a forward.

vLLM's ranges of compilation (compile_ranges_endpoints, 0.32) cannot give small steps a graph without operators: all
ranges of a piece have one trace, and differ in passes of its backend alone, which CPUs do not use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ascend_parallel.ops.unfinished import finished
from ascend_parallel.patches.base import Function
from ascend_parallel.patches.vllm.chunks import LEAST_TOKENS
from ascend_parallel_autoload.frameworks import VLLM

NAME = "vllm_row_linear"
CONTEXT = "vllm.forward_context"
LINEAR = VLLM.module
PARALLEL_STATE = "vllm.distributed.parallel_state"
# The attribute of a layer that runs as an operator in compiled graphs: its name in the context of a forward.
LAYER_NAME = "ascend_parallel_name"
# The attribute of vLLM's class of row layers with the forward that operators run, while our patches are in force.
FORWARD = "ascend_parallel_forward"
# Passes of vLLM that fuse the all-reduces of a graph, under the names of its releases.
FUSING_PASSES = (
    "fuse_allreduce_rms",
    "enable_fi_allreduce_fusion",
    "enable_sp",
    "enable_sequence_parallelism",
)


def row_linear(x: torch.Tensor, features: int, layer: str) -> torch.Tensor:
    """Return the output [M, N] of the row layer of this name for x [M, K / R]; features: N."""
    module = _context().no_compile_layers[layer]
    if x.shape[0] < LEAST_TOKENS:
        return own_forward(module, x)
    forward = getattr(type(module), FORWARD, None)
    if forward is None:
        return own_forward(module, x)
    return finished(output_of(forward(module, x)))


def run_operators_by(forward: Function | None) -> None:
    """Have operators run a replacement of ``RowParallelLinear.forward``; None: vLLM's own code.

    Not what the class has by now: what a subclass, or a later patch of another package, does around it is in the graph.
    """
    kind = sys.modules[LINEAR].RowParallelLinear
    if forward is not None:
        setattr(kind, FORWARD, forward)
    elif FORWARD in vars(kind):
        delattr(kind, FORWARD)


def own_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a covered row layer as vLLM's own forward comes to it.

    Each layer passes here for each decoded token, so the sum is called as vLLM's operator of it does, without that.
    """
    bias = None if layer.skip_bias_add or layer.tp_rank > 0 else layer.bias
    y = layer.quant_method.apply(layer, x, bias)
    reduced: torch.Tensor = sys.modules[PARALLEL_STATE].get_tp_group()._all_reduce_out_place(y)
    return reduced


def _shaped(x: torch.Tensor, features: int, layer: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], features)


_library: Any = torch.library.Library("ascend_parallel", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{NAME}(Tensor x, int features, str layer) -> Tensor")
_library.impl(NAME, row_linear, "CompositeExplicitAutograd")
torch.library.register_fake(f"ascend_parallel::{NAME}", _shaped, lib=_library)


def output_of(returned: Any) -> torch.Tensor:
    """Return the output of a row layer, which it returns alone or before a bias that its caller adds."""
    output: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


def traced(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the call of a row layer, while a graph is traced, as the operator; None: it has no name there."""
    name = getattr(layer, LAYER_NAME, None)
    if name is None or x.dim() != 2:
        return None
    y: torch.Tensor = torch.ops.ascend_parallel.vllm_row_linear(x, layer.output_size, name)
    return y


def give_names(model: torch.nn.Module, layers: set[torch.nn.Module], context: dict[str, Any]) -> int:
    """Enter layers of a model into the context of vLLM's forwards under their paths; return their number.

    A path that has another entry, as of a draft model beside, gets a number.
    """
    for path, layer in model.named_modules():
        if layer in layers:
            name = next(name for name in _names(path) if context.get(name, layer) is layer)
            context[name] = layer
            setattr(layer, LAYER_NAME, name)
    return len(layers)


def _names(path: str) -> Any:
    yield path
    number = 2
    while True:
        yield f"{path}.{number}"
        number += 1


def fusing_pass(config: Any) -> str | None:
    """Return the name of a pass of vLLM that fuses the all-reduces of its graphs; None: none is on."""
    passes = config.compilation_config.pass_config
    return next((name for name in FUSING_PASSES if getattr(passes, name, False)), None)


def compilation_mode(config: Any) -> int:
    """Return how vLLM compiles its models: 0 not at all, 1 as torch does, more by itself; 0.11 calls it a level."""
    compilation = config.compilation_config
    return int(getattr(compilation, "mode", getattr(compilation, "level", 0)) or 0)


def captures_graphs(config: Any, device: str) -> bool:
    """Tell whether vLLM captures device graphs of small steps, on devices of this type."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return device != "cpu" and mode is not None and mode.name != "NONE"


def can_leave_graphs(config: Any) -> bool:
    """Tell whether steps of a compiled model can run outside its graphs: not in versions without the switch.

    It is in the context of a forward; vLLM sets it itself for steps of encoders. A model that is compiled as torch does
    it (mode 1) never looks at it.
    """
    known = hasattr(getattr(sys.modules.get(CONTEXT), "ForwardContext", None), "skip_compiled")
    return known and compilation_mode(config) > 1


def leave_graphs(model: torch.nn.Module, wanted: Callable[[torch.nn.Module, int, str], bool]) -> RemovableHandle:
    """Run a step of a compiled model outside its graphs where ``wanted(model, tokens, device)``; return the hook.

    device: its type. The answers have to be the same on every rank.
    """

    def look(own: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("positions")
        if positions is None or torch.compiler.is_compiling():
            return
        if in_forward() and wanted(own, positions.shape[-1], positions.device.type):
            _context().skip_compiled = True

    return model.register_forward_pre_hook(look, with_kwargs=True)


def is_captured() -> bool:
    """Tell whether vLLM captures a device graph, or replays one in pieces, in this forward."""
    if not in_forward():
        return False
    mode = getattr(_context(), "cudagraph_runtime_mode", None)
    return mode is not None and mode.name != "NONE"


def engine_of(config: Any) -> int:
    """Return the key of an engine in its process, which `running_engine` returns in its forwards."""
    return id(config.compilation_config.static_forward_context)


def running_engine() -> int | None:
    """Return the key of the engine whose forward of a model, or of its draft model, runs; None: none does."""
    return id(_context().no_compile_layers) if in_forward() else None


def in_forward() -> bool:
    """Tell whether vLLM runs a forward of a model, which has a context."""
    module: Any = sys.modules.get(CONTEXT)
    if module is None or not hasattr(module, "is_forward_context_available"):  # 0.11 cannot be asked
        return getattr(module, "_forward_context", None) is not None
    available: bool = module.is_forward_context_available()
    return available


def _context() -> Any:
    return sys.modules[CONTEXT].get_forward_context()
