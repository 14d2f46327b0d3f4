"""Random numbers of a planned model: from a seed that its ranks agreed on, not from their own generators.

Each forward of a module has a number, each of its random operators a name, each rank a piece of its output: these and
the seed give the operator's seed. So numbers differ between forwards, operators and pieces, agree where ranks hold the
same piece, and a forward that runs again (recomputation) draws the same, whatever the processes' own generators hold:
ranks may be seeded apart, as data loading wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

MOST = 2**63


class Randomness:
    """Seeds the forwards of a planned model.

    seed
        The same on every rank.
    forwards
        How many forwards there were.
    """

    def __init__(self, seed: int) -> None:
        """Begin before the first forward."""
        self.seed, self.forwards = seed, 0

    def begin(self) -> str:
        """Return the name of the next forward's random numbers (`Part.stream`)."""
        self.forwards += 1
        return f"{self.seed}/{self.forwards}"

    def restart(self, seed: int, forwards: int = 0) -> None:
        """Go on as if there had been as many forwards since that seed."""
        self.seed, self.forwards = seed, forwards


def randomness_of(module: torch.nn.Module) -> Randomness | None:
    """Return what seeds a module's random operators, if `parallelize` made it."""
    found = getattr(module, "randomness", None) or getattr(vars(module).get("_ascend_parallel"), "randomness", None)
    return found if isinstance(found, Randomness) else None


def manual_seed(module: torch.nn.Module, seed: int) -> None:
    """Start the random operators of a module that `parallelize` made anew. Every rank calls it with the same seed.

    By default the seed is that of the first rank's generator (`torch.initial_seed()`) when the module was made. Raises
    `ValueError` for a module that is no such, and a seed that is no whole number from 0 to 2**63 - 1.
    """
    found = randomness_of(module)
    if found is None:
        raise ValueError(f"{type(module).__name__} was not made by parallelize: torch.manual_seed seeds it")
    if type(seed) is not int or not 0 <= seed < MOST:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1, the same on every rank")
    found.restart(seed)


@contextmanager
def kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have random operators go on afterwards as if nothing had run inside."""
    found = [one for one in map(randomness_of, modules) if one is not None]
    before = [(one.seed, one.forwards) for one in found]
    try:
        yield
    finally:
        for one, state in zip(found, before, strict=True):
            one.restart(*state)


def plain_state(modules: Sequence[torch.nn.Module]) -> dict[str, Any] | None:
    """Return where the modules' random operators stand, alike on all ranks; None: `parallelize` made none of them."""
    found = next((one for one in map(randomness_of, modules) if one is not None), None)
    return None if found is None else {"seed": found.seed, "forwards": found.forwards}


def load_plain_state(modules: Sequence[torch.nn.Module], state: dict[str, Any] | None) -> None:
    """Go on drawing where `plain_state` was taken; None, of a checkpoint without one, leaves all as it is."""
    for module in modules if state is not None else ():
        found = randomness_of(module)
        if found is not None and state is not None:
            found.restart(state["seed"], state["forwards"])
