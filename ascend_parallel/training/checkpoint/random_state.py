"""The states of the random number generators of a training process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def random_state() -> State:
    """Return the generator states of torch, the current accelerator (if any), Python and numpy."""
    kind, keys, *rest = np.random.get_state()
    found: State = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        found[device.type] = torch.get_device_module(device).get_rng_state()
    return found


def set_random_state(state: State) -> None:
    """Set what `random_state` returned; the state of an accelerator that this process lacks is ignored."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type in state and torch.accelerator.is_available():
        torch.get_device_module(device).set_rng_state(state[device.type])
