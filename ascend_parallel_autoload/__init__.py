"""The entry point that torch runs at the end of `import torch` (group ``torch.backends``).

A separate package: a process without any of the variables imports nothing else of this distribution. It must never
break `import torch`, so it only reads variable names and registers hooks, and raises nothing. The variables' values are
checked when a framework's layers are imported.

hook        imports ascend_parallel right after a framework's layers; tells a trial of a program's steps
frameworks  the frameworks, with the modules that hold their layers; the refusal of an import
"""

import os

PREFIXES = ("COC_", "USE_COC_")
# Set by `ascend-parallel try` for the programs that it starts (diagnostics/step_record.py).
TRIAL = "ASCEND_PARALLEL_TRIAL"


def register() -> None:
    """If a COC_ variable is set, register a hook that imports ascend_parallel right after the layers of a framework."""
    if TRIAL in os.environ:
        from ascend_parallel_autoload.hook import record_steps

        record_steps()
    if any(name.upper().startswith(PREFIXES) for name in os.environ):
        from ascend_parallel_autoload.hook import wait_for_frameworks

        wait_for_frameworks()
