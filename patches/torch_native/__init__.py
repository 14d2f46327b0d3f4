"""torch's own tensor parallelism (`parallelize_module`): linear layers of ColwiseParallel and RowwiseParallel.

styles    the patched methods of the styles
layers    the forward that is installed on each layer, and which layers and calls it covers
shared    the gather that column layers of a module share
"""

from __future__ import annotations

import torch

from ascend_parallel.patches.base import Patch, PatchSet
from ascend_parallel.patches.dtensor_linear import InstalledLayers
from ascend_parallel.patches.seam import AppliedPatches, Seam
from ascend_parallel.patches.torch_native.styles import (
    IN_FORCE,
    column_apply,
    module_input_apply,
    prepare_column_input,
    prepare_module_input,
    prepare_row_output,
    row_apply,
    sequence_apply,
)
from ascend_parallel.settings import Settings

MODULE = "torch.distributed.tensor.parallel.style"
VERSIONS = ">=2.7,<2.16"
NEWEST = "2.13.0"


class TorchPatches(AppliedPatches):
    """The patches of the styles, and the forwards that they have put on layers."""

    def __init__(self, settings: Settings) -> None:
        """Hold the patches of the imported torch."""
        version = str(torch.__version__).partition("+")[0]
        self._framework = InstalledLayers(settings, "torch", version, IN_FORCE)
        super().__init__("torch", version, patch_set(), self._framework)

    def apply(self) -> None:
        """Patch; layers whose forward was installed under earlier patches are overlapped again."""
        super().apply()
        self._framework.put_in_force()

    def revert(self) -> None:
        """Restore the methods; layers with an installed forward run the original."""
        super().revert()
        self._framework.put_out_of_force()


def patch_set() -> PatchSet:
    """Return the patches of the styles."""
    gathers = "gathers under the matmul, and reduces the input gradient under the weight gradient"
    patches = [
        Patch(
            module=MODULE,
            owner="ColwiseParallel",
            method="_apply",
            replacement=column_apply,
            parameters=("self", "module", "device_mesh"),
            reason=gathers,
        ),
        Patch(
            module=MODULE,
            owner="ColwiseParallel",
            method="_prepare_input_fn",
            replacement=prepare_column_input,
            parameters=("input_layouts", "desired_input_layouts", "mod", "inputs", "device_mesh"),
            reason="leaves the gather of the input to the column layer",
        ),
        Patch(
            module=MODULE,
            owner="RowwiseParallel",
            method="_apply",
            replacement=row_apply,
            parameters=("self", "module", "device_mesh"),
            reason="reduces or scatters under the matmul, and gathers the gradient under the backward's matmul",
        ),
        Patch(
            module=MODULE,
            owner="RowwiseParallel",
            method="_prepare_output_fn",
            replacement=prepare_row_output,
            parameters=("output_layouts", "use_local_output", "mod", "outputs", "device_mesh"),
            reason="sums in the row layer's chunks what a forward gives that was put in its place",
        ),
        Patch(
            module=MODULE,
            owner="SequenceParallel",
            method="_apply",
            replacement=sequence_apply,
            parameters=("self", "module", "device_mesh"),
            reason="with COC_DETERMINISTIC=tp sums the gradients of norms in blocks of rows",
        ),
        Patch(
            module=MODULE,
            owner="PrepareModuleInput",
            method="_apply",
            replacement=module_input_apply,
            parameters=("self", "module", "device_mesh"),
            reason="notes the modules of a style",
        ),
        Patch(
            module=MODULE,
            owner="PrepareModuleInput",
            method="_prepare_input_arg",
            replacement=prepare_module_input,
            parameters=("self", "input", "mesh", "input_layout", "desired_layout"),
            reason="leaves the gather to the first column layer, which hands the rows to the others",
        ),
    ]
    return PatchSet("torch", VERSIONS, patches, newest=NEWEST)


TORCH = Seam(name="torch", title="torch", module=MODULE, make=TorchPatches)
