"""What torch runs at the end of `import torch` (entry point group ``torch.backends``).

A module of its own, so that a process with none of the variables set imports nothing else of this
package. It must never break `import torch`: it looks, registers a hook, and raises nothing. Values
are checked when Megatron-core is imported, which is when they begin to matter.
"""

import os
import sys

PREFIXES = ("COC_", "USE_COC_")
LAYERS = "megatron.core.tensor_parallel.layers"


def register() -> None:
    """Have ascend_parallel imported right after Megatron-core's layers, if a variable asks for it."""
    if not any(name.upper().startswith(PREFIXES) for name in os.environ):
        return
    try:
        import wrapt

        wrapt.register_post_import_hook(_switch_on, LAYERS)
    except Exception as error:  # noqa: BLE001  raising here would break `import torch` for every program
        sys.stderr.write(f"ascend_parallel: overlap cannot be switched on by a variable alone: {error}\n")


def _switch_on(_: object) -> None:
    try:
        import ascend_parallel  # noqa: F401  importing it reads the environment and patches
    except Exception as error:
        Refusal(error).install()
        raise


class Refusal:
    """Raises an error again at every further import of Megatron-core's layers.

    A hook runs once. A program that catches the first error and imports again would else train
    without the overlap that was asked for, and nobody would know.
    """

    def __init__(self, error: Exception) -> None:
        """Keep `error`."""
        self._error = error

    def install(self) -> None:
        """Begin to refuse."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse one module, know nothing of all others."""
        if name == LAYERS:
            raise self._error

    @classmethod
    def withdraw(cls) -> None:
        """Let the module be imported again."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]
