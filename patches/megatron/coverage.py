"""Count the linear layers of a model that run with overlap, and the reasons for the others."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Coverage:
    """The number of covered linear layers of a model.

    covered, total
        The number of overlapped linear layers, and the number of all linear layers.
    reasons
        The number of layers that are not overlapped, by reason.
    """

    covered: int
    total: int
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the counts and reasons in a sentence."""
        text = f"{self.covered} of {self.total} linear layers covered"
        others = "; ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return f"{text} ({others})" if others else text

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"covered": self.covered, "total": self.total, "reasons": dict(self.reasons)}


def coverage(model: torch.nn.Module) -> Coverage:
    """Return the coverage of all linear layers of `model`: Megatron-core's, TransformerEngine's and torch's."""
    reasons = [
        _uncovered(module)
        for module in model.modules()
        if any(kind.__name__.endswith("Linear") for kind in type(module).__mro__)
    ]
    named = Counter(reason for reason in reasons if reason is not None)
    return Coverage(reasons.count(None), len(reasons), dict(named))


def _uncovered(module: Any) -> str | None:
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear) if layers else ()
    if not isinstance(module, kinds):
        family = type(module).__module__.split(".")[0]
        name = "TransformerEngine's" if type(module).__name__.startswith("TE") else f"of {family}"
        return f"{name} {type(module).__name__}: not a layer of megatron-core's tensor_parallel"
    megatron = getattr(type(module).forward, "ascend_parallel", None)
    if megatron is None:
        inherited = any(hasattr(vars(kind).get("forward"), "ascend_parallel") for kind in type(module).__mro__)
        own = "its own forward is overlapped only where it calls megatron-core's forward"
        return f"{type(module).__name__}: {own if inherited else 'not patched'}"
    reason = megatron.uncovered(module)
    return None if reason is None else f"{type(module).__name__}: {reason}"
