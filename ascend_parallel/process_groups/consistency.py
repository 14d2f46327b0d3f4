"""Ranks compare settings, plans and models before they communicate.

If two ranks cut a collective differently, gloo aborts one of the processes in C++, and other backends hang. Ranks
therefore publish plain values in their group's store and read all ranks' values. The comparison uses no collective:
if ranks have come to different calls, it would match a collective of the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.process_groups import describe, listed, time_limit
from ascend_parallel.process_groups.rendezvous import Rendezvous
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

# Seconds between two log lines of a rank that waits for others.
PATIENCE = 30.0
# The topic of what ranks tell about `configure`, to all ranks.
CONFIGURE = "configure"
# The outcome of a rendezvous to which all ranks have come; any other outcome is an error message.
COMPLETE = "complete"
# The name of the text of a rank that has failed on its way to a rendezvous.
FAILURE = "failure"
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


def store_all_gather(
    group: dist.ProcessGroup,
    place: str,
    value: Mapping[str, Any],
    error: type[RuntimeError],
    *,
    topic: str = "",
    hint: str = CALLED_ALIKE,
    limit: float | None = None,
) -> dict[int, dict[str, Any]]:
    """All-gather `value` through the store of `group`, without a collective; return the values by global rank.

    place
        The place in the program where ranks wait, in words; part of the error.
    value
        Plain values that JSON can hold.
    topic
        Calls of another topic or error class are counted apart, and never meet this one.
    hint
        Why a rank may be missing; part of the error.
    limit
        Seconds to wait; None: the time limit of the group or of its store, whichever is shorter.

    Every rank of the group calls this. Raises `error` while a graph is captured: a replay would gather nothing.
    Raises `error` with the ranks that did not come within the limit; sooner if a missing rank refused its settings
    (`refuse`), or has failed on its way here (`announce_failure`). Either every rank that came gets the values, or
    every one raises. A rank that comes later meets the others' next call.
    """
    me = dist.get_rank()
    refuse_while_capturing(place, error)
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return {me: dict(value)}
    topic = f"{error.__name__} {topic}"
    rendezvous = Rendezvous(group, topic)
    while _without_this_rank(rendezvous):
        rendezvous = Rendezvous(group, topic)
    rendezvous.publish("value", json.dumps(dict(value)))
    seconds = time_limit(group).total_seconds() if limit is None else limit
    failure = _wait_for_ranks(rendezvous, seconds, lambda missing, waited: absence(group, place, missing, waited, hint))
    # The first outcome is every rank's: a rank may come at the moment in which another gives up.
    outcome = rendezvous.decide(failure or COMPLETE)
    if outcome != COMPLETE:
        rendezvous.leave(lambda: sum(len(rendezvous.said(name, rendezvous.ranks)) for name in ("value", FAILURE)))
        raise error(outcome)
    texts = rendezvous.texts("value")
    rendezvous.forget_earlier()
    rendezvous.leave(lambda: len(texts))
    return {rank: json.loads(text) for rank, text in texts.items()}


def announce_failure(group: dist.ProcessGroup, reason: str, error: type[RuntimeError], *, topic: str = "") -> None:
    """Tell the ranks of `group` that this rank has failed, and does not come to the next `store_all_gather`.

    They raise `error` with `reason` there, within a second. For a rank that has to raise an error of its own, which the
    others may not have: it calls this once, before it raises, with the error class and the topic of that gather, which
    all ranks count alike. Waits for nobody, but on rank 0, which leaves when the others have read, or after 10 s.
    """
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return
    with suppress(RuntimeError):  # the store is gone, and with it the others
        rendezvous = Rendezvous(group, f"{error.__name__} {topic}")
        if not _without_this_rank(rendezvous):
            rendezvous.publish(FAILURE, reason)
            rendezvous.leave(lambda: len(rendezvous.ranks))


def absence(group: dist.ProcessGroup, place: str, missing: list[int], seconds: float, hint: str) -> str:
    """Return the ranks of `group` that have not come to a place in the program; hint: why they may be missing."""
    return f"rank {listed(missing)} of {describe(group)} has not come to {place} within {seconds:g} s: {hint}"


def refuse_while_capturing(place: str, error: type[RuntimeError]) -> None:
    """Raise `error` while a graph is captured; `place` is where ranks wait for each other or for their devices."""
    if is_capturing():
        raise error(
            f"rank {dist.get_rank()} has come to {place} while a graph is captured, where ranks cannot talk to each "
            "other: run the same steps without capture first, as a warm-up (with COC_PARALLEL_NUM=auto, COC_TUNE or "
            "COC_REGION=auto until the log says what they chose)"
        )


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
    group: dist.ProcessGroup | None, place: str, mine: Mapping[str, Any], problem: str, cure: str, **options: Any
) -> int:
    """Raise `DisagreementError` on every rank unless `mine` is the same on all ranks; return the first rank's seed.

    The error reads ``<problem>: <name> is <value> on rank 0, ...; ... . <cure>``. The seed is that of torch's default
    generator. `options` are those of `store_all_gather`.
    """
    if group is None:
        raise RuntimeError(f"{place} needs torch.distributed.init_process_group, on every rank")
    values = store_all_gather(group, place, {**mine, "seed": torch.initial_seed()}, DisagreementError, **options)
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
    if (everybody := _everybody()) is not None:
        Rendezvous(everybody, CONFIGURE)


def refuse(error: Exception) -> None:
    """Tell ranks that wait for this rank, or will wait, that `configure` failed here and changed nothing."""
    if (everybody := _everybody()) is not None:
        text = f"configure() failed on rank {dist.get_rank()}, which kept what was in force: {error!r}"
        Rendezvous(everybody, CONFIGURE, latest=True).publish("refusal", text)


def _wait_for_ranks(rendezvous: Rendezvous, limit: float, absent: Callable[[list[int], float], str]) -> str:
    """Wait until every rank has published its value, or a rank has decided the outcome.

    Returns "", or why this rank gives up. Logs the missing ranks every `PATIENCE` seconds, in the words of
    ``absent(missing, seconds)``.
    """
    told = 0.0

    def given_up(missing: list[int], waited: float) -> bool:
        nonlocal told
        if rendezvous.decided or _refusals(rendezvous, missing):
            return True
        if waited - told >= PATIENCE:
            log.warning("%s", absent(missing, PATIENCE))
            told = waited
        return False

    missing = rendezvous.absent("value", limit, given_up)
    if not missing or rendezvous.decided:
        return ""
    return _refusals(rendezvous, missing) or absent(missing, limit)


def _without_this_rank(rendezvous: Rendezvous) -> bool:
    """Tell whether the others have given up on this rank: they have decided, and not because a rank has failed."""
    return rendezvous.decided and not rendezvous.said(FAILURE, rendezvous.ranks)


def _everybody() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None: there is none, or its other ranks do not exist."""
    real = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    return dist.group.WORLD if real else None


def _refusals(rendezvous: Rendezvous, ranks: list[int]) -> str:
    """Return why `ranks` do not come: their failures on the way, and refusals in this rank's latest `configure`."""
    texts = list(rendezvous.said(FAILURE, ranks).values())
    if (everybody := _everybody()) is not None:
        texts += Rendezvous(everybody, CONFIGURE, latest=True).said("refusal", ranks).values()
    return "; ".join(texts)
