"""What COC_DETERMINISTIC=invariant asks of a model of transformers whenever it is called.

A model that has layers of a `tp_plan` attends by this package's function, and its norms, activations and rotary
embedding are those of its class. Of a language model every module was compared with a server's; other models, such as
one that gives a reward, may have more. A model without such layers is transformers' own: `logprobs` refuses it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ascend_parallel.overlap.logprobs import note_proved
from ascend_parallel.patches.base import Function, Patch, PatchSet, full_name
from ascend_parallel.patches.compiled import COMPILED_FROM, GRAPH_CALLBACK, outside_graphs, skip_frame
from ascend_parallel.patches.dtensor_linear import INSTALLED, InstalledLayers
from ascend_parallel.patches.framework_patch import OnTop, say_once
from ascend_parallel.patches.norms import BlockedForward
from ascend_parallel.patches.transformers.attention import MODELS, NAME
from ascend_parallel_autoload.frameworks import TRANSFORMERS

# The modules of transformers whose language models tests have compared with a server.
PROVED = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3"))
# Classes of other modules: they compute nothing, or alike for every row.
EXACT = (
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.sparse.Embedding",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.SiLU",
    "transformers.activations.SiLUActivation",
)
# The modules of transformers' styles, whose forwards call the one below as `original_forward`.
STYLES = (TRANSFORMERS.module, *TRANSFORMERS.before)
COMPILED = "is compiled, which changes the bits of what stands between its layers"
# Wrappers that hand a module's arguments on.
WRAPPERS = "torch.distributed."


def patches(framework: Any) -> PatchSet:
    """Return the patch of the call of models, once their module is imported; none without this arithmetic."""
    fixed = framework.settings.arithmetic.fixed_tiles
    patch = Patch(
        target=f"{MODELS}.PreTrainedModel.__call__",
        replacement=lambda original: call_proved(original, framework),
        parameters=None,
        reason="refuses what computes in another way than the server",
        inherited=True,
    )
    return PatchSet("transformers", None, [patch] if fixed else [])


CALLS = OnTop(MODELS, patches)


def call_proved(original: Function, framework: InstalledLayers) -> Function:
    """Make the method that replaces ``PreTrainedModel.__call__``."""

    def check(model: Any, compiled: bool) -> None:
        if any(INSTALLED in vars(module) for module in model.modules()):
            for reason in unproved(model, compiled):
                framework.settings.arithmetic.refuse(f"transformers: {reason}")
            note_proved()
        elif model.get_output_embeddings() is not None:
            say_once(
                f"transformers: no layer of {type(model).__name__} is in a tp_plan, so its logprobs are not those of a "
                "server: load it with tp_size, or call ascend_parallel.patches.transformers.on_one_rank(model)"
            )

    checked = outside_graphs(check)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        checked(self, torch.compiler.is_compiling() or GRAPH_CALLBACK() not in (None, False))
        return original(self, *args, **kwargs)

    skip_frame(call)
    return call


def unproved(model: Any, compiled: bool) -> Iterator[str]:
    """Yield why a model that has covered layers computes in another way than a server, with the module's name.

    compiled: whether the call is part of a compiled function.
    """
    kind = type(model).__name__
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        yield f"{kind} runs under autocast, whose products are not those of its dtype: load it in that dtype"
    if getattr(model, "_use_kernels", False):
        yield f"{kind} was loaded with use_kernels=True, whose kernels have other bits"
    if compiled:
        yield f"{kind} {COMPILED}"
    of_language = model.get_output_embeddings() is not None
    for name, module in model.named_modules():
        own = _own_class(module)
        described = f"{name} ({own.__name__})" if name else kind
        if any(hasattr(vars(module).get(each), COMPILED_FROM) for each in ("_compiled_call_impl", "forward")):
            yield f"{described} {COMPILED}"
        asked = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
        if asked != NAME:
            yield (
                f'{described} attends by attn_implementation="{asked}": give attn_implementation="{NAME}" to '
                f'from_pretrained, or call model.set_attn_implementation("{NAME}")'
            )
        if replaced := _replaced(module, own):
            yield f"{described} runs {replaced} in place of its class's forward"
        if of_language and not _is_compared(module, own):
            yield f"{described}: {full_name(own)} was not compared with a server"


def _own_class(module: Any) -> type:
    """Return the class of a module, below those that FSDP2 made of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))


def _is_compared(module: Any, own: type) -> bool:
    """Tell whether a module of a language model has the arithmetic of the server's."""
    installed = vars(module).get(INSTALLED)
    if isinstance(module, torch.nn.Linear):
        return installed is not None and installed.uncovered(module) is None
    name = full_name(own)
    return name in EXACT or name.startswith((*PROVED, WRAPPERS))


def _replaced(module: Any, own: type) -> str:
    """Return the name of a function that a program put in place of a module's forward; "": none.

    own: the class of the module. Forwards of a tp_plan, and of FSDP2, are installed on modules of their own.
    """
    if not own.__module__.startswith(PROVED):
        return ""
    holder = next(kind for kind in own.__mro__ if "forward" in vars(kind))
    made = _innermost(module.forward)
    file = getattr(getattr(made, "__code__", None), "co_filename", None)
    return "" if file == sys.modules[holder.__module__].__file__ else f"{made.__module__}.{made.__qualname__}"


def _innermost(function: Any) -> Any:
    """Return the forward below those that a plan, this package and wrappers have put on a module."""
    while True:
        module = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if isinstance(module, BlockedForward):
            function = module.own or type(module.module).forward
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif code is not None and function.__module__ in STYLES and "original_forward" in code.co_freevars:
            function = function.__closure__[code.co_freevars.index("original_forward")].cell_contents
        else:
            return function
