"""Hugging Face transformers: the linear layers of a `tp_plan` and the experts of an `ep_plan`, overlapped.

layers   the forward that is installed on each linear layer, and which layers and calls it covers
experts  the replaced call of a module of experts, and which modules it covers
"""

from __future__ import annotations

import importlib.metadata

from ascend_parallel.patches.base import Patch, PatchSet, in_range
from ascend_parallel.patches.dtensor_linear import InstalledLayers
from ascend_parallel.patches.seam import AppliedPatches, Seam
from ascend_parallel.patches.transformers import experts
from ascend_parallel.patches.transformers.layers import IN_FORCE, install_forward
from ascend_parallel.settings import Settings

MODULE = "transformers.distributed.tensor_parallel"
VERSIONS = ">=5.16,<5.24"
NEWEST = "5.23.0"


class TransformersPatches(AppliedPatches):
    """The patch of the styles' `install_forward`, and the forwards that it has put on layers."""

    def __init__(self, settings: Settings) -> None:
        """Read the installed version."""
        version = importlib.metadata.version("transformers")
        self._framework = InstalledLayers(settings, "transformers", version, IN_FORCE)
        super().__init__("transformers", version, patch_set(), self._framework)
        if in_range(version, experts.VERSIONS):  # older versions exchange no rows, or in another way
            self._sets["experts of transformers"] = experts_patch_set()

    def apply(self) -> None:
        """Patch; layers whose forward was installed under earlier patches are overlapped again."""
        super().apply()
        IN_FORCE.framework = self._framework

    def revert(self) -> None:
        """Restore the method; layers with an installed forward run the original."""
        super().revert()
        IN_FORCE.framework = None


def patch_set() -> PatchSet:
    """Return the patch of the method that all styles share."""
    patch = Patch(
        module=MODULE,
        owner="TensorParallelLayer",
        method="install_forward",
        replacement=install_forward,
        parameters=("self", "module", "mesh"),
        reason="reduces under a row layer's matmul, and the input gradient under a column layer's weight gradient",
    )
    return PatchSet("transformers", VERSIONS, [patch], newest=NEWEST)


def experts_patch_set() -> PatchSet:
    """Return the patches of the experts that an `ep_plan` dispatches rows to."""
    noted = Patch(
        module=experts.MODULE,
        owner="EpDispatchExpertsParallel",
        method="install_forward",
        replacement=experts.install_forward,
        parameters=("self", "module", "ep_mesh", "tp_mesh", "ep_implementation"),
        reason="notes the experts of an ep_plan, for coverage",
    )
    called = Patch(
        module=experts.MODULE,
        owner="AllToAllEP",
        method="__call__",
        replacement=experts.call_experts,
        parameters=("self", "hidden_states", "top_k_index", "top_k_weights"),
        reason="exchanges rows with other experts' ranks under groups of experts",
    )
    return PatchSet("transformers", experts.VERSIONS, [noted, called], newest=NEWEST)


TRANSFORMERS = Seam(
    name="transformers",
    title="transformers",
    module=MODULE,
    make=TransformersPatches,
    before=("transformers.integrations.tensor_parallel",),
)
