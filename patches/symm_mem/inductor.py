"""The patch of torch.compile's micro-pipeline pass (``_micro_pipeline_tp``), which turns collectives and matmuls
into torch's two operators.

The pass leaves a graph alone without NCCL, or if symmetric memory is not enabled for the group. Neither matters to
kernels that use collectives. The patch replaces the pass's two functions, which only the pass calls, by their names
in its module. For a graph on a device with a kernel they answer both questions with yes while the original runs, to
its own thread. Graphs on other devices go to the original.

The pass finds all collectives first, then fuses one after the other. A matmul between two collectives is fused with
the gather before it, and erased; the pass would then fuse the erased matmul again, and fail. The replacements leave
the collective after it as it is.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._symmetric_memory as symmetric_memory
import wrapt

from ascend_parallel.patches.base import PatchError
from ascend_parallel.patches.symm_mem.devices import (
    GATHER,
    SCALED_GATHER,
    SCALED_SCATTER,
    SCATTER,
    has_kernel,
    key_of,
)
from ascend_parallel.patches.symm_mem.kernels import REDUCE_OPS

log = logging.getLogger("ascend_parallel")

PASS = "torch._inductor.fx_passes.micro_pipeline_tp"
# The pass's functions, each with its only parameter.
FUNCTIONS = {"fuse_all_gather_matmul": "all_gather", "fuse_matmul_reduce_scatter": "reduce_scatter"}
# What the replacements read in the pass's module.
HELPERS = ("_find_consumer_matmuls", "_find_producer_matmul", "_get_tensor", "_is_last_dim", "_ScaledMatmul")

Fuse = Callable[[Any], None]
_SWAPPING = threading.Lock()


class PassPatch:
    """The pass's two functions replaced: once its module is imported, and until `revert`."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._wanted = False
        self._hooked = False
        self._originals: dict[str, Fuse] = {}
        self._replacements: dict[str, Fuse] = {}

    @property
    def applied(self) -> bool:
        """Whether the pass's functions are replaced."""
        return bool(self._originals)

    def apply(self) -> None:
        """Replace the functions now, or as soon as torch.compile imports them: importing inductor takes seconds."""
        self._wanted = True
        if PASS in sys.modules:
            self._replace(sys.modules[PASS])
        elif not self._hooked:
            self._hooked = True
            wrapt.register_post_import_hook(self._replace, PASS)

    def check_revert(self) -> None:
        """Raise `PatchError` if somebody has replaced a function on top."""
        for name, replacement in self._replacements.items():
            found = getattr(sys.modules[PASS], name, None)
            if found is not replacement:
                raise PatchError(f"{PASS}.{name}: another replacement, {found!r}, is on top: take it back first")

    def revert(self) -> None:
        """Restore the functions."""
        self.check_revert()
        self._wanted = False
        for name, original in self._originals.items():
            setattr(sys.modules[PASS], name, original)
        self._originals, self._replacements = {}, {}

    def _replace(self, module: ModuleType) -> None:
        if not self._wanted or self._originals:
            return
        if unlike := _unlike(module):
            log.warning("torch.compile's async tensor-parallel pass stays as it is in torch %s: %s", *unlike)
            return
        for name, parameter in FUNCTIONS.items():
            original = getattr(module, name)
            self._originals[name] = original
            self._replacements[name] = _fuse(original, module, gathers=parameter == "all_gather")
            setattr(module, name, self._replacements[name])


def _unlike(module: ModuleType) -> tuple[str, str] | None:
    """Return torch's version and how the pass differs from the pass that the replacements know, or None."""
    missing = [name for name in (*FUNCTIONS, *HELPERS) if not hasattr(module, name)]
    if missing:
        return torch.__version__, f"{PASS} has no {', '.join(missing)}"
    if not hasattr(torch.compiler.config, "cache_key_tag"):
        return torch.__version__, "its caches on disk cannot be told of the kernels (torch.compiler.config)"
    for name, parameter in FUNCTIONS.items():
        found = list(inspect.signature(getattr(module, name)).parameters)
        if found != [parameter]:
            return torch.__version__, f"{name} has the parameters {', '.join(found)}, expected {parameter}"
    return None


def _fuse(original: Fuse, module: Any, *, gathers: bool) -> Fuse:
    """Make the replacement of the pass's function for gathers, or of that for scatters."""
    plain, scaled = (GATHER, SCALED_GATHER) if gathers else (SCATTER, SCALED_SCATTER)

    @functools.wraps(original)
    def fuse(collective: Any) -> None:
        node = collective.shard_node if gathers else collective.input_node
        if node._erased:
            return None
        x = module._get_tensor(node)
        key = key_of(x.device)
        if key is None:
            return original(collective)
        if gathers:
            matmuls, dim, covered = module._find_consumer_matmuls(collective.res_node), collective.gather_dim, True
        else:
            matmul, dim = _producer(node, module), collective.scatter_dim
            matmuls, covered = [matmul], matmul is not None and collective.reduce_op in REDUCE_OPS
        operator = scaled if any(isinstance(each, module._ScaledMatmul) for each in matmuls) else plain
        covered = covered and not module._is_last_dim(x, dim) and (operator == scaled or x.dtype.is_floating_point)
        if covered and has_kernel(operator, key):
            with _allowed():
                return original(collective)
        return None

    return fuse


def _producer(node: Any, module: Any) -> Any:
    """Return the matmul that makes `node`, or None.

    The pass's own function asserts that what a reshape reshapes has a tensor argument; a constant has none.
    """
    if node.target is torch.ops.aten.reshape.default and node.args[0].op != "call_function":
        return None
    return module._find_producer_matmul(node)


@contextmanager
def _allowed() -> Iterator[None]:
    """Answer this thread's questions for NCCL and symmetric memory with yes."""
    mine = threading.get_ident()

    def yes(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args: threading.get_ident() == mine or original(*args)

    with _SWAPPING, ExitStack() as stack:
        for holder, name in (
            (torch.distributed, "is_nccl_available"),
            (symmetric_memory, "is_symm_mem_enabled_for_group"),
        ):
            stack.enter_context(patch.object(holder, name, yes(getattr(holder, name))))
        yield
