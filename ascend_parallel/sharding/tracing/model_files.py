"""Tells a model's code from torch's and Python's own."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

# Paths of code that is not the model's: torch and Python's own library.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(copy.__file__).parent), "<")
FAKE_TENSORS = str(Path(torch.__file__).parent / "_subclasses")
OWN = str(Path(__file__).parent)
SITE = str(Path(torch.__file__).parent.parent)


@cache
def is_model_file(name: str) -> bool:
    """Tell whether a source file holds a model's code, not torch's, Python's or that of this package's tracing."""
    is_library = name.startswith(LIBRARIES) and (name.startswith(LIBRARIES[0]) or not name.startswith(SITE))
    return not is_library and not name.startswith(OWN)


def is_model_frame(frame: FrameType) -> bool:
    """Tell whether a frame runs a model's code."""
    return is_model_file(frame.f_code.co_filename)


def calling_line(above: int = 1) -> str:
    """Return "file:line" of the innermost frame that runs a model's code, or "" if there is none.

    above: how many frames, of this function and those that call it, are not looked at.
    """
    frame: FrameType | None = sys._getframe(above)
    while frame is not None and not is_model_frame(frame):
        frame = frame.f_back
    return "" if frame is None else line_of(frame)


def line_of(frame: FrameType) -> str:
    """Return "file:line" of what a frame runs."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_of_fake_tensors() -> bool:
    """Tell whether a call only makes a fake result, as for torch.vmap. Fake results are cached, so runs differ."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_model_frame(frame):
        if frame.f_code.co_filename.startswith(FAKE_TENSORS):
            return True
        frame = frame.f_back
    return False
