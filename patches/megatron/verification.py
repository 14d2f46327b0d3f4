"""Which calls of Megatron-core's patched layers are checked inside a run; check.py checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.patches.megatron.check import Check, LayerCall
from ascend_parallel.patches.megatron.original import Output
from ascend_parallel.patches.megatron.watching import unwrapped
from ascend_parallel.settings import Settings


@dataclass
class _Calls:
    """How often a layer was called, and how many calls with and without gradients come before the next check."""

    total: int = 0
    left: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


class Verifier:
    """Has the first call of each layer checked, and from then on every n-th."""

    def __init__(
        self,
        settings: Settings,
        group_of: Callable[[Any], dist.ProcessGroup],
        confirm: Callable[[dist.ProcessGroup], Callable[[], None]],
    ) -> None:
        """Count from zero; `settings` say how often to check and what to allow.

        `group_of` gives a layer's group, `confirm` what has the ranks of a group compare their settings.
        """
        self._every, self._limit = settings.verify_every, settings.verify_limit
        self._group_of, self._confirm = group_of, confirm
        self._calls: WeakKeyDictionary[torch.nn.Module, _Calls] = WeakKeyDictionary()

    def run(self, call: LayerCall) -> Output:
        """Run the call, and beside it the original if the call is due.

        Calls with gradients are counted apart from those without: recomputation of activations makes
        one of each in turn, and an even n would never meet the one or the other. A call that is due
        and does not come to its check (recomputation may stop early) leaves the next one due.
        """
        calls = self._calls.setdefault(call.layer, _Calls())
        calls.total += 1
        graded = call.graded
        if calls.left[graded]:
            calls.left[graded] -= 1
            return call.patched(unwrapped)
        if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.note("calls captured in a CUDA graph are not checked")
            return call.patched(unwrapped)
        group = self._group_of(call.layer)
        self._confirm(group)()
        result = Check(call, group, calls.total, self._limit).forward(call)
        calls.left[graded] = self._every - 1
        return result

    def note(self, text: str) -> None:
        """Say what cannot be checked."""
        LEDGER.note(text, dist.get_rank() if dist.is_initialized() else 0)
