"""The file in which a run finds and keeps what was measured: of COC_TUNE, or the machine's cache for `auto`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import (
    Machine,
    Plan,
    PlanError,
    cached_plan,
    differences,
    load_plan,
    read_plan,
    this_machine,
)

log = logging.getLogger("ascend_parallel")


class PlanFile:
    """A plan file that a run reads, and with COC_TUNE writes."""

    def __init__(self, settings: Settings) -> None:
        """Take the file that ``settings.tune`` names, or the cache."""
        self._tunes, self._file = settings.tune is not None, settings.tune
        self._unkept: set[int] = set()  # sizes of groups of which the file keeps nothing: it is of another size
        self.option = "COC_TUNE" if self._tunes else "COC_PARALLEL_NUM=auto"
        """What asked for it, by the user's name."""

    def starting_plan(self, group: dist.ProcessGroup, device: str) -> Plan:
        """Return the plan file as the group's first rank reads it, or an empty plan; the same plan on every rank."""
        backend: str = group._get_backend(torch.device(device)).name()
        here = this_machine(group.size(), torch.device(device), backend)
        read = self._read(here) if group.rank() == 0 else ""
        mine = {"error": read} if isinstance(read, str) else {"plan": read.as_dict()}
        values = store_all_gather(group, "the plan's reading", mine, DisagreementError)
        first = values[dist.get_process_group_ranks(group)[0]]
        if "error" in first:
            raise PlanError(first["error"])
        return read_plan(first["plan"])

    def _read(self, here: Machine) -> Plan | str:
        """Return the file's plan, an empty plan if there is no file, or the reason (a text) why the file is refused."""
        variable = "COC_TUNE" if self._tunes else f"the cache of {self.option}"
        try:
            path = self.path(here)
            path.stat()
            plan = load_plan(str(path), variable)
        except FileNotFoundError:
            return Plan(here)
        except (PlanError, OSError, RuntimeError) as error:  # broadcast to the other ranks, which wait for this one
            return f"{variable}: {error}"
        if self._tunes and not differences(plan, replace(here, ranks=plan.machine.ranks)):
            return plan if plan.machine == here else self._not_kept(plan, here)
        if different := differences(plan, here):
            return (
                f"{variable}={str(path)!r} was measured elsewhere: {'; '.join(different)}. "
                "Name another file, or remove this file"
            )
        return plan

    def path(self, machine: Machine) -> Path:
        """Return where the file of a kind of machine is."""
        return cached_plan(machine) if self._file is None else Path(self._file)

    def _not_kept(self, plan: Plan, here: Machine) -> Plan:
        """Return an empty plan for groups of another size than those of the file, which stays as it is."""
        if here.ranks not in self._unkept:
            text = "COC_TUNE: %s is of groups of %d ranks; what is measured on %d is not kept"
            log.warning(text, self._file, plan.machine.ranks, here.ranks)
        self._unkept.add(here.ranks)
        return Plan(here)

    def save(self, plan: Plan) -> None:
        """Add a plan to the file; if it cannot be written, the run continues without."""
        path = self.path(plan.machine)
        try:
            saved = self._read(plan.machine)  # another pipeline stage may have added entries
            if plan.machine.ranks in self._unkept:
                return
            (plan if isinstance(saved, str) else saved.with_entries(plan.entries)).save(path)
        except OSError as error:  # the run continues without the file
            log.warning("the plan could not be written to %s: %s", path, error.strerror)
