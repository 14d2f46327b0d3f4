"""Imports ascend_parallel, which reads the environment and patches, right after the layers of a framework."""

import os
import sys
from types import ModuleType

from ascend_parallel_autoload.frameworks import FRAMEWORKS, MINDSPEED_COC, Refusal


def wait_for_frameworks() -> None:
    """Import ascend_parallel once a framework's layers are imported; raises nothing."""
    awaited = dict.fromkeys(module for framework in FRAMEWORKS for module in (framework.module, *framework.before))
    try:
        import wrapt

        for module in (*awaited, *(MINDSPEED_COC if "COC_TAKE_OVER" in os.environ else ())):
            wrapt.register_post_import_hook(_switch_on, module)
    except Exception as error:  # noqa: BLE001  raising here would break `import torch` for every program
        sys.stderr.write(f"ascend_parallel: overlap cannot be switched on by a variable alone: {error}\n")


def record_steps() -> None:
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
