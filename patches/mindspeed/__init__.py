"""MindSpeed on Megatron-core: its layer with a norm, its experts, its Ulysses, and its CoC's switches read as ours.

layernorm_column  MindSpeedTELayerNormColumnParallelLinear: MindSpeed's norm, then the overlapped column layer
experts           MindSpeedGmmExperts, in groups of experts
context           COC_TAKE_OVER=1: the attention of its Ulysses in groups of heads
take_over         COC_TAKE_OVER=1: this package in place of MindSpeed's CoC, with MindSpeed's arguments
"""

from __future__ import annotations

import importlib.metadata

TRIED = "0.12.1"


def version_note() -> str | None:
    """Return a sentence about a MindSpeed of another version than the tried one, or of none; None: it is the tried one.

    Nothing depends on the version: each replaced function is looked at.
    """
    try:
        version = importlib.metadata.version("mindspeed")
    except importlib.metadata.PackageNotFoundError:
        version = "without a version"
    if version == TRIED:
        return None
    return (
        f"MindSpeed {version} was found; {TRIED} (branch 26.1.0_core_r0.12.1) was tried. What it has "
        "replaced is looked at before every call"
    )
