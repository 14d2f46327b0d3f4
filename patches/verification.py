"""Select the calls of patched layers that a run checks; check.py checks them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.patches.check import Check, CheckedCall, CheckRules
from ascend_parallel.settings import Settings


@dataclass
class _Calls:
    """A layer's number of calls, and the calls left before the next check, with (True) and without gradients."""

    total: int = 0
    left: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


class Verifier:
    """Checks the first call of each patched layer, then every N-th call."""

    def __init__(
        self,
        settings: Settings,
        confirm: Callable[[dist.ProcessGroup], Callable[[], None]],
        by: str,
        beside_run: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Count from zero; `settings` has the interval and the error limit.

        ``confirm(group)()`` compares the settings of the group's ranks; `by` and `beside_run` as in `CheckRules`.
        """
        self._every, self._confirm = settings.verify_every, confirm
        self._rules = CheckRules(settings.verify_limit, by, beside_run)
        self._calls: WeakKeyDictionary[torch.nn.Module, _Calls] = WeakKeyDictionary()

    def run(self, call: CheckedCall) -> Any:
        """Run the call; if its check is due, also run the original and compare."""
        returned, compare = self.start(call)
        if compare is not None:
            compare()
        return returned

    def start(self, call: CheckedCall) -> tuple[Any, Callable[[], None] | None]:
        """Run the call; return also what runs the original and compares, or None if the check of this call is not due.

        A call may return rows that are not finished: compare once they are.

        Calls with and without gradients are counted separately: activation recomputation alternates between the two,
        so an even N would check only one kind. If a due call does not reach its check (recomputation may stop early),
        the next call is due.
        """
        calls = self._calls.setdefault(call.layer, _Calls())
        calls.total += 1
        graded = call.graded
        if calls.left[graded]:
            calls.left[graded] -= 1
            return call.run(None), None
        if call.operands["input"].is_cuda and torch.cuda.is_current_stream_capturing():
            self.note("calls captured in a CUDA graph are not checked")
            return call.run(None), None
        self._confirm(call.group)()
        check = Check(call, calls.total, self._rules)
        returned = check.run(call)

        def compare() -> None:
            check.compare(call, returned)
            calls.left[graded] = self._every - 1

        return returned, compare

    def note(self, text: str) -> None:
        """Note a fact that limits the checks."""
        LEDGER.note(text, dist.get_rank() if dist.is_initialized() else 0)
