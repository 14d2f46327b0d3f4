"""torch's own tensor parallelism (`parallelize_module`): linear layers of ColwiseParallel and RowwiseParallel.

styles    the patched methods of the styles
layers    the forward that is installed on each layer, and which layers and calls it covers
shared    the gather that column layers of a module share
"""

from __future__ import annotations

import functools

import torch

from ascend_parallel.patches.base import Patch, PatchSet
from ascend_parallel.patches.dtensor_linear import InstalledLayers
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch
from ascend_parallel.patches.torch_native.styles import (
    ACTIVE_PATCH,
    followed_by,
    install_column,
    install_row,
    install_sequence,
    module_input_apply,
    prepare_column_input,
    prepare_module_input,
    prepare_row_output,
)
from ascend_parallel.settings import Settings
from ascend_parallel_autoload import frameworks

MODULE = frameworks.TORCH.module
VERSIONS = ">=2.7,<2.16"
NEWEST = "2.13.0"


def patches(settings: Settings) -> AppliedPatches:
    """Return the patches of the imported torch."""
    version = str(torch.__version__).partition("+")[0]
    return AppliedPatches("torch", version, patch_set(), InstalledLayers(settings, "torch", version, ACTIVE_PATCH))


def patch_set() -> PatchSet:
    """Return the patches of the styles."""
    gathers = "gathers under the matmul, and reduces the input gradient under the weight gradient"
    found = [
        Patch(
            target=f"{MODULE}.ColwiseParallel._apply",
            replacement=functools.partial(followed_by, install_column),
            parameters=("self", "module", "device_mesh"),
            reason=gathers,
        ),
        Patch(
            target=f"{MODULE}.ColwiseParallel._prepare_input_fn",
            replacement=prepare_column_input,
            parameters=("input_layouts", "desired_input_layouts", "mod", "inputs", "device_mesh"),
            reason="leaves the gather of the input to the column layer",
        ),
        Patch(
            target=f"{MODULE}.RowwiseParallel._apply",
            replacement=functools.partial(followed_by, install_row),
            parameters=("self", "module", "device_mesh"),
            reason="reduces or scatters under the matmul, and gathers the gradient under the backward's matmul",
        ),
        Patch(
            target=f"{MODULE}.RowwiseParallel._prepare_output_fn",
            replacement=prepare_row_output,
            parameters=("output_layouts", "use_local_output", "mod", "outputs", "device_mesh"),
            reason="sums in the row layer's chunks what a forward gives that was put in its place",
        ),
        Patch(
            target=f"{MODULE}.SequenceParallel._apply",
            replacement=functools.partial(followed_by, install_sequence),
            parameters=("self", "module", "device_mesh"),
            reason="with COC_DETERMINISTIC=tp sums the gradients of norms in blocks of rows",
        ),
        Patch(
            target=f"{MODULE}.PrepareModuleInput._apply",
            replacement=module_input_apply,
            parameters=("self", "module", "device_mesh"),
            reason="notes the modules of a style",
        ),
        Patch(
            target=f"{MODULE}.PrepareModuleInput._prepare_input_arg",
            replacement=prepare_module_input,
            parameters=("self", "input", "mesh", "input_layout", "desired_layout"),
            reason="leaves the gather to the first column layer, which hands the rows to the others",
        ),
    ]
    return PatchSet("torch", VERSIONS, found, newest=NEWEST)


TORCH = FrameworkPatch.of(frameworks.TORCH, patches)
