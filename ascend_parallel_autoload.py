"""What torch runs at the end of `import torch` (entry point group ``torch.backends``).

A module of its own, so that a process with none of the variables set imports nothing else of this
package. It must never break `import torch`: it looks, registers a hook, and raises nothing. Values
are checked when Megatron-core is imported, which is when they begin to matter.
"""

import os
import sys

PREFIXES = ("COC_", "USE_COC_")


def register() -> None:
    """Have ascend_parallel imported right after Megatron-core's layers, if a variable asks for it."""
    if not any(name.upper().startswith(PREFIXES) for name in os.environ):
        return
    try:
        import wrapt

        wrapt.register_post_import_hook(_switch_on, "megatron.core.tensor_parallel.layers")
    except Exception as error:  # noqa: BLE001  raising here would break `import torch` for every program
        sys.stderr.write(f"ascend_parallel: overlap cannot be switched on by a variable alone: {error}\n")


def _switch_on(_: object) -> None:
    import ascend_parallel  # noqa: F401  importing it reads the environment and patches
