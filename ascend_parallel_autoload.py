"""What torch runs at the end of `import torch` (entry point group ``torch.backends``).

A module of its own, so that a process with none of the variables set imports nothing else of this
package. It must never break `import torch`: it looks, registers a hook, and raises nothing. Values
are checked when Megatron-core is imported, which is when they begin to matter.
"""

import os

PREFIXES = ("COC_", "USE_COC_")


def register() -> None:
    """Have ascend_parallel imported right after Megatron-core's layers, if a variable asks for it."""
    if not any(name.startswith(PREFIXES) for name in os.environ):
        return
    import wrapt

    wrapt.register_post_import_hook(_switch_on, "megatron.core.tensor_parallel.layers")


def _switch_on(_: object) -> None:
    import ascend_parallel  # noqa: F401  importing it reads the environment and patches
