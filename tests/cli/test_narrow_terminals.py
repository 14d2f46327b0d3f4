"""Tables on 80 columns: no number and no name is split over lines."""

import io
import json
import random
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.cli.timeline import _table
from ascend_parallel.text.tables import stacked, terminal_table
from ascend_parallel.training.degrees import report
from ascend_parallel.tuning.cost_model.report import show

WORDS = ("model.layers.31.mlp.gate_up_proj", "0.325169", "147.25", "4, 4", "-", "chunked", "+12.3 %", "")


def printed(shown, width=80):
    out = Console(width=width, file=io.StringIO(), color_system=None)
    shown(out)
    return out.file.getvalue()


def split(text, cells, width=80):
    """The cells that no line has in one piece, and the lines that are too long."""
    lines = text.splitlines()
    return [cell for cell in cells if not any(cell in line for line in lines)] + [x for x in lines if len(x) > width]


@pytest.mark.parametrize("columns", [2, 7, 12, 20])
@pytest.mark.parametrize("width", [60, 80, 147])
def test_no_cell_is_split(columns, width):
    drawn = random.Random(columns * width)
    heads = [f"head{place}" for place in range(columns)]
    rows = [[drawn.choice(WORDS) for _ in heads] for _ in range(5)]
    table = terminal_table("a title", heads, rows, right=range(1, columns))
    text = printed(lambda out: out.print(table), width)
    assert split(text, {cell for row in rows for cell in row}, width) == []
    assert "a title" in text


def test_only_sentences_are_folded_between_words():
    sentence = "the all-reduce of the row layer takes longer than the matmul beside it, in every chunk of this call"
    rows = [("model.layers.31.mlp.gate_up_proj", "1.5", sentence), ("lm_head", "147.25", "as fast")]
    text = printed(lambda out: out.print(terminal_table("", ("layer", "ms", "why"), rows, right=[1])))
    assert split(text, ["model.layers.31.mlp.gate_up_proj", "147.25", *sentence.replace(",", "").split()]) == []
    assert "layer" in text.splitlines()[1] and "why" in text.splitlines()[1]  # still a table


def test_a_stacked_row_names_its_cells():
    assert list(stacked(("", "dp", "step s"), [("1", "8", "1.25")], 80)) == ["1  dp 8  step s 1.25"]
    assert list(stacked(("", "dp", "why"), [("1", "8", "as fast as the first")], 16)) == [
        "1  dp 8",
        "  why as fast as",
        "    the first",
    ]


def test_predict_at_80_columns():
    arguments = ["predict", "--model", "llama2-7b", "--hardware", "910b", "--tp", "8", "--json"]
    result = json.loads(CliRunner().invoke(app, arguments).stdout)
    wide, narrow = (printed(lambda out: show(result, out), width) for width in (200, 80))
    numbers = {word for word in wide.split() if word.replace(".", "").isdigit() and "." in word}
    assert numbers and split(narrow, numbers) == []


def test_timeline_at_80_columns():
    fields = {
        "layer": "decoder.layers.31.self_attention.linear_proj",
        "direction": "backward",
        "kernel": "chunked in 4",
    }
    figures = [
        ("total", lambda row: 147.256, ".3f", ""),
        *((f"figure {n}", lambda row: 1.5, ".3f", "") for n in range(7)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascend_parallel.diagnostics.timeline.merge.columns", lambda rows: figures)
        table = _table("a run", [SimpleNamespace(**fields, comm=1.0)])
    assert split(printed(lambda out: out.print(table)), [*fields.values(), "147.256"]) == []


def test_the_rows_of_plan_training_are_stacked():
    rows = [
        report.HEADS,
        ("1", "8", "1", "1", "8 (chunks)", "4", "32 of 1", "interleaved_1f1b, 4 stages", "layers: 0-7"),
    ]
    rows[1] += ("1", "12.34", "54.2 GB", "3.1 %", "+3.1 %: bubbles +2.0 %, collectives of tp +1.1 %")
    assert len(list(report._table(rows, None))) == 2
    lines = list(report._table(rows, 80))
    assert split("\n".join(lines), ["8 (chunks)", "32 of 1", "12.34", "54.2 GB", "interleaved_1f1b, 4 stages"]) == []
