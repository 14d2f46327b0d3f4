"""Refuse features that cannot run together with overlapped linear layers.

Source of the list: the incompatibilities that MindSpeed's CoC feature declares, and Megatron-core's
``tp_comm_overlap``.
"""

from __future__ import annotations

import sys
from typing import Any

# Name of a configuration field or command-line argument -> the feature.
CONFLICTS = {
    "tp_comm_overlap": "Megatron-core's own overlap of tensor-parallel communication",
    "use_ascend_mc2": "MindSpeed's MC2, which replaces the same layers",
    "use_ascend_coc": "MindSpeed's CoC, which replaces the same layers",
    "optimize_recomp_communication_level": "MindSpeed's overlap of recomputation with communication",
    "unaligned_linear": "MindSpeed's unaligned linear layers",
    "tp_2d": "MindSpeed's two-dimensional tensor parallelism",
}


class ConflictError(RuntimeError):
    """Two enabled features cannot run together; the message names both."""


def refuse_conflicts(config: Any) -> None:
    """Raise `ConflictError` if a Megatron configuration or the program's arguments exclude overlap."""
    for place, holder in (("config", config), ("argument", _arguments())):
        for name, what in CONFLICTS.items():
            if getattr(holder, name, None):
                raise ConflictError(
                    f"{place} {name}={getattr(holder, name)!r} ({what}) cannot be used together with overlapped linear "
                    f"layers: switch it off, or unset COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL"
                )


def _arguments() -> Any:
    """Return the parsed arguments of Megatron's training program, or None if another program runs."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
