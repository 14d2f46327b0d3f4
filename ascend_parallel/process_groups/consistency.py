"""Ranks compare settings, plans and models before they communicate.

If two ranks cut a collective differently, gloo aborts one of the processes in C++, and other backends hang. Ranks
therefore publish plain values in their group's store and read all ranks' values. The comparison uses no collective:
if ranks have come to different calls, it would match a collective of the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.process_groups import describe, listed, time_limit
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

# Seconds between two log lines of a rank that waits for others.
PATIENCE = 30.0
# Seconds after which a rank that waits looks whether another has given up.
LOOK = 1.0
# Seconds for which rank 0 waits until the others have read an outcome.
LEAVING = 10.0
# The outcome of an exchange to which all ranks have come; any other outcome is an error message.
COMPLETE = "complete"
CALLED_ALIKE = (
    "it has stopped, or called the layer another number of times (a layer has to be called alike on every rank of its "
    "group)"
)


class DisagreementError(RuntimeError):
    """Ranks of a group run with different settings, plans or versions, or a rank never came."""


class SettingsAgreement:
    """Compares settings on the ranks of each group, once for each group."""

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Compare what `settings` returns at the first call on a group: plain values by the user's name."""
        self._settings = settings
        self.confirmed: WeakSet[dist.ProcessGroup] = WeakSet()
        """The groups whose ranks have compared them."""

    def confirm(self, group: dist.ProcessGroup, found: Mapping[str, Any] | None = None) -> None:
        """Return once every rank of `group` has published the same settings; later calls look up a set.

        found
            What this rank found out about its settings in this group, such as a plan that it refuses: published in
            their place.

        Every rank calls this where all ranks of the group communicate. Raises `DisagreementError` on every rank: with
        the settings that differ, or, after the time limit of the group or its store, with the missing ranks.
        """
        if group not in self.confirmed:
            confirm_same(
                group,
                "its first overlapped layer",
                {"version of ascend_parallel": __version__, **self._settings(), **(found or {})},
                f"ranks of {describe(group)} run with different settings",
                "Export the same variables, and install the same version, on every rank",
                topic="settings",
                hint="it has stopped, or runs without overlap (is COC_PARALLEL_NUM exported there?)",
            )
            self.confirmed.add(group)


def exchange(
    group: dist.ProcessGroup,
    place: str,
    value: Mapping[str, Any],
    error: type[RuntimeError],
    *,
    topic: str = "",
    hint: str = CALLED_ALIKE,
) -> dict[int, dict[str, Any]]:
    """Send `value` to the other ranks of `group`; return every rank's value by global rank.

    place
        The place in the program where ranks wait, in words; part of the error.
    value
        Plain values that JSON can hold.
    topic
        Exchanges of another topic or error class are counted apart, and never meet this one.
    hint
        Why a rank may be missing; part of the error.

    Every rank of the group calls this. Raises `error` while a graph is captured: a replay would not exchange anything.
    Raises `error` with the ranks that did not come within the time limit of the group or of its store, whichever is
    shorter; sooner if a missing rank refused its settings (`refuse`). Either every rank that came gets the values, or
    every one raises. A rank that comes after that meets the others' next exchange.
    """
    me = dist.get_rank()
    if is_capturing():
        raise error(
            f"rank {me} has come to {place} while a graph is captured, where ranks cannot talk to each other: run the "
            "same steps without capture first, as a warm-up (with COC_PARALLEL_NUM=auto, COC_TUNE or COC_REGION=auto "
            "until the log says what they chose)"
        )
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return {me: dict(value)}
    store: Any = c10d._get_process_group_store(group)
    # Counted in the store, so that the count outlives a change of settings.
    prefix = f"ascend_parallel/exchange/{error.__name__}/{topic}"
    count = f"{prefix}/number/{me}"
    number = store.add(count, 1)
    while store.check([f"{prefix}/{number}/outcome"]):  # the others gave up waiting for this rank
        number = store.add(count, 1)
    keys = {rank: f"{prefix}/{number}/{rank}" for rank in dist.get_process_group_ranks(group)}
    outcome = f"{prefix}/{number}/outcome"
    store.set(keys[me], json.dumps(dict(value)))
    failure = _wait_for_ranks(group, keys, outcome, place, hint)
    # The first outcome is every rank's: a rank may come at the moment in which another gives up.
    decided = store.compare_set(outcome, "", failure or COMPLETE).decode()
    if decided != COMPLETE:
        _leave(store, f"{prefix}/{number}/read", lambda: sum(store.check([key]) for key in keys.values()))
        raise error(decided)
    texts = store.multi_get(list(keys.values()))
    # All ranks have come to this exchange, so no rank still reads the one before.
    for key in (str(me), "outcome", "read"):
        store.delete_key(f"{prefix}/{number - 1}/{key}")
    _leave(store, f"{prefix}/{number}/read", lambda: len(keys))
    return dict(zip(keys, map(json.loads, texts), strict=True))


