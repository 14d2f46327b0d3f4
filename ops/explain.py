"""Explain the kernel chosen for a problem, and why each other kernel was not chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import FUSED, KERNELS, Choice, choose, name_of
from ascend_parallel.ops.settings import OperatorSettings

TAKEN = "taken"


@dataclass(frozen=True)
class Explanation:
    """A choice, and for each kernel "taken" or the reason against it. ``str(explanation)`` is the text for people."""

    choice: Choice
    kernels: dict[str, str]
    strict: bool

    def __str__(self) -> str:
        """Return the choice and the reasons in a few lines."""
        choice = self.choice
        lines = [
            f"{name_of(choice.problem)}: {choice.kernel}, chunks: {len(choice.sizes)}",
            f"  because {choice.reason}",
        ]
        if choice.unmet and self.strict:
            lines.append("  COC_STRICT=1 makes this an error")
        lines += [f"  {name:<10}{why}" for name, why in self.kernels.items()]
        return "\n".join(lines)


def explain(problem: Problem, settings: OperatorSettings) -> Explanation:
    """Return the choice for `problem` and the reason for or against each kernel; run nothing, ignore strictness."""
    choice = choose(problem, replace(settings, strict=False))
    kernels = {name: _reason(name, choice, settings) for name in KERNELS}
    return Explanation(choice, kernels, settings.strict)


def _reason(name: str, choice: Choice, settings: OperatorSettings) -> str:
    if name == choice.kernel:
        return TAKEN
    refusal: str | None = KERNELS[name].supports(choice.problem)
    if refusal is not None:
        return f"cannot: {refusal}"
    if name in FUSED:
        requested = settings.fused and settings.effective_mode == 2
        return "can, but another fused kernel was tried first" if requested else "can, with USE_COC_FUSED_KERNEL=1"
    if name == "ordered":
        return "can, with COC_DETERMINISTIC=1 where nothing else sums in rank order"
    return f"can, with {'two or more chunks' if name == 'chunked' else 'one chunk'}"
