"""Overlapped replacements of Megatron-core's ColumnParallelLinear.forward and RowParallelLinear.forward.

layers     the two replacements, and which calls they cover
region_patches, regions, layer_region, handover, region_checks  MLPs and transformer layers as regions
wgrad      Megatron's weight gradient accumulation
conflicts  features that exclude overlap, and replaced functions of Megatron
coverage   the covered layers of a model
"""

from __future__ import annotations

import importlib

from ascend_parallel.patches.base import Patch, PatchSet, version_tuple
from ascend_parallel.patches.megatron.layers import Megatron, column_forward, row_forward
from ascend_parallel.settings import Settings

LAYERS = "megatron.core.tensor_parallel.layers"
VERSIONS = ">=0.10,<0.17"


def installed_version() -> str:
    """Return the version of the megatron-core that is imported."""
    # megatron.core.__version__ is not set yet while megatron.core is being imported.
    info = importlib.import_module("megatron.core.package_info")
    return str(info.__version__)


def patched() -> Megatron:
    """Return what the patched layers hold."""
    held: Megatron = importlib.import_module(LAYERS).RowParallelLinear.forward.ascend_parallel
    return held


def patch_set(settings: Settings) -> PatchSet:
    """Return the patches that make Megatron-core's layers run with `settings`."""
    megatron = Megatron(importlib.import_module(LAYERS), version_tuple(installed_version()), settings)
    return PatchSet(
        "megatron-core",
        VERSIONS,
        [
            Patch(
                module=LAYERS,
                owner="ColumnParallelLinear",
                method="forward",
                replacement=lambda original: column_forward(original, megatron),
                parameters=("self", "input_", "weight", "runtime_gather_output"),
                reason="gathers under the matmul, reduces the input gradient under the backward's matmuls",
            ),
            Patch(
                module=LAYERS,
                owner="RowParallelLinear",
                method="forward",
                replacement=lambda original: row_forward(original, megatron),
                parameters=("self", "input_"),
                reason="reduces or scatters under the matmul, gathers the gradient under the backward's matmul",
            ),
        ],
    )