def is_capturing() -> bool:
    """Tell whether the accelerator's current stream is captured into a graph."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module: Any = torch.get_device_module(accelerator)
    asked = getattr(module, "is_current_stream_capturing", None)
    # Where no device was used nothing is captured, and torch_npu on a machine without an NPU raises.
    return asked is not None and module.is_initialized() and bool(asked())


def confirm_same(
    group: dist.ProcessGroup | None, place: str, mine: Mapping[str, Any], problem: str, cure: str, **options: str
) -> int:
    """Raise `DisagreementError` on every rank unless `mine` is the same on all ranks; return the first rank's seed.

    The error reads ``<problem>: <name> is <value> on rank 0, ...; ... . <cure>``. The seed is that of torch's default
    generator. `options` are those of `exchange`.
    """
    if group is None:
        raise RuntimeError(f"{place} needs torch.distributed.init_process_group, on every rank")
    values = exchange(group, place, {**mine, "seed": torch.initial_seed()}, DisagreementError, **options)
    seeds = {rank: int(value.pop("seed")) for rank, value in values.items()}
    if differences := differing(values):
        texts = [f"{name} is {by_rank}" for name, by_rank in differences.items()]
        raise DisagreementError(f"{problem}: {'; '.join(texts)}. {cure}")
    return seeds[min(seeds)]


def differing(values: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names whose values differ between ranks, each with every rank's value in words."""
    names = dict.fromkeys(name for value in values.values() for name in value)
    return {
        name: ", ".join(f"{value.get(name)} on rank {rank}" for rank, value in values.items())
        for name in names
        if any(value.get(name) != values[min(values)].get(name) for value in values.values())
    }


def fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of the names, shapes and sums of all parameters and buffers.

    Models that were initialised from different seeds have different digests.
    """
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wide = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        digest.update(f"{name} {tuple(tensor.shape)} {wide.sum().item()} {wide.abs().sum().item()}".encode())
    return digest.hexdigest()[:16]


def begin_configure() -> None:
    """Count this rank's calls of `configure`; the count pairs the ranks' refusals."""
    if _has_store():
        c10d._get_default_store().add(_configure_count(dist.get_rank()), 1)


def refuse(error: Exception) -> None:
    """Tell ranks that wait for this rank, or will wait, that `configure` failed here and changed nothing."""
    if _has_store():
        text = f"configure() failed on rank {dist.get_rank()}, which kept what was in force: {error!r}"
        c10d._get_default_store().set(_refusal_key(dist.get_rank()), text)


def _wait_for_ranks(group: dist.ProcessGroup, keys: Mapping[int, str], outcome: str, place: str, hint: str) -> str:
    """Wait until every rank has set its key (`keys`: by global rank), or a rank has set the outcome.

    Returns "", or why this rank gives up. Logs the missing ranks every `PATIENCE` seconds.
    """

    def absence(seconds: float) -> str:
        return f"rank {listed(missing)} of {describe(group)} has not come to {place} within {seconds:g} s: {hint}"

    store: Any = c10d._get_process_group_store(group)
    limit, begin = time_limit(group).total_seconds(), time.monotonic()
    told, missing = begin, list(keys)
    while missing and not store.check([outcome]):
        if refusals := _refusals(missing):
            return refusals
        now = time.monotonic()
        if now - begin >= limit:
            return absence(limit)
        if now - told >= PATIENCE:
            log.warning("%s", absence(PATIENCE))
            told = now
        try:
            wait = max(min(begin + limit - now, told + PATIENCE - now, LOOK), 0.01)
            store.wait([keys[rank] for rank in missing], timedelta(seconds=wait))
            return ""
        except RuntimeError:  # this wait timed out, or the store is gone; then check() raises
            missing = [rank for rank in missing if not store.check([keys[rank]])]
    return ""


def _leave(store: Any, read: str, came: Callable[[], int]) -> None:
    """Count this rank (key `read`) as one that has read the outcome; rank 0 waits for all that came.

    Its process may host the store: if it ended with an error at once, the others would lose the connection instead of
    reading the reason.
    """
    with suppress(RuntimeError):  # rank 0 has waited long enough, and taken the store along
        store.add(read, 1)
        end = time.monotonic() + LEAVING
        while dist.get_rank() == 0 and int(store.get(read)) < came() and time.monotonic() < end:
            time.sleep(0.001)


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
