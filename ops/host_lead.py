"""Whether the host runs ahead of a device, and so whether rows that come later (ops/unfinished.py) gain anything."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import runs_ahead
from ascend_parallel.ops.unfinished import Captures, settle_around_captures
from ascend_parallel.process_groups.backend import backend_of

# By so many results of a group the host has to be ahead for rows that come later: a region takes the host about as long
# as two layers in chunks.
LEAD = 4


class Leads:
    """Tells whether the host runs ahead of a device: whether rows that come later are worth the host's time.

    Where the device waits for the host, a region costs the host more than it saves the device. So a layer waits for its
    rows at once, which takes the host no time there, unless the device still works on what was launched before the
    group's `LEAD`-th last such layer. Ranks may decide differently: no collective depends on it.
    """

    def __init__(self) -> None:
        """Know of no device yet."""
        self.asked = True  # a test that is about regions has all rows come later
        self._launched: weakref.WeakKeyDictionary[dist.ProcessGroup, deque[Any]] = weakref.WeakKeyDictionary()

    def host_is_ahead(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Tell whether the host is `LEAD` layers of the group ahead of the device; notes this one.

        True where a wait stops the host, so that rows save its time; and in a capture, which has no host.
        """
        if not self.asked or not runs_ahead(device.type) or backend_of(group, device).blocks_host:
            return True
        settle_around_captures()
        if Captures.running:
            return True
        launched = self._launched.setdefault(group, deque())
        ahead = len(launched) == LEAD and not launched.popleft().query()
        event = torch.Event(device.type)  # a new one: an event stays on the device of its first stream
        event.record(torch.accelerator.current_stream(device))
        launched.append(event)
        return ahead


LEADS = Leads()
