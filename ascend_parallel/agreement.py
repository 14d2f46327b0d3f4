"""Ranks agree on what they will do before they communicate.

Two ranks that cut one collective differently do not merely get wrong numbers: gloo ends one of the
processes in C++, other backends wait for ever. So before a group first communicates, each of its ranks
publishes its settings and the package's version through the group's store and reads everybody's.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.groups import describe, time_limit
from ascend_parallel.settings import PER_RANK, Settings, option_name
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

# Seconds after which a rank that waits for others says so, and again after each as many.
PATIENCE = 30.0


class DisagreementError(RuntimeError):
    """Ranks of one group run with different settings or versions, or some never came."""


class Agreement:
    """Remembers the groups whose ranks were found to agree on one value of the settings."""

    def __init__(self, settings: Settings) -> None:
        """Agree on `settings`, group by group, as `confirm` is called."""
        self._settings = settings
        self._confirmed: WeakSet[dist.ProcessGroup] = WeakSet()

    def confirm(self, group: dist.ProcessGroup) -> None:
        """Return once every rank of `group` has published the same; a look-up in a set from then on.

        To be called where all of them communicate. Raises `DisagreementError` on every rank, naming what differs, or,
        when the time limit of the group or its store has passed, the ranks that never published.
        """
        if group not in self._confirmed:
            _compare(group, _exchange(group, self._settings))
            self._confirmed.add(group)


def _exchange(group: dist.ProcessGroup, settings: Settings) -> dict[int, dict[str, Any]]:
    """Write this rank's settings to the group's store; return every rank's, by rank."""
    if dist.get_backend(group) == "fake":  # ranks that do not exist have nothing to say
        return {}
    store, me = c10d._get_process_group_store(group), dist.get_rank()
    mine = {"version of ascend_parallel": __version__}
    mine |= {option_name(name): value for name, value in settings.as_dict().items() if name not in PER_RANK}
    # So many times have all ranks come: one that came alone, or changed its settings alone, is not ahead of the others.
    count = f"ascend_parallel/round/{me}"
    round_ = store.add(count, 0)
    keys = {rank: f"ascend_parallel/settings/{round_}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[me], json.dumps(mine))
    try:
        wait_for_ranks(group, keys, DisagreementError, functools.partial(_absence, group))
    except DisagreementError:
        store.delete_key(keys[me])  # for who comes later, this rank has not come
        raise
    store.add(count, 1)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _compare(group: dist.ProcessGroup, published: dict[int, dict[str, Any]]) -> None:
    names = {name: None for settings in published.values() for name in settings}
    differences = [_difference(name, published) for name in names if _differs(name, published)]
    if differences:
        raise DisagreementError(
            f"ranks of {describe(group)} run with different settings: {'; '.join(differences)}. "
            "Export the same variables, and install the same version, on every rank"
        )


def wait_for_ranks(
    group: dist.ProcessGroup,
    keys: dict[int, str],
    error: type[RuntimeError],
    absence: Callable[[list[int], float], str],
) -> None:
    """Wait until every rank has set its key, by global rank, in the group's store.

    Says so every `PATIENCE` seconds, and after the time limit of the group or its store, the shorter, raises
    `error`; ``absence(missing ranks, seconds)`` is what is said. Raises it sooner if one of them refused (`refuse`).
    """
    store: Any = c10d._get_process_group_store(group)
    limit = time_limit(group).total_seconds()
    end = time.monotonic() + limit
    missing = list(keys)
    while missing:
        if told := _refusals(missing):
            raise error(told)
        left = end - time.monotonic()
        try:
            store.wait([keys[rank] for rank in missing], timedelta(seconds=max(min(left, PATIENCE), 0.01)))
            return
        except RuntimeError:  # time is up for this round of waiting, or the store is gone, which check() then raises
            missing = [rank for rank in missing if not store.check([keys[rank]])]
        if missing and left <= PATIENCE:
            raise error(absence(missing, limit))
        if missing:
            log.warning("%s", absence(missing, PATIENCE))


def _absence(group: dist.ProcessGroup, missing: list[int], seconds: float) -> str:
    return (
        f"rank {', '.join(map(str, missing))} of {describe(group)} has not come to its first overlapped layer within "
        f"{seconds:g} s: it has stopped, or runs without overlap (is COC_PARALLEL_NUM exported there?)"
    )


def configuring() -> None:
    """Count this rank's changes of settings, by which ranks find each other's refusals."""
    if _can_tell():
        c10d._get_default_store().add(_changes(dist.get_rank()), 1)


def refuse(error: Exception) -> None:
    """Let ranks that wait for this one, or will, know that it did not take the settings that they may have taken."""
    if _can_tell():
        said = f"configure() failed on rank {dist.get_rank()}, which kept what was in force: {error!r}"
        c10d._get_default_store().set(_refusal(dist.get_rank()), said)


def _can_tell() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def _refusals(ranks: list[int]) -> str:
    """Return what those of `ranks` said that refused the change of settings at which this rank is."""
    store: Any = c10d._get_default_store()
    keys = [_refusal(rank) for rank in ranks]
    return "; ".join(store.get(key).decode() for key in keys if store.check([key]))


def _refusal(rank: int) -> str:
    count = c10d._get_default_store().add(_changes(dist.get_rank()), 0)
    return f"ascend_parallel/refused/{count}/{rank}"


def _changes(rank: int) -> str:
    return f"ascend_parallel/changes/{rank}"


def _differs(name: str, published: dict[int, dict[str, Any]]) -> bool:
    values = [settings.get(name) for settings in published.values()]
    return any(value != values[0] for value in values)


def _difference(name: str, published: dict[int, dict[str, Any]]) -> str:
    return f"{name} is " + ", ".join(f"{settings.get(name)} on rank {rank}" for rank, settings in published.items())
