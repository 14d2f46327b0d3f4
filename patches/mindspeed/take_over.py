"""COC_TAKE_OVER=1: this package in place of MindSpeed's CoC, with the arguments and the file that CoC reads.

With --use-ascend-coc MindSpeed registers subclasses of Megatron-core's layers under their names. The patched method
registers nothing, and hands the arguments on: Megatron-core's layers stay, and are overlapped.
Source: mindspeed/features_manager/tensor_parallel/locl_coc.py and core/tensor_parallel/coc_feature/user_config.py,
26.1.0_core_r0.12.1, unchanged in core_r0.16.0; mindspeed_llm/features_manager/tensor_parallel/coc.py, 2.2.0 to 26.1.0.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ascend_parallel.patches.base import Function, Patch, PatchError, PatchSet
from ascend_parallel.patches.megatron.built_classes import COC, NAMES, flag_of
from ascend_parallel_autoload.frameworks import MEGATRON, MINDSPEED_COC

# MindSpeed-LLM has a subclass of MindSpeed's feature, with its own method.
MODULES = MINDSPEED_COC
USER_CONFIG = "mindspeed.core.tensor_parallel.coc_feature.user_config"

# Argument of MindSpeed -> field of Settings.
ARGUMENTS = {"coc_parallel_num": "num_chunks", "coc_fused_kernel": "fused", "coc_mode": "mode"}
# Keys of user_config.py that are fields of Settings too.
KEYS = (
    "recompute_all_gather",
    "matmul_soc_friendly",
    "customized_coc",
    "enable_coc_in_column_backward",
    "k_min",
    "k_max",
)


def patch_set(module: str, take: Callable[[dict[str, Any]], bool]) -> PatchSet:
    """Return the patch of the CoC feature in `module`.

    `take` receives the fields of `Settings` that CoC would read, and returns whether this package takes its place.
    """
    patch = Patch(
        target=f"{module}.CoCFeature.register_patches",
        replacement=lambda original: _hand_over(original, take),
        parameters=("self", "patch_manager", "args"),
        reason="hands MindSpeed's CoC arguments to this package (COC_TAKE_OVER=1)",
    )
    return PatchSet("MindSpeed", None, [patch])


def refuse_late() -> None:
    """Raise `PatchError` if MindSpeed's CoC has replaced Megatron-core's layers already."""
    layers = sys.modules.get(MEGATRON.module)
    if layers is not None and flag_of(getattr(layers, NAMES[0], None)) == COC:
        raise PatchError(
            "COC_TAKE_OVER=1 came too late: MindSpeed's CoC has replaced Megatron-core's layers. Import "
            "ascend_parallel before mindspeed.megatron_adaptor; `import torch` does this by itself, unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )


def settings_of(arguments: Any) -> dict[str, Any]:
    """Return the fields of `Settings` in MindSpeed's parsed arguments and its user_config.py."""
    user_config: Any = importlib.import_module(USER_CONFIG)
    found = {field: getattr(arguments, name) for name, field in ARGUMENTS.items() if hasattr(arguments, name)}
    return {name: user_config.get_value_from_cfg(name) for name in KEYS} | found


def _hand_over(original: Function, take: Callable[[dict[str, Any]], bool]) -> Function:
    @functools.wraps(original)
    def register_patches(self: Any, patch_manager: Any, args: Any) -> None:
        if not take(settings_of(args)):
            original(self, patch_manager, args)

    return register_patches
