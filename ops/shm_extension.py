"""Loads the C++ extension of the shared-memory kernel, if the one for this torch was built."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from ascend_parallel.ops.pending import first_line

PREFIX = "_shm_torch_"
REBUILD = "install with a compiler and --no-build-isolation"


def extension() -> ModuleType | str:
    """Return the C++ extension, or the reason why it is missing.

    Its name has the torch that it was compiled against (`setup.py`): the C++ interface of another minor version of
    torch may differ in ways that only a crash shows, so one that was compiled against another torch is not loaded.
    """
    wanted = PREFIX + "_".join(torch.__version__.split(".")[:2])
    if importlib.util.find_spec(f"ascend_parallel.ops.{wanted}") is None:
        others = sorted({path.name.split(".")[0] for path in Path(__file__).parent.glob(f"{PREFIX}*.so")} - {wanted})
        if not others:
            return f"the C++ extension is not built: {REBUILD}"
        built = ", ".join(name.removeprefix(PREFIX).replace("_", ".") for name in others)
        return f"the C++ extension was compiled against torch {built}, and this is {torch.__version__}: {REBUILD}"
    try:
        return importlib.import_module(f"ascend_parallel.ops.{wanted}")
    except ImportError as error:
        return f"the C++ extension cannot be loaded: {REBUILD} ({first_line(error)})"
