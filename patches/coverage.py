"""Count the layers of a model that run with overlap, and the reasons for the others; log this once."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ascend_parallel.ops.registry import choose
from ascend_parallel.overlap.choices import overlap_in_words
from ascend_parallel.overlap.known import known_in_call, known_of
from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.patches.base_forward import calls_forward_of
from ascend_parallel.patches.compiled import COMPILED_AWAY, Compiled, compiled_modules
from ascend_parallel.settings import Settings, current_settings
from ascend_parallel_autoload.frameworks import MEGATRON, VLLM

# The attribute of a forward of expert-parallel experts: its `uncovered(module)` tells why they are not overlapped.
EXPERTS = "ascend_parallel_experts"

# Of each attention that ranks share, since its last call: in how many groups of heads it was exchanged, or why it was
# left to the framework.
ATTENTION: WeakKeyDictionary[torch.nn.Module, int | str] = WeakKeyDictionary()


@dataclass(frozen=True)
class Count:
    """The number of covered modules of one kind.

    covered, total
        The number of covered modules, and the number of all modules of this kind.
    reasons
        The number of modules that are not covered, by reason.
    """

    covered: int
    total: int
    reasons: dict[str, int] = field(default_factory=dict)

    def of_total(self, kind: str) -> str:
        """Return the counts and reasons in words; `kind` names the modules."""
        text = f"{self.covered} of {self.total} {kind}"
        others = "; ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return f"{text} ({others})" if others else text

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"covered": self.covered, "total": self.total, "reasons": dict(self.reasons)}


@dataclass(frozen=True)
class Coverage(Count):
    """The number of covered linear layers of a model: those that are overlapped.

    experts
        The number of covered layers of experts, of all that a patched framework has made expert parallel.
    adapters
        The number of replicated adapters beside tensor-parallel layers, as of PEFT: they communicate nothing, and are
        not among the linear layers.
    silent
        The number of other linear layers without a collective, as vLLM's column layers: not among the linear layers
        either.
    attention
        What became of attention that ranks share, in words, and of how many layers: known once a layer has been called.
    """

    experts: Count = Count(0, 0)
    adapters: int = 0
    silent: int = 0
    attention: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the counts and reasons in a sentence."""
        text = self.of_total("linear layers covered")
        if self.adapters:
            text += f"; {self.adapters} replicated adapters communicate nothing"
        if self.silent:
            text += f"; {self.silent} others communicate nothing"
        if self.experts.total:
            text += f"; {self.experts.of_total('layers of experts covered')}"
        return text + self._attention_in_words()

    def _attention_in_words(self) -> str:
        """Return "; attention of 2 layers: exchanged in 4 groups", or of each kind how many."""
        if not self.attention:
            return ""
        of_all = f"; attention of {sum(self.attention.values())} layers: "
        if len(self.attention) == 1:
            return of_all + next(iter(self.attention))
        return of_all + "; ".join(f"{count} {words}" for words, count in self.attention.items())

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            **super().as_dict(),
            "experts": self.experts.as_dict(),
            "adapters": self.adapters,
            "silent": self.silent,
            "attention": dict(self.attention),
        }


def coverage(model: torch.nn.Module) -> Coverage:
    """Return the coverage of all linear layers of `model`, of every framework and torch's own.

    A wrapper of a linear layer, as of PEFT, is none itself.
    """
    wrappers = [module for module in model.modules() if _is_wrapper(module)]
    adapters = {id(adapter) for wrapper in wrappers for adapter in _adapters(wrapper)}
    others = {id(wrapper) for wrapper in wrappers} | adapters
    linear = [module for module in model.modules() if _is_linear(type(module)) and id(module) not in others]
    silent = [module for module in linear if _communicates_nothing(module)]
    linear = [module for module in linear if not _communicates_nothing(module)]
    compiled = compiled_modules(model)
    experts = [module for module in model.modules() if hasattr(_forward(module), EXPERTS)]
    uncovered = [
        getattr(_forward(module), EXPERTS).uncovered(module) or (COMPILED_AWAY if id(module) in compiled else None)
        for module in experts
    ]
    named = [reason and f"{type(module).__name__}: {reason}" for module, reason in zip(experts, uncovered, strict=True)]
    counted = _counted(_uncovered_of(linear, compiled))
    attention = Counter(_in_words(ATTENTION[module]) for module in model.modules() if module in ATTENTION)
    return Coverage(
        **vars(counted),
        experts=_counted(named),
        adapters=len(adapters),
        silent=len(silent),
        attention=dict(attention),
    )


def _in_words(groups: int | str) -> str:
    """Return the state of attention that ranks share."""
    return groups if isinstance(groups, str) else f"exchanged in {groups} group{'s' if groups > 1 else ''}"


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Tell whether a module is called a linear layer, and has its weight in another linear layer."""
    own = any(parameter is not None for parameter in module._parameters.values())
    return _is_linear(type(module)) and not own and any(_is_linear(type(child)) for child in _within(module))


def _adapters(wrapper: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the linear layers in a wrapper that no framework made parallel, if another of them is parallel."""
    linear = [child for child in _within(wrapper) if _is_linear(type(child)) and not _is_wrapper(child)]
    plain = [child for child in linear if _is_plain(child)]
    return plain if len(plain) < len(linear) else []


