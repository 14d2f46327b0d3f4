"""Work outside of the user's call: without autograd, dispatch and function modes, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_grad_and_modes(inference: bool = False) -> Iterator[None]:
    """Disable autograd, dispatch and function modes, and autocast: for work outside of the user's call.

    inference: whether the work runs in inference mode, where alone tensors of that mode may be written.
    What is not on is not switched off: torch's contexts take longer than a small operator.
    """
    with in_inference_mode(inference), torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
        pre_dispatch = _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        if pre_dispatch or torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        for device in _autocast_devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def modes_are_on(inference: bool) -> bool:
    """Tell whether `without_grad_and_modes` has more to switch off, or on, than autograd and functions of torch's."""
    return bool(
        torch.is_inference_mode_enabled() != inference
        or torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        or any(map(torch.is_autocast_enabled, _autocast_devices()))
    )


def in_inference_mode(inference: bool) -> AbstractContextManager[object]:
    """Return a context that is in inference mode, or is not; to leave the mode turns autograd on."""
    return nullcontext() if torch.is_inference_mode_enabled() == inference else torch.inference_mode(inference)


@cache
def _autocast_devices() -> tuple[str, ...]:
    """Return the devices of this machine; autocast of an absent one fails: torch_npu may be there without an NPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
