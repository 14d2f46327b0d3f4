"""The entry point that torch runs at the end of `import torch` (group ``torch.backends``).

A separate module: a process without any of the variables imports nothing else of this package. It must never break
`import torch`, so it only reads variable names and registers a hook, and raises nothing. The variables' values are
checked when Megatron-core is imported.
"""

import os
import sys

PREFIXES = ("COC_", "USE_COC_")
LAYERS = "megatron.core.tensor_parallel.layers"
# COC_TAKE_OVER takes the place of MindSpeed's CoC, which these modules put in (patches/mindspeed/take_over.py).
COC_FEATURES = (
    "mindspeed.features_manager.tensor_parallel.locl_coc",
    "mindspeed_llm.features_manager.tensor_parallel.coc",
)


def register() -> None:
    """If a COC_ variable is set, register a hook that imports ascend_parallel right after Megatron-core's layers."""
    if not any(name.upper().startswith(PREFIXES) for name in os.environ):
        return
    try:
        import wrapt

        for module in (LAYERS, *(COC_FEATURES if "COC_TAKE_OVER" in os.environ else ())):
            wrapt.register_post_import_hook(_switch_on, module)
    except Exception as error:  # noqa: BLE001  raising here would break `import torch` for every program
        sys.stderr.write(f"ascend_parallel: overlap cannot be switched on by a variable alone: {error}\n")


def _switch_on(_: object) -> None:
    try:
        import ascend_parallel  # noqa: F401  importing it reads the environment and patches
    except Exception as error:
        Refusal(error).install()
        raise


class Refusal:
    """Raises the same error at every later import of Megatron-core's layers.

    A hook runs only once. Without this class, a program that catches the first error and imports again would train
    without the requested overlap, silently.
    """

    def __init__(self, error: Exception) -> None:
        """Keep `error`."""
        self._error = error

    def install(self) -> None:
        """Refuse imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise the error for Megatron-core's layers; find no other module."""
        if name == LAYERS:
            raise self._error

    @classmethod
    def withdraw(cls) -> None:
        """Allow the import again."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]
