"""The door through which a layer's forward runs, so that a second run can take over what the first gave."""

from __future__ import annotations

from collections.abc import Callable

import torch

Products = tuple[torch.Tensor, torch.Tensor | None]
"""What a layer gives, and what it saves for backward and would have to communicate for again, if that is kept."""
Once = Callable[[Callable[[], Products]], Products]


def at_once(run: Callable[[], Products]) -> Products:
    """Run it."""
    return run()
