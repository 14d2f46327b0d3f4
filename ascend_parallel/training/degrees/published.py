"""The evaluation behind plan-training, at the degrees of published runs."""

from __future__ import annotations

from functools import cache

from ascend_parallel.settings import current_settings
from ascend_parallel.training.degrees.evaluation import Evaluation
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.presets import traced_preset
from ascend_parallel.training.degrees.rescaling import GraphFamily
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.training.degrees.work import COLLECTIVES, NONE
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.published.prediction import RunPrediction, obstacle
from ascend_parallel.tuning.published.runs import PublishedRun

DTYPE = "bfloat16"
# Recompute of the rows that plan-training has too.
RECOMPUTE = {NONE: NONE, "full": COLLECTIVES}
MOST_ZERO_STAGE_IN_PIPELINE = 1


def planning_obstacle(run: PublishedRun) -> str:
    """Return why plan-training cannot evaluate a run; "": it can."""
    if obstacle(run):
        return obstacle(run)
    if run.flash_attention is False:
        return "attention that writes its scores"
    if run.ep > 1 and run.dp % run.ep:
        return f"experts over {run.ep} ranks of {run.dp} replicas"
    if run.recompute not in RECOMPUTE:
        return f"recompute {run.recompute}"
    return ""


def evaluate_run(run: PublishedRun) -> RunPrediction:
    """Return the seconds and the bytes that plan-training predicts at the run's degrees."""
    hardware = find_hardware(run.chip or "")
    traced = traced_preset(run.transformer(), run.sequence, run.global_batch, DTYPE)
    planner = Planner(cache(GraphFamily(traced.trace).at), hardware, current_settings(), ranks=run.devices)
    evaluation = Evaluation(hardware, planner, masters=traced.masters)
    degrees = degrees_of(run)
    return RunPrediction(evaluation.parts(degrees).total, evaluation.memory(degrees).total)


def degrees_of(run: PublishedRun) -> Degrees:
    """Return the degrees of a run."""
    ep = run.ep or 1
    zero = min(run.zero, MOST_ZERO_STAGE_IN_PIPELINE) if run.pp > 1 else run.zero
    return Degrees(
        dp=run.dp // ep,
        ep=ep,
        cp=run.cp or 1,
        tp=run.tp,
        pp=run.pp,
        rows=run.micro_batch * ep,
        micro_batches=run.micro_batches,
        schedule="interleaved_1f1b" if run.stages_of_rank > 1 else "1f1b",
        virtual_stages=run.stages_of_rank,
        recompute=RECOMPUTE[run.recompute],
        zero_stage=zero if run.dp > ep else 0,
    )
