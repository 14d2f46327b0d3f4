"""``ascend-parallel strategy``: its output and files, and user errors as one line with exit status 2."""

import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ascend_parallel.cli.app import app

MODELS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def small():
    return Model(), (torch.zeros(8, 8),)


def no_loss():
    return nn.Linear(8, 8), (torch.zeros(8, 8),)


def with_a_loss():
    return nn.Linear(8, 8), (torch.zeros(8, 8),), lambda model, x: model(x).square().mean()


def no_batch():
    return Model()
"""
PIPELINE = "[mesh]\ndp = 2\n\n[pipeline]\ndegree = 2\nmicro_batches = 4\n"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that runs the command in a folder with the models and a strategy."""
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)

    def tell(toml, *options, function="small"):
        Path("s.toml").write_text(toml)
        return CliRunner().invoke(app, ["strategy", f"models.py:{function}", "--config", "s.toml", *options])

    return tell


def test_it_says_what_a_pipeline_comes_to_and_draws_it(told):
    found = told(PIPELINE, "--schedule", "s.svg", "--html", "s.html")
    assert found.exit_code == 0, found.output
    assert "4 ranks, each stage on a mesh of dp=2" in found.stdout
    assert "a step of 4 micro-batches" in found.stdout
    assert "rank 1  .   F0" in found.stdout or "rank 1  .  F0" in found.stdout
    assert Path("s.svg").read_text().startswith("<svg")
    page = html.unescape(Path("s.html").read_text())
    (activations,) = set(re.findall(r"activations ([\d.]+ \w*B)", page))
    rows = found.stdout[found.stdout.index("\nstage ") :].splitlines()[2:4]
    assert any(activations in row for row in rows)


def test_the_page_says_first_what_is_trained_and_how(told):
    more = '[sharding]\nzero_stage = 1\n[amp]\ndtype = "bfloat16"\n'
    found = told(PIPELINE + more, "--html", "s.html")
    page = html.unescape(Path("s.html").read_text())
    first = page[page.index("<h1>") : page.index("<p>")]
    rows = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", first))
    assert "<h1>Training plan</h1>" in page
    assert rows.pop("a step") in found.stdout and rows.pop("memory").endswith("on the rank that holds the most")
    assert rows == {
        "model": "models.py:small, 144 parameters",
        "mesh": "dp=2 for each stage; 4 ranks, mode auto",
        "pipeline": "2 stages on 2 groups of ranks, 1f1b",
        "micro-batches": "4",
        "ZeRO": "stage 1 over dp",
        "amp": "bfloat16, fp32 master weights; gradients of 4 backwards add up, and are summed over ranks, in fp32",
    }
    assert re.search(r"\nstep: \S+ s, \S+ rows per second and card, MFU [\d.]+%, by the cost model of ", found.stdout)


def test_the_function_may_give_the_loss(told):
    found = told("[mesh]\ndp = 2\n", function="with_a_loss")
    assert "2 ranks, a mesh of dp=2" in found.stdout, found.output


def test_json_is_all_that_is_printed(told):
    found = json.loads(told(PIPELINE, "--json").stdout)
    assert (found["ranks"], found["mesh"], [stage["stage"] for stage in found["stages"]]) == (4, {"dp": 2}, ["0", "1"])
    assert found["bubble"] == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    # elements in fp32 of the whole model, 2 x (64 + 8), over both stages
    assert sum(stage["parameters"] for stage in found["stages"]) == 4 * 2 * (64 + 8)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("mode = data", "s.toml is no valid TOML"),
        ('mod = "data"', "there is no 'mod'; did you mean mode?"),
        ("[pipeline]\nmicro_batch = 2", "s.toml, [pipeline]: there is no 'micro_batch'; did you mean micro_batches?"),
        ("[mesh]\ndp = true", "mesh={'dp': True}: give sizes by name"),
        ("[pipeline]\ndegree = 2\nstages = 2", "pipeline.stages=2: give stages by pattern"),
        ('fused_passes = "matmul_add"', "fused_passes='matmul_add': give a list of matmul_add"),
        ("hardware = 3", "hardware=3: give a name"),
        ('hardware = "b52"', "hardware 'b52' is not known"),
        ("[pipeline]\ndegree = 2\nmicro_batches = 3", "pipeline.micro_batches=3: a batch's tensor is [8, 8]"),
        ('[recompute]\nmodules = ["lyers.*"]', "recompute.modules: 'lyers.*' names no module; there are layers"),
        ('mode = "hybrid"', 'mode="hybrid": the model runs as it is written'),
    ],
)
def test_what_a_strategy_says_wrongly_is_one_line(told, toml, message):
    found = told(toml)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith("strategy: ") and message in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "function", "message"),
    [
        (["--schedule", "s.svg"], "small", "s.toml has no pipeline"),
        (["--html", "nowhere/s.html"], "small", "there is no folder"),
        ([], "smal", "models.py has no 'smal'"),
        ([], "no_loss", "the loss has to be one number"),
        ([], "no_batch", "models.py:no_batch returned Model: give (model, batch)"),
    ],
)
def test_what_the_call_says_wrongly_is_one_line(told, options, function, message):
    found = told("[mesh]\ndp = 2", *options, function=function)
    assert (found.exit_code, found.stdout) == (2, "")
    assert message in found.stderr


@pytest.mark.slow
def test_a_preset_is_explained_as_plan_training_planned_it(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text('[mesh]\ndp = 2\ntp = 2\n\n[amp]\ndtype = "bfloat16"\n')
    ended = CliRunner().invoke(app, ["strategy", "llama2-7b", "--config", str(file), "--batch", "8", "--seq", "128"])
    assert ended.exit_code == 0, ended.output
    assert "mode: auto, 4 ranks" in ended.output
    for given, message in (
        (("llama2-7", "--config", str(file)), "did you mean llama2-7b?"),
        (("a.py:planned", "--config", str(file), "--seq", "8"), "--seq 8: a.py:planned returns its batch"),
    ):
        ended = CliRunner().invoke(app, ["strategy", *given])
        assert ended.exit_code != 0
        assert message in " ".join(ended.output.split())


def test_a_mindformers_file_stands_for_the_strategy(told):
    text = (
        "parallel_config: {data_parallel: 2, pipeline_stage: 2, micro_batch_num: 4}\n"
        "recompute_config: {recompute: True, select_recompute: ['mlp']}\n"
    )
    Path("run.yaml").write_text(text)
    words = ["strategy", "models.py:small", "--mindformers", "run.yaml"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "none    recompute_config.select_recompute=['mlp']" in found.stdout
    assert "4 ranks, each stage on a mesh of dp=2" in found.stdout
    keys = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["mindformers"]
    assert [use["use"] for use in keys if use["key"].endswith("select_recompute")] == ["none"]
    both = CliRunner().invoke(app, [*words, "--config", "s.toml"])
    assert both.exit_code == 2 and "either --config" in both.stderr
    Path("run.yaml").write_text(text.replace("pipeline_stage: 2", "pipeline_stage: two"))
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "parallel_config.pipeline_stage='two' is not allowed: give a whole number from 1" in refused.stderr
