"""Ranks compare settings, plans and models before they communicate.

If two ranks cut a collective differently, gloo aborts one of the processes in C++, and other backends hang. Ranks
therefore publish plain values in their group's store and read all ranks' values. The comparison uses no collective:
if ranks have come to different calls, it would match a collective of the run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.process_groups import describe, time_limit
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

# Seconds between two log lines of a rank that waits for others.
PATIENCE = 30.0


class DisagreementError(RuntimeError):
    """Ranks of a group run with different settings, plans or versions, or a rank never came."""


class SettingsAgreement:
    """Compares settings on the ranks of each group, once for each group."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Compare `settings`: plain values by the user's name of the option."""
        self._settings = settings
        self._confirmed: WeakSet[dist.ProcessGroup] = WeakSet()

    def confirm(self, group: dist.ProcessGroup) -> None:
        """Return once every rank of `group` has published the same settings; later calls look up a set.

        Every rank calls this where all ranks of the group communicate. Raises `DisagreementError` on every rank: with
        the settings that differ, or, after the time limit of the group or its store, with the missing ranks.
        """
        if group not in self._confirmed:
            _compare_settings(group, _publish(group, self._settings))
            self._confirmed.add(group)


def exchange(
    group: dist.ProcessGroup, place: str, value: Mapping[str, Any], error: type[RuntimeError]
) -> dict[int, dict[str, Any]]:
    """Send `value` to the other ranks of `group`; return every rank's value by global rank.

    place
        The place in the program where ranks wait, in words; part of the error.
    value
        Plain values that JSON can hold.

    Every rank of the group calls this. Raises `error` with the ranks that did not come within the time limit of the
    group or of its store, whichever is shorter.
    """
    me = dist.get_rank()
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return {me: dict(value)}
    store = c10d._get_process_group_store(group)
    # Counted in the store, so that the count outlives a change of settings.
    prefix = f"ascend_parallel/exchange/{error.__name__}"
    number = store.add(f"{prefix}/number/{me}", 1)
    keys = {rank: f"{prefix}/{number}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[me], json.dumps(dict(value)))
    wait_for_ranks(group, keys, error, functools.partial(_absent_from_exchange, group, place))
    values = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    # Every rank that has come this far has read exchange number - 1, so no rank still reads exchange number - 2.
    store.delete_key(f"{prefix}/{number - 2}/{me}")
    return values


def confirm_same(group: dist.ProcessGroup | None, place: str, mine: Mapping[str, str], problem: str, cure: str) -> int:
    """Raise `DisagreementError` on every rank unless `mine` is the same on all ranks; return the first rank's seed.

    The error reads ``<problem>: <name> is <value> on rank 0, ... . <cure>``. The seed is that of torch's default
    generator.
    """
    if group is None:
        raise RuntimeError(f"{place} needs torch.distributed.init_process_group, on every rank")
    values = exchange(group, place, {**mine, "seed": torch.initial_seed()}, DisagreementError)
    for name in mine:
        if any(value.get(name) != mine[name] for value in values.values()):
            which = ", ".join(f"{value.get(name)} on rank {rank}" for rank, value in values.items())
            raise DisagreementError(f"{problem}: {name} is {which}. {cure}")
    return int(values[min(values)]["seed"])


def fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of the names, shapes and sums of all parameters and buffers.

    Models that were initialised from different seeds have different digests.
    """
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wide = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        digest.update(f"{name} {tuple(tensor.shape)} {wide.sum().item()} {wide.abs().sum().item()}".encode())
    return digest.hexdigest()[:16]


def wait_for_ranks(
    group: dist.ProcessGroup,
    keys: Mapping[int, str],
    error: type[RuntimeError],
    absence: Callable[[list[int], float], str],
) -> None:
    """Wait until every rank has set its key (`keys`: by global rank) in the group's store.

    Logs ``absence(missing ranks, seconds)`` every `PATIENCE` seconds. Raises `error` with that text after the time
    limit of the group or of its store, whichever is shorter; sooner if a missing rank refused its settings (`refuse`).
    """
    store: Any = c10d._get_process_group_store(group)
    limit = time_limit(group).total_seconds()
    end = time.monotonic() + limit
    missing = list(keys)
    while missing:
        if refusals := _refusals(missing):
            raise error(refusals)
        left = end - time.monotonic()
        try:
            store.wait([keys[rank] for rank in missing], timedelta(seconds=max(min(left, PATIENCE), 0.01)))
            return
        except RuntimeError:  # this round timed out, or the store is gone; then check() raises
            missing = [rank for rank in missing if not store.check([keys[rank]])]
        if missing and left <= PATIENCE:
            raise error(absence(missing, limit))
        if missing:
            log.warning("%s", absence(missing, PATIENCE))


def begin_configure() -> None:
    """Count this rank's calls of `configure`; the count pairs the ranks' refusals."""
    if _has_store():
        c10d._get_default_store().add(_configure_count(dist.get_rank()), 1)


def refuse(error: Exception) -> None:
    """Tell ranks that wait for this rank, or will wait, that `configure` failed here and changed nothing."""
    if _has_store():
        text = f"configure() failed on rank {dist.get_rank()}, which kept what was in force: {error!r}"
        c10d._get_default_store().set(_refusal_key(dist.get_rank()), text)


def _publish(group: dist.ProcessGroup, settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Write this rank's settings to the group's store; return every rank's, by rank."""
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return {}
    store, me = c10d._get_process_group_store(group), dist.get_rank()
    mine = {"version of ascend_parallel": __version__, **settings}
    # Counts only rounds in which all ranks came, so that a rank that came alone is not ahead of the others.
    count = f"ascend_parallel/round/{me}"
    round_ = store.add(count, 0)
    keys = {rank: f"ascend_parallel/settings/{round_}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[me], json.dumps(mine))
    try:
        wait_for_ranks(group, keys, DisagreementError, functools.partial(_absent_from_layer, group))
    except DisagreementError:
        store.delete_key(keys[me])  # a rank that comes later must not count this rank as present
        raise
    store.add(count, 1)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _compare_settings(group: dist.ProcessGroup, published: dict[int, dict[str, Any]]) -> None:
    names = {name: None for settings in published.values() for name in settings}
    values = {name: [settings.get(name) for settings in published.values()] for name in names}
    differences = [
        f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in zip(published, by_rank, strict=True))
        for name, by_rank in values.items()
        if any(value != by_rank[0] for value in by_rank)
    ]
    if differences:
        raise DisagreementError(
            f"ranks of {describe(group)} run with different settings: {'; '.join(differences)}. "
            "Export the same variables, and install the same version, on every rank"
        )


def _absent_from_layer(group: dist.ProcessGroup, missing: list[int], seconds: float) -> str:
    return (
        f"rank {', '.join(map(str, missing))} of {describe(group)} has not come to its first overlapped layer within "
        f"{seconds:g} s: it has stopped, or runs without overlap (is COC_PARALLEL_NUM exported there?)"
    )


def _absent_from_exchange(group: dist.ProcessGroup, place: str, missing: list[int], seconds: float) -> str:
    return (
        f"rank {', '.join(map(str, missing))} of {describe(group)} has not come to {place} within {seconds:g} s: it "
        "has stopped, or called the layer another number of times (a layer has to be called alike on every rank of "
        "its group)"
    )


def _has_store() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def _refusals(ranks: list[int]) -> str:
    """Return the refusals of `ranks` in this rank's latest `configure` call."""
    store: Any = c10d._get_default_store()
    keys = [_refusal_key(rank) for rank in ranks]
    return "; ".join(store.get(key).decode() for key in keys if store.check([key]))


def _refusal_key(rank: int) -> str:
    count = c10d._get_default_store().add(_configure_count(dist.get_rank()), 0)
    return f"ascend_parallel/refused/{count}/{rank}"


def _configure_count(rank: int) -> str:
    return f"ascend_parallel/changes/{rank}"
