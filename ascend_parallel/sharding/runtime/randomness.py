"""Random numbers of a planned model. They follow from a seed that all ranks share, not from the ranks' generators.

The seed of a random operator is made of the module's seed, the number of the forward, the operator's name and the
rank's shard of the output. So random numbers differ between forwards, operators and shards. They are the same where
ranks hold the same shard, and where recompute runs a forward a second time. The processes' own generators do not
matter: ranks may be seeded differently, as data loading needs.
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
        The number of forwards so far.
    """

    def __init__(self, seed: int) -> None:
        """Begin before the first forward."""
        self.seed, self.forwards = seed, 0

    def begin(self) -> str:
        """Return the name of the next forward's random numbers (`Part.stream`)."""
        self.forwards += 1
        return f"{self.seed}/{self.forwards}"

    def restart(self, seed: int, forwards: int = 0) -> None:
        """Continue from this seed after this number of forwards."""
        self.seed, self.forwards = seed, forwards


def randomness_of(module: torch.nn.Module) -> Randomness | None:
    """Return the `Randomness` of a module that `parallelize` made; None for other modules."""
    found = getattr(module, "randomness", None) or getattr(vars(module).get("_ascend_parallel"), "randomness", None)
    return found if isinstance(found, Randomness) else None


def manual_seed(module: torch.nn.Module, seed: int) -> None:
    """Seed the random operators of a module that `parallelize` made. Every rank must pass the same seed.

    The default seed is that of the first rank's generator (`torch.initial_seed()`) when the module was made. Raises
    `ValueError` for a module that `parallelize` did not make, and for a seed that is not an integer from 0 to
    2**63 - 1.
    """
    randomness = randomness_of(module)
    if randomness is None:
        raise ValueError(f"{type(module).__name__} was not made by parallelize: torch.manual_seed seeds it")
    if type(seed) is not int or not 0 <= seed < MOST:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1, the same on every rank")
    randomness.restart(seed)


@contextmanager
def kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the state of the modules' random operators on exit."""
    found = _all_of(modules)
    before = [(randomness.seed, randomness.forwards) for randomness in found]
    try:
        yield
    finally:
        for randomness, state in zip(found, before, strict=True):
            randomness.restart(*state)


def plain_state(modules: Sequence[torch.nn.Module]) -> dict[str, Any] | None:
    """Return the state of the random operators, the same on all ranks; None if `parallelize` made no module."""
    found = _all_of(modules)
    return {"seed": found[0].seed, "forwards": found[0].forwards} if found else None


def load_plain_state(modules: Sequence[torch.nn.Module], state: dict[str, Any] | None) -> None:
    """Restore a `plain_state`; None, from a checkpoint without a state, changes nothing."""
    if state is not None:
        for randomness in _all_of(modules):
            randomness.restart(state["seed"], state["forwards"])


def _all_of(modules: Sequence[torch.nn.Module]) -> list[Randomness]:
    return [randomness for randomness in map(randomness_of, modules) if randomness is not None]
