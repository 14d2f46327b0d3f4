"""The pages that commands write, in a real browser of 1280 pixels: nothing is clipped. Skips without chromium."""

from pathlib import Path

import pytest
from browser import chromium, look
from timelines import made
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT}/examples/sharding/llama.py:small"

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium: install one, or name it in CHROMIUM")


@pytest.mark.parametrize("mesh", ["mp=2", "dp=2,mp=4"])
def test_the_page_of_a_plan_fits_the_window(tmp_path, mesh):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    done = CliRunner().invoke(app, ["propagate", MODEL, "--mesh", mesh, "--html", str(page), "--brief"])
    assert done.exit_code == 0, done.output
    assert look(page, picture) == {"width": 1280, "found": []}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_look_finds_what_sticks_out(tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<!DOCTYPE html><body><div style='width:2000px'>wide</div></body>")
    found = look(page, tmp_path / "wide.png")["found"]
    assert "outside: DIV" in found
    assert found[0].startswith("page: ")


def test_the_report_of_a_timeline_fits_the_window(tmp_path):
    for rank in range(2):
        write(tmp_path, *made(rank, steps=3))
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--no-png"])
    assert done.exit_code == 0, done.output
    assert look(tmp_path / "report.html", tmp_path / "report.png") == {"width": 1280, "found": []}
