"""Loads the C++ extension of the shared-memory kernel, if the one for this torch was built."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

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


def watched(seen: Iterable[tuple[Mapping[str, Any], str, object]]) -> Any:
    """Return what tells in one call, ``same()``, whether names in namespaces still have these objects; else None.

    None without the extension. A name that a namespace lacks is None.
    """
    kind = getattr(extension(), "Watched", None)
    # A class shows its names through a proxy, whose reads are slow.
    return kind and kind([(_dictionary(space), name, found) for space, name, found in seen])


def _dictionary(space: Mapping[str, Any]) -> Mapping[str, Any]:
    held = gc.get_referents(space) if isinstance(space, MappingProxyType) else []
    return held[0] if len(held) == 1 and isinstance(held[0], dict) else space
