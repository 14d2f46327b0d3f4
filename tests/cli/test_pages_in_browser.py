"""The pages that commands write, in a real browser of 1280 pixels: nothing is clipped. Skips without chromium."""

from pathlib import Path

import pytest
import typer
from browser import chromium, look
from profiles import of_gpu
from profiles import write as write_profile
from timelines import made
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT}/examples/sharding/llama.py:small"

pytestmark = [
    pytest.mark.slow,  # `make pages` runs them too
    pytest.mark.skipif(chromium() is None, reason="no chromium: install one, or name it in CHROMIUM"),
]


ROOMY = """
import torch
from torch import nn

WIDTH = 64

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_rather_long_name_of_a_norm_before_the_network = nn.LayerNorm(WIDTH)
        self.a_rather_long_name_of_a_projection_to_more_channels = nn.Linear(WIDTH, 4 * WIDTH)
        self.a_rather_long_name_of_a_projection_to_fewer_channels = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        wide = self.a_rather_long_name_of_a_projection_to_more_channels(
            self.a_rather_long_name_of_a_norm_before_the_network(x)
        )
        return x + self.a_rather_long_name_of_a_projection_to_fewer_channels(torch.relu(wide))

class Encoder(nn.Module):
    def __init__(self, layers=126):
        super().__init__()
        self.the_encoder_of_the_language_model = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.the_encoder_of_the_language_model:
            x = block(x)
        return x

def encoder():
    return Encoder(), (torch.zeros(64, 32, WIDTH),)

def few():
    return Encoder(4), (torch.zeros(64, 32, WIDTH),)

def trained():
    return Encoder(), (torch.zeros(72, 32, WIDTH),), lambda model, x: model(x).square().mean()
"""
PIPELINE = """
hardware = "cpu-gloo"
[mesh]
dp = 2
tp = 2
[operators]
"*.*.a_rather_long_name_of_a_projection_to_more_channels" = { in = [["dp", 1, 1], ["tp", 1]] }
[pipeline]
degree = 9
schedule = "zero_bubble"
micro_batches = 36
stages = { STAGES }
"""


def written(tmp_path, *words):
    """Run a command that writes a page."""
    (tmp_path / "roomy.py").write_text(ROOMY)
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)


def fits(page, picture):
    """Check that a page fits the window, with its details closed and open; the pictures are written beside it."""
    for opened in (False, True):
        file = picture.with_stem(f"{picture.stem}-{'open' if opened else 'closed'}")
        assert look(page, file, opened=opened) == {"width": 1280, "found": []}, file
        assert file.read_bytes().startswith(b"\x89PNG")


def test_every_page_of_the_package_is_looked_at_here():
    """A new template, or a new option that writes a page or a picture, belongs into this file."""
    templates = {file.name for file in (ROOT / "ascend_parallel").rglob("*.jinja")}
    assert templates == {
        "audit.html.jinja",
        "lanes.html.jinja",
        "page.html.jinja",
        "picture.svg.jinja",
        "report.html.jinja",
    }
    commands = typer.main.get_command(app).commands
    options = {
        (name, option.opts[0])
        for name, command in commands.items()
        for option in command.params
        if option.opts[0] in ("--html", "--schedule", "--plot", "--png", "--open")
    }
    # matplotlib draws --plot and timeline.png, and fits its text itself (layout="constrained").
    charts = {("bench", "--plot"), ("timeline", "--png"), ("timeline", "--open")}
    pages = {
        ("audit", "--html"),
        ("predict", "--html"),
        ("propagate", "--html"),
        ("strategy", "--html"),
        ("strategy", "--schedule"),
    }
    assert options - charts == pages


def test_the_page_of_126_layers_with_long_names_fits_the_window(tmp_path):
    page = tmp_path / "plan.html"
    written(tmp_path, "propagate", f"{tmp_path}/roomy.py:encoder", "--mesh", "dp=2,tp=4", "--html", page, "--brief")
    fits(page, tmp_path / "plan.png")


def test_the_page_of_advice_fits_the_window(tmp_path):
    page = tmp_path / "advice.html"
    written(tmp_path, "propagate", f"{tmp_path}/roomy.py:few", "--mesh", "dp=2,tp=4", "--html", page, "--advise")
    assert "Which operators to configure" in page.read_text()
    fits(page, tmp_path / "advice.png")


def test_the_page_and_the_schedule_of_a_strategy_fit_the_window(tmp_path):
    stages = ", ".join(f'"the_encoder_of_the_language_model.{layer}" = {layer // 14}' for layer in range(126))
    config = tmp_path / "roomy.toml"
    config.write_text(PIPELINE.replace("STAGES", stages))
    page, schedule = tmp_path / "strategy.html", tmp_path / "schedule.svg"
    words = ("strategy", f"{tmp_path}/roomy.py:trained", "--config", config, "--html", page, "--schedule", schedule)
    written(tmp_path, *words)
    fits(page, tmp_path / "strategy.png")
    fits(schedule, tmp_path / "schedule.png")


def test_a_timeline_of_126_layers_with_long_names_fits_the_window(tmp_path):
    for rank in range(8):
        header, passes = made(rank, steps=126, ranks=8)
        for number, each in enumerate(passes):
            name = f"the_encoder_of_the_language_model.{number}.a_rather_long_name_of_a_projection_to_fewer_channels"
            each |= {"layer": name, "group": list(range(8))}
        write(tmp_path, header, passes)
    written(tmp_path, "timeline", tmp_path, "--no-png")
    fits(tmp_path / "report.html", tmp_path / "report.png")


@pytest.mark.parametrize("mesh", ["mp=2", "dp=2,mp=4"])
def test_the_page_of_a_plan_fits_the_window(tmp_path, mesh):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    done = CliRunner().invoke(app, ["propagate", MODEL, "--mesh", mesh, "--html", str(page), "--brief"])
    assert done.exit_code == 0, done.output
    fits(page, picture)


def test_the_lanes_of_a_step_fit_the_window(tmp_path):
    page = tmp_path / "lanes.html"
    written(
        tmp_path, "predict", "--model", "llama2-70b", "--tp", "8", "--pp", "4", "--hardware", "910b", "--html", page
    )
    fits(page, tmp_path / "lanes.png")


def test_the_look_finds_what_sticks_out(tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<!DOCTYPE html><body><div style='width:2000px'>wide</div></body>")
    found = look(page, tmp_path / "wide.png")["found"]
    assert "outside: DIV" in found
    assert found[0].startswith("page: ")


def test_the_look_finds_text_outside_its_picture(tmp_path):
    picture = tmp_path / "cut.svg"
    text = '<text x="90" y="15">cut off</text>'
    picture.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 20">{text}</svg>')
    assert "outside its picture: cut off" in look(picture, tmp_path / "cut.png")["found"]


def test_the_report_of_a_timeline_fits_the_window(tmp_path):
    for rank in range(2):
        write(tmp_path, *made(rank, steps=3))
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--no-png"])
    assert done.exit_code == 0, done.output
    assert look(tmp_path / "report.html", tmp_path / "report.png") == {"width": 1280, "found": []}


def test_the_audit_of_a_profile_fits_the_window(tmp_path):
    page = tmp_path / "audit.html"
    for rank in range(8):
        write_profile(tmp_path / f"rank{rank}.json", of_gpu(rank, steps=3, ranks=8))
    written(tmp_path, "audit", tmp_path, "--html", page)
    fits(page, tmp_path / "audit.png")
