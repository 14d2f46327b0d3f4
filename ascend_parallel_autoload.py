"""The entry point that torch runs at the end of `import torch` (group ``torch.backends``).

A separate module: a process without any of the variables imports nothing else of this package. It must never break
`import torch`, so it only reads variable names and registers a hook, and raises nothing. The variables' values are
checked when a framework's layers are imported.
"""

import os
import sys
from types import ModuleType

PREFIXES = ("COC_", "USE_COC_")
# Set by `ascend-parallel try` for the programs that it starts (diagnostics/step_record.py).
TRIAL = "ASCEND_PARALLEL_TRIAL"
# The modules that hold the layers of the frameworks (FRAMEWORK_PATCHES of patches/applied.py).
LAYERS = (
    "megatron.core.tensor_parallel.layers",
    "transformers.distributed.tensor_parallel",
    "transformers.integrations.tensor_parallel",
    "torch.distributed.tensor.parallel.style",
    "deepspeed.module_inject.layers",
    "torch.distributed._symmetric_memory",
    "vllm.model_executor.layers.linear",
)
# COC_TAKE_OVER takes the place of MindSpeed's CoC, which these modules put in (patches/mindspeed/take_over.py).
COC_FEATURES = (
    "mindspeed.features_manager.tensor_parallel.locl_coc",
    "mindspeed_llm.features_manager.tensor_parallel.coc",
)


def register() -> None:
    """If a COC_ variable is set, register a hook that imports ascend_parallel right after the layers of a framework."""
    if TRIAL in os.environ:
        _record_steps()
    if not any(name.upper().startswith(PREFIXES) for name in os.environ):
        return
    try:
        import wrapt

        for module in (*LAYERS, *(COC_FEATURES if "COC_TAKE_OVER" in os.environ else ())):
            wrapt.register_post_import_hook(_switch_on, module)
    except Exception as error:  # noqa: BLE001  raising here would break `import torch` for every program
        sys.stderr.write(f"ascend_parallel: overlap cannot be switched on by a variable alone: {error}\n")


def _record_steps() -> None:
    """Have every optimizer of torch tell its steps to the record of a trial."""
    from torch.optim import optimizer

    def before(stepping: optimizer.Optimizer, *_: object) -> None:
        import ascend_parallel
        from ascend_parallel.diagnostics.step_record import record_of_environment

        record_of_environment().before(stepping, lambda: ascend_parallel.configure(timeline=None))

    def after(stepping: optimizer.Optimizer, *_: object) -> None:
        from ascend_parallel.diagnostics.step_record import record_of_environment

        record_of_environment().after(stepping)

    optimizer.register_optimizer_step_pre_hook(before)
    optimizer.register_optimizer_step_post_hook(after)


def _switch_on(imported: ModuleType) -> None:
    try:
        import ascend_parallel  # noqa: F401  importing it reads the environment and patches
    except Exception as error:
        Refusal(error, imported.__name__).install()
        raise


class Refusal:
    """Raises the same error at every later import of a framework's layers.

    A hook runs only once. Without this class, a program that catches the first error and imports again would train
    without the requested overlap, silently.
    """

    def __init__(self, error: Exception, module: str) -> None:
        """Keep `error`, which the import of `module` has raised."""
        self._error, self._module = error, module

    def install(self) -> None:
        """Refuse imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise the error for the module; find no other."""
        if name == self._module:
            raise self._error

    @classmethod
    def withdraw(cls) -> None:
        """Allow the import again."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]
