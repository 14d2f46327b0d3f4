"""Why a model cannot be traced: the line of the model, what stands there, and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import extract_tb
from types import TracebackType

import torch

from ascend_parallel.sharding.tracing.model_files import is_model_file

OWN = str(Path(__file__).parent)
VALUES = (
    "the value of a tensor decides what runs next (if, while, .item(), .tolist(), a loop over a tensor). A graph runs "
    "the same operators for all values: choose by torch.where or multiply by a mask, or make the number an argument of "
    "the forward"
)
SHAPES = (
    "the shape of a tensor depends on its values (nonzero, a boolean index, unique), and shapes have to be fixed: keep "
    "the shape, and choose by torch.where or multiply by a mask. Experts compute all tokens and are weighted, with 0 "
    'for those not chosen (transformers: experts_implementation="batched_mm" or "grouped_mm")'
)
NUMPY = "numpy computes outside of torch: compute with tensors, or give the number as an argument of the forward"
CONTAINER = (
    "return tensors in tuples, lists, dicts or dataclasses known to torch.utils._pytree (transformers: "
    "config.use_cache = False, so that no cache is returned)"
)
CONTROL_FLOW = "write out both branches and choose by torch.where"
# What the first line of an exception's name and message matches, and what to do; the first match counts.
ADVICE = (
    (r"DynamicOutputShape|nonzero|unbacked.*u\d+ \(", SHAPES),
    (r"data-dependent|DataDependent|_local_scalar_dense|Cannot (cast|convert).*Sym", VALUES),
    (r"numpy", NUMPY),
    (r"not a known type|pytree", CONTAINER),
    (r"higher order operator|HigherOrderOp", CONTROL_FLOW),
)
FRAME = re.compile(r'File "(.+?)", line (\d+)')


def reason(error: BaseException) -> str:
    """Return why torch.export failed, beginning with the line of the model, such as "model.py:12: ...; ..."."""
    lines = str(error).strip().splitlines()
    message = lines[0].partition(". See https://")[0].rstrip() if lines else type(error).__name__
    place, found = _place(error), _advice(error, message)
    if found in (VALUES, SHAPES):
        message, found = found, ""  # torch's message has names of symbols; it remains as the cause
    return (f"{place}: " if place else "") + message + (f"; {found}" if found else "")


def place_of(node: torch.fx.Node) -> str:
    """Return "file:line: " of the model's line that ran a traced node, or "" if that is unknown."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    places = [f"{file}:{line}: " for file, line in frames if _is_model_file(file)]
    return places[-1] if places else ""


def _advice(error: BaseException, message: str) -> str:
    text = f"{type(error).__name__}: {message}"
    if re.search("data-dependent", text) and re.search(r"Size-like symbols: u", text):
        return SHAPES
    return next((advice for pattern, advice in ADVICE if re.search(pattern, text)), "")


def _place(error: BaseException) -> str:
    """Return the innermost line of the model in the traceback of an exception or of one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        place = _innermost(seen.__traceback__)
        if place:
            return place
        seen = seen.__cause__ or seen.__context__
    return ""


def _innermost(traceback: TracebackType | None) -> str:
    frames = [frame for frame in extract_tb(traceback) if _is_model_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_model_file(name: str) -> bool:
    return is_model_file(name) and not name.startswith(OWN)