def _within(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [child for child in module.modules() if child is not module]


def _is_plain(module: torch.nn.Module) -> bool:
    """Tell whether a layer is torch's own linear layer with a whole weight, whose forward nobody has patched."""
    patched = hasattr(_forward(module), "ascend_parallel")
    return isinstance(module, torch.nn.Linear) and not patched and not isinstance(module.weight, DTensor)


def _counted(reasons: Sequence[str | None]) -> Count:
    """Return the count of modules from the reason of each, None: covered."""
    named = Counter(reason for reason in reasons if reason is not None)
    return Count(reasons.count(None), len(reasons), dict(named))


def _forward(module: torch.nn.Module) -> Any:
    return vars(module).get("forward", type(module).forward)


def _is_linear(kind: type) -> bool:
    """Tell whether a class is a linear layer by its name or a base's, or has a forward that is patched."""
    return any(base.__name__.endswith("Linear") or _is_patched(base) for base in kind.__mro__)


def _communicates_nothing(module: Any) -> bool:
    """Tell whether a layer is one of vLLM's without a collective: it has no backward, where other frameworks reduce."""
    layers = sys.modules.get(VLLM.module)
    if layers is None or not isinstance(module, layers.LinearBase):
        return False
    return not isinstance(module, layers.RowParallelLinear) and not getattr(module, "gather_output", False)


def _is_patched(kind: type) -> bool:
    """Tell whether a linear layer's forward is patched on this class; forwards with regions are patched, too."""
    return hasattr(getattr(vars(kind).get("forward"), "ascend_parallel", None), "uncovered")


def _uncovered_of(linear: Sequence[torch.nn.Module], compiled: Mapping[int, Compiled]) -> list[str | None]:
    """Return why each linear layer of a model is not overlapped, or None; `compiled`: as of `compiled_modules`."""
    reasons = [_uncovered(module, compiled.get(id(module), Compiled.NOT)) for module in linear]
    by_functions = {
        type(module)
        for module, reason in zip(linear, reasons, strict=True)
        if id(module) not in compiled and reason is not None and reason.endswith(COMPILED_AWAY)
    }
    for index, module in enumerate(linear):
        if reasons[index] is None and id(module) not in compiled and type(module) in by_functions:
            reasons[index] = _uncovered(module, Compiled.BY_FUNCTION)
    return reasons


def _uncovered(module: Any, compiled: Compiled) -> str | None:
    """Return why a linear layer is not overlapped, or None. What patched its forward knows the reason."""
    forward = _forward(module)
    if hasattr(forward, "ascend_parallel"):
        return _reason(module, forward, compiled)
    if (base := next(filter(_is_patched, type(module).__mro__), None)) is not None:
        if calls_forward_of(type(module), base):
            return _reason(module, vars(base)["forward"], compiled)
        return f"{type(module).__name__}: its own forward is overlapped only where it calls {base.__name__}'s forward"
    off = "" if current_settings().enabled else ", overlap is off: COC_PARALLEL_NUM=4 or auto switches it on"
    layers = sys.modules.get(MEGATRON.module)
    if layers and isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
        return f"{type(module).__name__}: not patched{off}"
    family = type(module).__module__.split(".")[0]
    name = "TransformerEngine's" if type(module).__name__.startswith("TE") else f"of {family}"
    return f"{name} {type(module).__name__}: not a tensor-parallel layer of a patched framework{off}"


def _reason(module: Any, forward: Any, compiled: Compiled) -> str | None:
    """Return why a layer whose patched forward is called is not overlapped, or None."""
    patched, by = forward.ascend_parallel, getattr(forward, "uncovered", None)
    reason = patched.uncovered(module) if by is None else by(module, patched)
    if reason is None and hasattr(patched, "compiled_away") and patched.compiled_away(module, compiled):
        reason = COMPILED_AWAY
    return None if reason is None else f"{type(module).__name__}: {reason}"


log = logging.getLogger("ascend_parallel")

MEASURED = "each new shape is timed when it is first called, for some seconds; "
MORE = (
    "what is replaced: ascend-parallel status; what it hides: COC_TIMELINE=DIR; without this line: COC_LOG_LEVEL=error"
)


def announce(
    settings: Settings, layer: Any, group: dist.ProcessGroup, shape: LayerShape | None, *, tuned: bool
) -> None:
    """Log on rank 0 that layers are overlapped, at the first call: of `layer` on `group`.

    shape
        That of the call; None: it has an int8 weight.
    tuned
        Whether the chunks of each shape are measured during the run.

    Counts the layers of the outermost running module, since the whole model is unknown.
    """
    if dist.get_rank() == 0:
        ranks = group.size()
        how = MEASURED if tuned else _first_operators(shape, settings) if shape else ""
        model = running_model()
        covered = coverage(layer if model is None else model)
        log.warning("overlap is %s; %s, on %d ranks; %s%s", overlap_in_words(settings), covered, ranks, how, MORE)


def running_model() -> torch.nn.Module | None:
    """Return the outermost module whose call led to this one; None: no module is being called."""
    outermost: torch.nn.Module | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Reading a frame's locals keeps them alive, so read only torch's frames, which end with the forward.
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    return outermost


def _first_operators(shape: LayerShape, settings: Settings) -> str:
    """Return the first layer's operators in words; empty if its ranks have yet to choose the kernel."""
    if settings.fused:  # with shared memory or without
        return ""
    text = ""
    for direction, matmul in shape.operators:
        decision = choose(matmul, settings, known_in_call(settings, known_of(settings), shape, direction))
        text += f"first {matmul.operator}: {decision.kernel} in {len(decision.sizes)}; "
    return text
