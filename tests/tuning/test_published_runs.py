"""Published trainings beside predictions: the rows, their conversion to seconds, and the page."""

import re
from dataclasses import replace
from pathlib import Path

import published_trainings
import pytest
import typer
from published.degrees import compare_launch, launch_page
from published.prediction import measured_seconds, obstacle, predict_run
from published.report import compare_runs, goals_in_words
from published.runs import all_runs
from typer.testing import CliRunner

from ascend_parallel.tuning.cost_model.memory import layer_activations
from ascend_parallel.tuning.cost_model.models import Batch, find_model

PAGE = Path(__file__).parents[2] / "docs" / "predicted-and-published.md"


@pytest.fixture(scope="module")
def comparison():
    return compare_runs()


def run_of(name):
    return next(run for run in all_runs() if run.id == name)


@pytest.mark.slow
def test_each_row_names_its_source_and_is_predicted_or_says_why_not(comparison):
    assert len({run.id for run in all_runs()}) == len(all_runs()) == 140
    for run, row in zip(all_runs(), comparison["rows"], strict=True):
        assert run.source and run.path
        assert (row["error"] is None) == bool(row["obstacle"])
        if not row["obstacle"]:
            assert run.tp * run.pp * run.dp * run.cp == run.devices
            assert run.micro_batches * run.micro_batch * run.dp == run.global_batch
            assert row["predicted"] > 0 and row["published"] > 0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # 256 sequences of 4096 tokens, 4672 tokens a second on each of 8 cards
        ("msllm-1.0.rc3-llama2-7b-4k", 256 * 4096 / (4672 * 8)),
        ("megatron-2205.05198-table5-22b-full", 1.42),
        # arXiv 2104.04473, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16 l h) operations at 163 TFLOP/s on 3072 cards
        (
            "megatron-2104.04473-table1-1008b-full",
            96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600)) / 163e12 / 3072,
        ),
    ],
)
def test_a_published_number_in_seconds(name, seconds):
    assert measured_seconds(run_of(name)) == pytest.approx(seconds, rel=1e-9)


def test_what_cannot_be_predicted_says_why():
    assert obstacle(run_of("msllm-26.1.0-deepseek-v3-671b")) == "MoE"
    assert obstacle(run_of("pto-gemm-3072")) == "no training step"
    assert "micro_batch" in obstacle(run_of("msllm-26.1.0-qwen3-8b")) or "hardware" in obstacle(
        run_of("msllm-26.1.0-qwen3-8b")
    )


def test_the_page_has_the_tables_of_the_command(comparison):
    document = PAGE.read_text(encoding="utf-8")
    made = published_trainings.inserted(document, published_trainings.PREDICT, published_trainings.page(comparison))
    assert made == document, "run python benchmarks/published_trainings.py --write docs/predicted-and-published.md"


@pytest.mark.slow
def test_the_page_has_the_tables_of_plan_training_and_the_errors_of_both(comparison):
    document, planned = PAGE.read_text(encoding="utf-8"), published_trainings.compare_planned()
    made = published_trainings.inserted(document, published_trainings.PLANNED, published_trainings.page(planned))
    made = published_trainings.between(made, published_trainings.GOALS, goals_in_words(comparison, planned))
    assert made == document, "run python benchmarks/published_trainings.py --write docs/predicted-and-published.md"


def test_rows_that_are_kept_elsewhere_are_predicted_alone(tmp_path):
    """The medians of held-out rows come from today's code: whoever has the rows runs the script."""
    text = (PAGE.parents[1] / "benchmarks" / "published" / "data" / "runs.toml").read_text(encoding="utf-8")
    chosen = [part for part in text.split("[[row]]") if 'id = "msllm-1.0.rc3-llama2-7b-4k"' in part]
    file = tmp_path / "kept_aside.toml"
    file.write_text("[[row]]" + "".join(chosen), encoding="utf-8")
    app = typer.Typer()
    app.command()(published_trainings.main)
    told = CliRunner().invoke(app, ["--rows", str(file), "--medians"])
    assert re.fullmatch(
        r"`predict` \S+ % and 100 % of 1 rows, `plan-training` \S+ % and \d+ % of 1 rows\n", told.stdout
    )
    told = CliRunner().invoke(app, ["--rows", str(file), "--write", "page.md"])
    assert told.exit_code == 2 and "--rows" in told.output


@pytest.mark.slow
def test_the_page_has_a_launch_script_beside_the_search():
    """One of the ten rows; all are of the same function."""
    run = run_of("msllm-1.0.rc3-llama2-7b-4k")
    launched = compare_launch(run)
    assert launched.fits and launched.best.seconds <= launched.theirs.seconds < 1.05 * launched.best.seconds
    assert launch_page([launched]).splitlines()[-1] in PAGE.read_text(encoding="utf-8")


def test_no_published_run_of_mindspeed_is_predicted_not_to_fit(comparison):
    """The others that are predicted not to fit are explained in the page."""
    rows = [row for row in comparison["rows"] if row["table"].startswith("Ascend/MindSpeed-LLM") and row["memory"]]
    assert len(rows) > 40 and all(row["fits"] for row in rows)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_are_those_of_the_published_formula(tp):
    """arXiv:2205.05198, equation 4: s b h / t (34 + 5 a s / h) with sequence parallelism; here without dropout.

    Of the 34, two are masks of dropout; of the 5, fused attention keeps none.
    """
    model = find_model("gpt3-175b")
    batch = Batch(sequence=2048, micro_batch=2, tp=tp, device="cuda")
    statistics = model.heads / tp * 2048 * 2 * 4
    expected = 2048 * 2 * model.hidden / tp * 32
    assert layer_activations(model, batch, "none") == pytest.approx(expected + statistics, rel=1e-12)
    written = replace(batch, fused_attention=False)
    scores = 2 * model.heads * 2048**2 * 2 / tp
    assert layer_activations(model, written, "none") == pytest.approx(expected + scores, rel=1e-12)
    assert layer_activations(model, written, "selective") == pytest.approx(expected, rel=1e-12)
    assert layer_activations(model, batch, "full") == pytest.approx(2048 * 2 * model.hidden * 2 / tp)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "new-model", "vocab": 0}, "not published: vocabulary"),
        ({"id": "torchtitan-70b-256-async-TP", "dtype": "bfloat16, async TP"}, "async TP"),
    ],
)
def test_a_row_without_a_vocabulary_or_with_async_tp_is_not_predicted(changes, words):
    run = replace(run_of("msllm-1.0.rc3-aquila-7b-2k"), **changes)
    assert not obstacle(run_of("msllm-1.0.rc3-aquila-7b-2k"))
    assert obstacle(run) == words


def test_mc2_has_no_gain():
    with_mc2 = next(run for run in all_runs() if run.mc2_in_script and not obstacle(run) and run.tp > 1)
    assert predict_run(with_mc2) == predict_run(replace(with_mc2, mc2_in_script=False))
