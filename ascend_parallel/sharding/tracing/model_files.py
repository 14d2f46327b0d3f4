"""Tells a model's code from torch's and Python's own."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import torch

# Paths of code that is not the model's: torch and Python's own library.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(copy.__file__).parent), "<")
SITE = str(Path(torch.__file__).parent.parent)


@cache
def is_model_file(name: str) -> bool:
    """Tell whether a source file holds a model's code: it is not of torch or of Python's own library."""
    return not (name.startswith(LIBRARIES) and (name.startswith(LIBRARIES[0]) or not name.startswith(SITE)))
