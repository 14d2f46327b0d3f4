"""Whether the host runs ahead of a device, and so whether rows that come later (ops/unfinished.py) gain anything."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.clocks import runs_ahead
from ascend_parallel.ops.unfinished import Captures, settle_around_captures
from ascend_parallel.process_groups.backend import backend_of

# By so many results of a group the host has to be ahead for rows that come later: a region takes the host about as long
# as two layers in chunks.
LEAD = 4
# And for so many results without a break. A lead that a few long kernels gave, such as those of a loss, is soon used
# up, and then the device waits for what regions took of the host.
STEADY = 8


@dataclass
class _Lead:
    """What is known of the host's lead on one device, by the results of a group."""

    marks: deque[Any] = field(default_factory=deque)
    """Events of the last `LEAD` results."""
    unbroken: int = 0
    """For how many results the host has been ahead."""


class Leads:
    """Tells whether the host runs ahead of a device: whether rows that come later are worth the host's time.

    Where the device waits for the host, a region costs the host more than it saves the device. So a layer waits for its
    rows at once, which takes the host no time there, unless at each of the group's last `STEADY` such layers the device
    still worked on what was launched before the `LEAD`-th one before it. Ranks may decide differently: no collective
    depends on it.
    """

    def __init__(self) -> None:
        """Know of no device yet."""
        self.asked = True  # a test that is about regions has all rows come later
        # By group and device; None: a wait stops the host there.
        self._leads: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Lead | None]] = WeakKeyDictionary()

    def host_is_ahead(self, group: dist.ProcessGroup, device: torch.device, *, notes: bool = True) -> bool:
        """Tell whether the host has long been `LEAD` layers of the group ahead of the device.

        True where a wait stops the host, so that rows save its time; and in a capture, which has no host. notes: this
        is such a layer; else it only asks, as one without rows to leave.
        """
        if not self.asked:
            return True
        by_device = self._leads.setdefault(group, {})
        if device not in by_device:
            waits = not runs_ahead(device.type) or backend_of(group, device).blocks_host
            by_device[device] = None if waits else _Lead()
        if (lead := by_device[device]) is None:
            return True
        settle_around_captures()
        if Captures.running:
            return True
        if not notes:
            return lead.unbroken >= STEADY
        if len(lead.marks) < LEAD:
            mark = torch.Event(device.type)
        else:
            mark = lead.marks.popleft()
            lead.unbroken = 0 if mark.query() else lead.unbroken + 1
        mark.record(torch.accelerator.current_stream(device))
        lead.marks.append(mark)
        return lead.unbroken >= STEADY


LEADS = Leads()
