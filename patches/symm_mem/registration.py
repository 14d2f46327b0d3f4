"""Register the kernels with torch.library, with the patch of inductor's pass, and take both back."""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.patches.symm_mem.devices import GATHER, KEYS, SCATTER, has_kernel
from ascend_parallel.patches.symm_mem.inductor import PassPatch
from ascend_parallel.patches.symm_mem.kernels import all_gather_matmul, matmul_reduce_scatter

KERNELS = {GATHER: all_gather_matmul, SCATTER: matmul_reduce_scatter}
# Part of the key of torch.compile's caches on disk, which do not know of the kernels: a program compiled with them
# must not be loaded without them, nor the reverse.
CACHE_TAG = "ascend_parallel.symm_mem"


class Registration:
    """What this process has registered."""

    def __init__(self) -> None:
        """Register nothing yet."""
        self._library: Any = None
        self._kernels: tuple[str, ...] = ()
        self._pass_patch = PassPatch()

    def register(self) -> tuple[str, ...]:
        """Register the kernels that torch lacks, on CPU and PrivateUse1; return the operators with their keys.

        A kernel that exists stays. A second call changes nothing.
        """
        if self._library is None:
            free = [(name, key) for name in KERNELS for key in KEYS if not has_kernel(name, key)]
            library: Any = torch.library.Library("symm_mem", "FRAGMENT")  # type: ignore[no-untyped-call]
            for name, key in free:
                library.impl(name, KERNELS[name], key)
            self._library = library
            self._kernels = tuple(f"symm_mem::{name} on {key}" for name, key in free)
            self._pass_patch.apply()
            _tag_caches(True)
        return self._kernels

    def unregister(self) -> None:
        """Take back what `register` did; raises `PatchError` if another patch of inductor's pass is on top."""
        if self._library is not None:
            self._pass_patch.revert()
            self._library._destroy()
            self._library, self._kernels = None, ()
            _tag_caches(False)


REGISTRATION = Registration()


def _tag_caches(on: bool) -> None:
    config: Any = torch.compiler.config
    if not hasattr(config, "cache_key_tag"):  # then the pass is not patched either
        return
    tags = [tag for tag in config.cache_key_tag.split() if tag != CACHE_TAG]
    config.cache_key_tag = " ".join([*tags, CACHE_TAG] if on else tags)
