"""Why a problem runs as it does, and what stands against every other kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ascend_parallel.ops.problem import Problem
from ascend_parallel.ops.registry import FUSED, KERNELS, Choice, choose, name_of
from ascend_parallel.ops.settings import OperatorSettings

TAKEN = "taken"


@dataclass(frozen=True)
class Explanation:
    """A choice, and for each kernel "taken" or why it was not.

    Its text is for people: `str` of it, or printing it.
    """

    choice: Choice
    kernels: dict[str, str]
    strict: bool

    def __str__(self) -> str:
        """Tell it in a few lines."""
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
    """Choose for `problem` and say, kernel by kernel, why; nothing is run, and nothing is raised for strictness."""
    choice = choose(problem, replace(settings, strict=False))
    kernels = {name: _standing(name, choice, settings) for name in KERNELS}
    return Explanation(choice, kernels, settings.strict)


def _standing(name: str, choice: Choice, settings: OperatorSettings) -> str:
    if name == choice.kernel:
        return TAKEN
    refusal: str | None = KERNELS[name].supports(choice.problem)
    if refusal is not None:
        return f"cannot: {refusal}"
    if name in FUSED:
        asked = settings.fused and settings.effective_mode == 2
        return "can, but another was tried first" if asked else "can, with USE_COC_FUSED_KERNEL=1"
    if name == "ordered":
        return "can, with COC_DETERMINISTIC=1 where nothing else sums in rank order"
    return f"can, with {'two or more chunks' if name == 'chunked' else 'one chunk'}"
