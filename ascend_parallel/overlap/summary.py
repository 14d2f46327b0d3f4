"""Describe in words whether and how settings overlap matmuls and collectives."""

from __future__ import annotations

from ascend_parallel.ops.registry import usual_chunks
from ascend_parallel.settings import Settings


def overlap_in_words(settings: Settings) -> str:
    """Return "on: ..." with the chunks or operators of covered layers, or "off: ..." with the reason."""
    if not settings.enabled:
        return "off: COC_MODE=0" if settings.mode == 0 else "off: export COC_PARALLEL_NUM=auto to switch it on"
    if settings.effective_mode == 1:
        return "off: COC_MODE=1 runs the layers without chunks"
    how = _how(settings)
    return f"on: {how}" if how else "off: COC_PARALLEL_NUM=1 leaves every matmul whole"


def chunks_in_words(settings: Settings) -> str:
    """Return the chunks of a planned graph's operators in words; a single chunk is "off".

    These operators ignore "auto" and COC_TUNE, which choose only for Megatron's layers.
    """
    chunks = usual_chunks(settings)
    if settings.effective_mode == 1:
        return "1 chunk: off (COC_MODE=1)"
    if (settings.auto or settings.tune) and chunks == 1 and not settings.fused and settings.plan is None:
        return "1 chunk: off (auto and COC_TUNE choose for Megatron's layers alone; give a number of chunks)"
    if settings.auto or settings.tune:
        return _counted(chunks)
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
