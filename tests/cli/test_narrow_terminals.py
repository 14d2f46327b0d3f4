"""Tables on 80 columns: no number and no name is split over lines."""

import io
import json
import random
import re

import pytest
from rich.console import Console
from timelines import made
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write
from ascend_parallel.text.tables import stacked, terminal_table
from ascend_parallel.training.degrees import report
from ascend_parallel.training.degrees.evaluation import StepBreakdown
from ascend_parallel.training.degrees.search import Candidate, SearchResult
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.tuning.cost_model.report import show
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes

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


def test_timeline_at_80_columns(tmp_path):
    layer = "decoder.layers.31.self_attention.linear_proj"
    for rank in range(2):
        header, passes = made(rank, chunks=4, slower=12)
        write(tmp_path, header, [{**each, "layer": layer} for each in passes])
    command = ["timeline", str(tmp_path), "--no-png"]
    wide = CliRunner(env={"COLUMNS": "200"}).invoke(app, command).stdout
    narrow = CliRunner(env={"FORCE_COLOR": "1", "TERM": "dumb"}).invoke(app, command).stdout  # a terminal of 80
    (row,) = (line for line in wide.splitlines() if layer in line)
    table, *_ = re.split(r"^T: ", narrow, flags=re.MULTILINE)
    cells = re.split(r" {2,}", row.strip())
    assert len(row) > 80 and len(cells) > 8
    assert split(table, cells) == []


def test_the_rows_of_plan_training_are_stacked():
    degrees = {"dp": 8, "pp": 4, "rows": 1, "micro_batches": 32, "schedule": "interleaved_1f1b", "virtual_stages": 2}
    memory, spent = RankBytes(9e9, 9e9, 36.2e9), {"compute": 12.34, "recompute": 0.0, "optimizer": 0.0, "replicas": 0.0}
    best = Candidate(Degrees(tp=1, **degrees), StepBreakdown(**spent, tensor=0.0, bubble=0.0), memory)
    second = Candidate(Degrees(tp=4, **degrees), StepBreakdown(**spent, tensor=0.3, bubble=0.5), memory, True)
    numbers = {"rows": 256, "limit": 64e9, "macs": 1e9, "tokens": 8, "itemsize": 2, "considered": 2, "timed": 2}
    found = SearchResult(ranks=32, hardware="910b", amp=None, layers=(), best=(best, second), too_large=None, **numbers)
    (wide, narrow) = (report.text(found, width).split("\n\n")[1].splitlines() for width in (None, 80))
    assert len(wide) == 3 < len(narrow)
    cells = ["4 (ZeRO-3-like)", "32 of 1", "13.14", "54.2 GB", "interleaved_1f1b x2", "+6.5 %"]
    assert all(cell in "\n".join(wide) for cell in cells)
    assert split("\n".join(narrow), cells) == []
