"""The evaluation behind plan-training at the degrees of published runs, and the search beside their launch scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from ascend_parallel.settings import current_settings
from ascend_parallel.text.tables import markdown_table
from ascend_parallel.training.degrees.evaluation import Evaluation
from ascend_parallel.training.degrees.folding import FoldedGraph
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.presets import traced_preset
from ascend_parallel.training.degrees.report import why
from ascend_parallel.training.degrees.rescaling import GraphFamily
from ascend_parallel.training.degrees.search import Candidate, ModelByBatchSize, candidate_of, search_traced
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.training.degrees.work import COLLECTIVES, NONE
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from published.prediction import RunPrediction, obstacle, predict_run
from published.runs import PublishedRun, all_runs

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
    degrees, evaluation = degrees_of(run), evaluation_of(run)
    return RunPrediction(evaluation.breakdown(degrees).total, evaluation.memory(degrees).total)


def evaluation_of(run: PublishedRun) -> Evaluation:
    """Return the evaluation for a run's model, batch and cards."""
    hardware = find_hardware(run.chip or "")
    traced, graphs = traced_run(run)
    planner = Planner(graphs, hardware, current_settings(), ranks=run.devices)
    return Evaluation(hardware, planner, masters=traced.masters)


@cache
def traced_run(run: PublishedRun) -> tuple[ModelByBatchSize, Callable[[int], FoldedGraph]]:
    """Return a run's model, and its graphs by rows of a micro-batch: the same for all settings."""
    traced = traced_preset(run.transformer(), run.sequence, run.global_batch, DTYPE)
    return traced, cache(GraphFamily(traced.trace).at)


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


# Of ten models the rows whose launch scripts are compared with a search: all are of MindSpeed-LLM 1.0.RC3.
LAUNCHED = (
    "aquila-7b-2k",
    "baichuan2-7b-4k",
    "llama-13b-2k",
    "llama2-7b-4k",
    "llama2-70b-4k",
    "llama3-70b-8k",
    "qwen1.5-32b-8k",
    "qwen2-7b-4k",
    "qwen2-72b-4k",
    "yi-34b-4k",
)
LAUNCH_HEADS = ("run", "the script's degrees", "s", "GB", "fits, by `predict`", "best found", "s", "GB", "the script's")


@dataclass(frozen=True)
class LaunchedRun:
    """A script's degrees, and the best that a search finds in as much memory.

    fits
        Whether the script fits by `predict`, which counts the memory of Megatron-core and MindSpeed.
    """

    run: PublishedRun
    theirs: Candidate
    best: Candidate
    fits: bool


def launched_runs() -> list[LaunchedRun]:
    """Return the comparison of ten launch scripts with the search, on the same cards and batch."""
    runs = {run.id: run for run in all_runs()}
    return [compare_launch(runs[f"msllm-1.0.rc3-{name}"]) for name in LAUNCHED]


def compare_launch(run: PublishedRun) -> LaunchedRun:
    """Compare a script's degrees with the best in a card's memory, or in as much as the script is predicted to need."""
    hardware, evaluation, degrees = (
        find_hardware(run.chip or ""),
        evaluation_of(run),
        degrees_of(run),
    )
    theirs = candidate_of(evaluation, degrees, evaluation.memory(degrees))
    traced, _ = traced_run(run)
    limit = max(hardware.memory.capacity, theirs.memory.total)
    found = search_traced(traced, ranks=run.devices, memory=limit, hardware=hardware.name)
    return LaunchedRun(run, theirs, found.best[0], predict_run(run).memory <= hardware.memory.capacity)


def launch_page(rows: Iterable[LaunchedRun]) -> str:
    """Return the comparison as a table in Markdown."""
    cells = [
        (
            row.run.id,
            str(row.theirs),
            *_size(row.theirs),
            "yes" if row.fits else "no",
            str(row.best),
            *_size(row.best),
            why(row.theirs, row.best),
        )
        for row in rows
    ]
    return "\n".join([*markdown_table(LAUNCH_HEADS, cells), ""])


def _size(candidate: Candidate) -> tuple[str, str]:
    return f"{candidate.seconds:.4g}", f"{candidate.memory.total / 1e9:.1f}"
