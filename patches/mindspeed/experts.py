"""MindSpeed's grouped experts (``--moe-grouped-gemm``), in the groups in which the layer's rows arrive.

MindSpeed gives the name GroupedMLP to MindSpeedGmmExperts, whose forward multiplies by ``npu_gmm``. The layer around
the experts stays Megatron-core's, and is patched there (patches/megatron/experts.py).
Source: mindspeed/core/transformer/moe/moe_feature/gmm/experts.py, 26.1.0_core_r0.12.1 and core_r0.16.0.
"""

from __future__ import annotations

from typing import Any

from ascend_parallel.patches.base import Patch, PatchSet
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.expert_modules import (
    MINDSPEED_EXPERTS,
    MODULES,
    PARAMETERS,
    make_experts_forward,
)

MODULE = "mindspeed.core.transformer.moe.moe_feature.gmm.experts"


def patch_set(_: Any) -> PatchSet:
    """Return the patch of the experts' forward, whose module has been imported."""
    patch = Patch(
        target=f"{MODULE}.GmmExpertsImpl.forward",
        replacement=lambda original: make_experts_forward(
            original, MODULES[MINDSPEED_EXPERTS, "MindSpeedGmmExperts"].view
        ),
        parameters=PARAMETERS,
        reason="computes a group of its experts",
    )
    return PatchSet("MindSpeed", None, [patch])


ON_TOP = OnTop(MODULE, patch_set)
