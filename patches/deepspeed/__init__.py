"""DeepSpeed: the two linear layers of AutoTP and the attention of Ulysses, overlapped.

layers   the replacements of AutoTP's layers, and which layers and calls they cover
context  the replacement of Ulysses' attention
"""

from __future__ import annotations

import importlib.metadata

from ascend_parallel.patches.base import Patch, PatchSet
from ascend_parallel.patches.deepspeed import context
from ascend_parallel.patches.deepspeed.layers import COLUMN, MODULE, ROW, DeepSpeed, layer_forward
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch
from ascend_parallel.settings import Settings
from ascend_parallel_autoload import frameworks

VERSIONS = ">=0.19,<0.20"
NEWEST = "0.19.8"


def patches(settings: Settings) -> AppliedPatches:
    """Return the patches of the installed DeepSpeed's layers."""
    version = importlib.metadata.version("deepspeed")
    framework = DeepSpeed(settings, version)
    found = [
        Patch(
            target=f"{MODULE}.{owner}.forward",
            replacement=lambda original, owner=owner: layer_forward(original, owner, framework),  # type: ignore[misc]
            parameters=("self", "input"),
            reason=reason,
        )
        for owner, reason in (
            (ROW, "reduces under the matmul"),
            (COLUMN, "reduces the input gradient under the weight gradient"),
        )
    ]
    layers = PatchSet("deepspeed", VERSIONS, found, newest=NEWEST)
    return AppliedPatches("deepspeed", version, layers, framework, on_top=[context.ON_TOP])


DEEPSPEED = FrameworkPatch.of(frameworks.DEEPSPEED, patches, on_top=(context.ON_TOP.module,))
