"""`ascend-parallel try`: a launch is compared as it is; each failure ends with its reason, and with no process left."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.step_record import StepRecord
from ascend_parallel.diagnostics.trial import LOSS, SAID, TrialError, TrialResult, try_overlap

COVERED = ("overlap is on: 4 chunks; 9 of 9 linear layers covered, on 2 ranks",)
PROGRAM = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
first = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # another optimizer is no other step
for step in range(int(sys.argv[1])):
    loss = model(torch.ones(2, 4)).square().mean()
    first.zero_grad()
    loss.backward()
    if "COC_PARALLEL_NUM" in os.environ and step == 5:  # an overlap that changes numbers
        model.weight.grad.add_(1e-3)
    first.step()
    second.step()
    print(f"step {step} loss: {loss.item():.6f}", flush=True)
open(sys.argv[2], "w").write("the program's own ending")
"""


def made(**changes):
    values = {
        "command": ["torchrun", "train.py"],
        "steps": 10,
        "plain_ms": 110.0,
        "overlapped_ms": 100.0,
        "ratio": 1.1,
        "interval": (1.05, 1.15),
        "plain_step_ms": (),
        "overlapped_step_ms": (),
        "compared_steps": 10,
        "first_difference": None,
        "plain_losses": ("1.5", "1.25"),
        "losses": ("1.5", "1.25"),
        "said": COVERED,
        "comm_ms": 10.0,
        "exposed_ms": 2.0,
    }
    return TrialResult(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "overlap helps: 1.10 times as fast"),
        ({"ratio": 0.8, "interval": (0.7, 0.9)}, "costs time here: 0.80 times"),
        ({"interval": (0.95, 1.2)}, "no difference seen"),
        ({"said": ()}, "no layer was overlapped"),
        ({"said": ("overlap is on: 4 chunks; 0 of 9 linear layers covered",)}, "no layer was overlapped"),
    ],
)
def test_the_verdict_is_of_interval_and_coverage(changes, words):
    assert words in made(**changes).verdict


def test_the_lines_say_losses_bits_and_what_stayed_exposed():
    text = "\n".join(made().lines())
    for words in ("1.10 x (1.05-1.15, 95 %", "equal bits on every rank, after 10 steps", "2 losses", "2.00 ms"):
        assert words in text
    other = "\n".join(made(first_difference=4, losses=("1.5", "1.5")).lines())
    assert "differ from step 4 on" in other and "largest difference 0.25" in other
    assert json.loads(json.dumps(made().as_dict()))["verdict"] == made().verdict


@pytest.mark.parametrize(
    ("line", "losses"),
    [
        ("step 3  loss 6.3012447357177734", ["6.3012447357177734"]),
        ("{'loss': 1.25, 'learning_rate': 1e-5}", ["1.25"]),
        ("iteration 1/ 10 | lm loss: 1.034E+01 | loss scale: 1.0 |", ["1.034E+01", "1.0"]),
        ("lossless 3, closs 4", []),
    ],
)
def test_losses_are_found_in_output(line, losses):
    assert LOSS.findall(line) == losses


def test_what_the_log_says_of_coverage_is_found():
    assert SAID.findall(f"[rank0] ascend_parallel: {COVERED[0]}\nother") == list(COVERED)


def test_the_first_optimizer_counts_the_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    record = StepRecord(tmp_path, 10)
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for step in range(3):
        weights[0].data += step
        for optimizer in optimizers:
            record.before(optimizer, lambda: None)
            record.after(optimizer)
    lines = [json.loads(line) for line in (tmp_path / "rank3.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["seconds"] is None and all(0 < line["seconds"] < 60 for line in lines[1:])
    assert lines[0]["digest"] != lines[1]["digest"] != lines[2]["digest"]


@pytest.mark.slow
def test_a_program_is_run_unchanged_and_ends_behind_the_last_step(tmp_path):
    program, ending = tmp_path / "train.py", tmp_path / "ending"
    program.write_text(PROGRAM)
    found = try_overlap([sys.executable, str(program), "20", str(ending)], steps=8, limit=120)
    assert not ending.exists()
    assert (found.steps, len(found.plain_step_ms), found.compared_steps) == (5, 8, 6)
    assert found.first_difference == 6  # the sixth step's gradient has other bits
    assert found.plain_losses[:6] == found.losses[:6] and found.plain_losses != found.losses
    assert len(found.losses) == 8
    assert not found.covered and found.comm_ms is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('half a line'); raise SystemExit(3)", ["the plain run ended with 3", "half a line"]),
        ("print('no step')", ["took no step of a torch optimizer", "no step"]),
    ],
)
def test_a_run_that_fails_is_told_with_the_end_of_its_output(code, words):
    result = CliRunner().invoke(app, ["try", "--steps", "6", "--", sys.executable, "-S", "-c", code])
    assert result.exit_code == 1
    for word in words:
        assert word in result.stderr


def test_a_run_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path / 'pid'}; sleep 300"
    began = time.monotonic()
    with pytest.raises(TrialError, match=r"not done within 1 s \(--limit\)"):
        try_overlap(["bash", "-c", script], steps=6, limit=1)
    assert time.monotonic() - began < 60
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not running(pid):
            break
        time.sleep(0.1)
    assert not running(pid)


def running(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--chunks", "many", "--", "true"], "--chunks 'many'"),
        (["--chunks", "65", "--", "true"], "65"),
        (["--steps", "5", "--", "true"], "--steps"),
        (["--", "/no/such/program"], "/no/such/program cannot be started"),
    ],
)
def test_what_is_refused_is_named(words, named):
    result = CliRunner().invoke(app, ["try", *words])
    assert result.exit_code in (1, 2)
    assert named in result.output + result.stderr
