"""Functions of DTensors that no rule lays out: those of the object and of autograd, and those that return values."""

from __future__ import annotations

import torch

from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS

_METHODS = """register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ untyped_storage storage_offset
    data_ptr __reduce_ex__ __setstate__ share_memory_ is_shared _is_view"""
_READ = "grad _grad _version output_nr retains_grad _backward_hooks _base"
_WRITTEN = "grad _grad requires_grad _backward_hooks"
OWN = METADATA_FUNCTIONS | {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _READ.split()),
    *(getattr(torch.Tensor, name).__set__ for name in _WRITTEN.split()),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
}
"""Run by torch: they read and write the tensor object, not its elements."""

_VALUES = """item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ equal allclose
    __array_wrap__ is_nonzero __dlpack__"""
GATHERING = frozenset(
    (*(getattr(torch.Tensor, name) for name in _VALUES.split()), torch.equal, torch.allclose, torch.is_nonzero)
)
"""Run on whole tensors, without a gradient: they read values."""
