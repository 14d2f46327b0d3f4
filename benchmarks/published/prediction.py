"""Predict published runs, and compare by source: the error is that of the speed, predicted / published - 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import MEGATRON
from ascend_parallel.tuning.cost_model.layers import RECOMPUTE
from ascend_parallel.tuning.cost_model.memory import step_memory
from ascend_parallel.tuning.cost_model.models import Batch, Model
from ascend_parallel.tuning.cost_model.step import Layout, step_time
from ascend_parallel.tuning.step_time.runtimes import MEGATRON as MEGATRON_CORE
from published.runs import FLOPS, SECONDS, STEP_METRICS, TOKENS, PublishedRun

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "": torch.bfloat16}
# Features that the published rows mark as not expressible, and that the model covers.
EXPRESSED = ("context parallelism",)
# A mixture, which the model has if the row gives its experts.
MIXTURE = "MoE"
# Words of a row that say that torch's asynchronous tensor parallelism ran: pieces over symmetric memory, copied by the
# cards' copy engines, for which no public figure gives a price.
ASYNC_TP = "async tp"
# FSDP2 keeps the sums of gradients in the weights' dtype, with a reduce-scatter in each backward.
FSDP = replace(MEGATRON_CORE, name="fsdp", wide_gradients=False)
# Multiply-adds of forward and backward beside those of forward.
PASSES = 3


def obstacle(run: PublishedRun) -> str:
    """Return why a run cannot be predicted; "": it can."""
    expressed = run.not_expressible in EXPRESSED or (run.not_expressible == MIXTURE and run.experts > 0)
    if run.not_expressible and not expressed:
        return run.not_expressible
    if ASYNC_TP in f"{run.id} {run.model} {run.dtype}".lower().replace("-", " "):
        return "async TP"
    if run.kind != "training" or run.metric not in STEP_METRICS:
        return "no training step"
    if run.chip is None:
        return f"hardware: {run.hardware or 'not published'}"
    needed = ("sequence", "micro_batch", "global_batch", "tp", "pp", "dp", "vocabulary")
    missing = [name for name in needed if not getattr(run, name)]
    return f"not published: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class RunPrediction:
    """The predicted seconds of a step, and bytes of the fullest card."""

    seconds: float
    memory: float


def predict_run(run: PublishedRun) -> RunPrediction:
    """Return the prediction of a run that has no `obstacle`."""
    hardware = find_hardware(run.chip or "")
    batch = Batch(
        sequence=run.sequence,
        micro_batch=run.micro_batch,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel is not False,
        dtype=DTYPES[run.dtype],
        device=hardware.device,
        cp=run.cp or 1,
        cp_exchange=run.cp_exchange,
        ep=run.ep or 1,
        etp=run.etp or 1,
        fused_attention=run.flash_attention is not False,
        activation=run.activation or "fused",
        rotary=run.rotary or "fused",
    )
    layout = Layout(
        dp=run.dp,
        pp=run.pp,
        micro_batches=run.micro_batches,
        recompute=run.recompute if run.recompute in RECOMPUTE else "none",  # "some layers": how many is not published
        virtual_stages=run.stages_of_rank,
        zero=run.zero,
        overlap_gradients=overlaps_gradients(run),
        runtime=FSDP if run.zero >= 2 else MEGATRON_CORE,
    )
    # Tensor-parallel layers as Megatron-core runs them, also where the script has MC2: its tiling is not public, and of
    # rows that were kept aside those with MC2 are missed by 4.5 % without its gain, by 15.2 % with that of chunks.
    step = step_time(_costs(hardware.name), run.transformer(), batch, layout, MEGATRON)
    return RunPrediction(step.total, step_memory(run.transformer(), batch, layout).total)


def overlaps_gradients(run: PublishedRun) -> bool:
    """Return whether sums of gradients run under backward: by the script, and always in FSDP."""
    return bool(run.overlap_grad_reduce) or run.zero >= 2


def measured_seconds(run: PublishedRun) -> float:
    """Return the seconds of a step that the published number means."""
    if run.metric == SECONDS:
        return run.value
    model = run.transformer()
    if run.metric == TOKENS:
        return run.tokens / run.devices / run.value
    operations = _operations(run, model) / run.devices
    if run.metric == FLOPS:
        return operations / (run.value * 1e12)
    unit = find_hardware(run.chip or "").matmul
    return operations / (run.value * 2 * unit.macs_per_cycle * unit.frequency * unit.cores)


def _operations(run: PublishedRun, model: Model) -> float:
    """Return the floating-point operations of a step, as the row's formula counts them."""
    if run.flops:  # Megatron-LM's, with recompute
        layers, hidden = model.layers, model.hidden
        share = 1 + run.sequence / (6 * hidden) + model.vocab / (16 * layers * hidden)
        return 96 * run.tokens * layers * hidden**2 * share
    return 2 * PASSES * model.macs_per_token(run.sequence) * run.tokens


@lru_cache(maxsize=8)
def _costs(hardware: str) -> CostModel:
    return CostModel(find_hardware(hardware))
