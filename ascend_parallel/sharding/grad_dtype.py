"""The dtype in which a parameter's gradient is kept: its own, or fp32 where many backwards add to one of 16 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

log = logging.getLogger("ascend_parallel")

WIDE = torch.float32


def accumulate_wide(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have autograd keep and add up in fp32 the gradients of those parameters that have 16 bits.

    A 16-bit sum stops growing when a term is less than half its last bit: bf16 adds 1/1024 to itself up to 1/4.
    Warns where torch cannot (`Tensor.grad_dtype` is new in 2.10).
    """
    narrow = [one for one in parameters if one.requires_grad and one.is_floating_point() and one.element_size() == 2]
    if narrow and not hasattr(narrow[0], "grad_dtype"):
        log.warning(
            "the gradients of several micro-batches, or merged batches, add up in %s, which loses small ones: torch %s "
            "cannot keep them in fp32; take torch 2.10 or later, or fewer of them",
            narrow[0].dtype,
            torch.__version__,
        )
        return
    for parameter in narrow:
        parameter.grad_dtype = WIDE


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter's `.grad` has."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype
