"""Say in words what overlaps, in how many chunks and why; and in which dtype a layer multiplies."""

from __future__ import annotations

from dataclasses import replace

import torch

from ascend_parallel.ops import registry
from ascend_parallel.ops.call import Call, Exchange
from ascend_parallel.ops.decision import Decision, Known
from ascend_parallel.ops.registry import Explanation, usual_chunks
from ascend_parallel.settings import Settings, current_settings

NO_LAYER = "but no layer runs with overlap"
"""Of a framework whose own code runs in every layer; the reason follows."""


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a layer multiplies x: autocast's dtype if autocast applies to x, else x's dtype."""
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def cast_by_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x cast as autocast casts matmul operands; cast before the collective, which then moves fewer bytes."""
    dtype = operand_dtype(x)
    return x if dtype == x.dtype else x.to(dtype)


def explain(call: Call, settings: Settings | None = None, known: Known | None = None) -> Explanation:
    """Return the kernel and chunks that would run `call`, with the reason against each other kernel; print it.

    `settings` None: the settings in force. Whether a group can share memory is known only for a real group, so set
    ``shm`` in a `Matmul` described by hand (``shm=None``: it can). `known`: what decides beside the settings; None:
    their plan alone.
    """
    given = current_settings() if settings is None else settings
    explanation = registry.explain(call, given, known)
    return replace(explanation, region=explain_region(explanation.decision, given))


def explain_region(decision: Decision, settings: Settings) -> str:
    """Return the fate of a layer's rows in a region, in words; "" without `settings.region`."""
    if not settings.region or isinstance(decision.call, Exchange):
        return ""
    rows, count = decision.call.rows, len(decision.sizes)
    if decision.kernel != "chunked":
        what = "rows are finished in the layer: its kernel has no chunks that can be waited for one by one"
    elif count < 2 or rows < count * settings.region_rows:
        what = f"rows are finished in the layer: {rows} rows in {count} chunks, at least {settings.region_rows} in each"
        what += " (region_rows)"
    else:
        what = f"rows are waited for where they are read, in {count} chunks"
    return f"COC_REGION={'auto' if settings.region == 'auto' else 1}: {what}"


def overlap_in_words(settings: Settings) -> str:
    """Return "on: ..." with the chunks or operators of covered layers, or "off: ..." with the reason."""
    if not settings.enabled:
        return "off: COC_MODE=0" if settings.mode == 0 else "off: export COC_PARALLEL_NUM=auto to switch it on"
    if settings.mode == 1:
        return "off: COC_MODE=1 runs the layers without chunks"
    how = _how(settings)
    if how and settings.region is True:
        how += ", in regions where they can run (COC_REGION=1)"
    elif how and settings.region == "auto":
        how += ", in regions if the first passes are faster so (COC_REGION=auto)"
    return f"on: {how}" if how else "off: COC_PARALLEL_NUM=1 leaves every matmul whole"


def chunks_in_words(settings: Settings) -> str:
    """Return the chunks of a planned graph's operators in words; a single chunk is "off"."""
    if not settings.cuts:
        return f"1 chunk: off (COC_MODE={settings.mode})"
    return _how(settings) or "1 chunk: off (COC_PARALLEL_NUM=4, or settings=Settings(num_chunks=4), cuts them)"


def _how(settings: Settings) -> str:
    """Return the chunks or operators of overlapped layers in words; empty if each matmul stays whole."""
    chunks = usual_chunks(settings)
    if settings.fused:
        return f"fused operators where they can run, else {chunks} chunks (USE_COC_FUSED_KERNEL=1)"
    if settings.tune:
        return f"the chunks that are fastest in the run (COC_TUNE={settings.tune})"
    if settings.auto:
        return "the chunks that a model and measurements find best (COC_PARALLEL_NUM=auto)"
    if settings.plan is not None:
        return f"the chunks of a plan (COC_PLAN), {_counted(chunks)} where it has none"
    if chunks > 1:
        return f"{chunks} chunks (COC_PARALLEL_NUM={chunks})"
    own = sum(cut != 1 for cut in settings.customized_coc.values())
    return f"{_counted(own, 'shape')} of customized_coc, and nothing else" if own else ""


def _counted(number: int, what: str = "chunk") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
