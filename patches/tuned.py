"""Connect the decider to patched layers: create it, check a plan."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ascend_parallel.settings import Settings
from ascend_parallel.tuning.measured.chunk_plan import Plan, UnreadPlan, differences, this_machine
from ascend_parallel.tuning.measured.decider import CHUNKS, Decider

log = logging.getLogger("ascend_parallel")


def decider_of(settings: Settings, *, measures: bool) -> Decider:
    """Return the decider of a framework's layers and exchanges; measures: whether these are measured as they come.

    Calls that are fastest in a single chunk run the framework's own layer, unless the settings request more than
    chunks.
    """
    option = "COC_TUNE" if settings.tune else "COC_PARALLEL_NUM=auto"
    if measures and (settings.tune or settings.auto) and not settings.tunes:
        why = "USE_COC_FUSED_KERNEL=1 runs without chunks" if settings.fused else f"COC_MODE={settings.mode}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("%s has no effect: %s", option, why)
    observed = settings.verify_every or settings.timeline is not None
    differs = settings.deterministic or not settings.recompute_all_gather or bool(settings.customized_coc)
    original = not (observed or differs)
    steps = settings.auto and not (settings.tune or settings.region or settings.strict) and original
    return Decider(settings, measures=measures, original_if_whole=original, steps=steps)


def all_kept_whole(settings: Settings) -> str | None:
    """Return a sentence if every pass that was tuned is fastest whole, so that nothing was cut."""
    if not CHUNKS or max(CHUNKS.values()) > 1 or not (settings.tune or settings.auto):
        return None
    option = "COC_TUNE" if settings.tune else "COC_PARALLEL_NUM=auto"
    passes = f"the {len(CHUNKS)} matmuls with a collective" if len(CHUNKS) > 1 else "the matmul with a collective"
    return f"{option} measured {passes}: whole is faster here, so none was cut; nothing is lost"


def refusal_of_plan(plan: Plan | UnreadPlan, group: dist.ProcessGroup, device: torch.device) -> str:
    """Return why this rank cannot use `plan`: not read, or measured on another kind of machine or group; "" if it can.

    Ranks exchange the reasons before one of them raises.
    """
    if isinstance(plan, UnreadPlan):
        return plan.reason
    here = this_machine(group.size(), device, group._get_backend(device).name())
    if different := differences(plan, here):
        cure = "Measure one here with COC_TUNE, or unset COC_PLAN"
        return f"the plan was measured elsewhere: {'; '.join(different)}. {cure}"
    return ""
