"""The dtype of a parameter's gradient: the parameter's own, or fp32 where many backwards add to a 16-bit gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

log = logging.getLogger("ascend_parallel")

WIDE = torch.float32


def accumulate_wide(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set autograd to keep and accumulate the gradients of 16-bit parameters in fp32.

    A 16-bit sum stops growing when a term is less than half its last bit: bf16 adds 1/1024 to itself up to 1/4.
    Warns where torch lacks `Tensor.grad_dtype` (before 2.10).
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_floating_point()]
    narrow = [parameter for parameter in trained if parameter.element_size() == 2]
    if narrow and not hasattr(narrow[0], "grad_dtype"):
        log.warning(
            "the gradients of several micro-batches, or merged batches, add up in %s, which loses small terms: torch "
            "%s cannot keep gradients in fp32; use torch 2.10 or later, or fewer micro-batches",
            narrow[0].dtype,
            torch.__version__,
        )
        return
    for parameter in narrow:
        parameter.grad_dtype = WIDE


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's `.grad`."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype
