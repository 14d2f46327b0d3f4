"""`ascend-parallel try --emulated`: what a run on emulated devices left is read, judged and named."""

import importlib.util
import json
import os
import sys

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.emulated_trial import EmulatedResult, EmulatedStep, reason_first, try_emulated
from ascend_parallel.diagnostics.step_record import StepRecord
from ascend_parallel.diagnostics.trial import TrialError

COVERED = ("overlap is on: 4 chunks; 9 of 9 linear layers covered, on 2 ranks",)
STEP = {"step": 10.0, "busy": 7.0, "starved": 0.5, "exposed": 2.5, "collectives": 3.0, "host": 4.0, "kernels": 30}


def made(plain=None, ours=None, said=COVERED):
    steps = (EmulatedStep(**{**STEP, **(changes or {})}, memory_mb=100) for changes in (plain, ours))
    return EmulatedResult(
        device="910B1", command=["train"], steps=12, plain=next(steps), overlapped=next(steps), said=said
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (made(ours={"step": 8.0, "exposed": 0.5}), "1.25 times as fast; exposed 2.50 -> 0.50 ms of a step"),
        (made(ours={"step": 20.0, "starved": 10.0}), "0.50 times as fast; the host is in the way: the device waits"),
        (made(plain={"exposed": 0.1}), "there is little to hide: exposed 0.10 ms"),
        (made(said=()), "no layer was overlapped"),
    ],
)
def test_the_verdict_names_what_is_in_the_way(result, words):
    assert words in result.verdict
    assert json.loads(json.dumps(result.as_dict()))["plain"]["memory_mb"] == 100
    assert any("nothing ran on an NPU" in line for line in result.lines())


# Leaves what `python -m emulated_ascend run --clock` leaves: step files of the trial, and a summary.
STAND_IN = """
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
if "nokernel" in words:
    sys.exit("[emulated ascend] aclnnSort has no kernel in emulated_ascend")
wanted = json.loads(os.environ["ASCEND_PARALLEL_TRIAL"])
assert wanted["digests"] is False and wanted["profiles"] is False
ours = "COC_PARALLEL_NUM" in os.environ
for rank in range(2):
    line = json.dumps({"seconds": 1.0, "digest": None, "step": 1})
    Path(wanted["folder"], f"rank{rank}.jsonl").write_text(line + "\\n")
step = dict(step=10.0 - 2 * ours, busy=7.0, starved=0.5, exposed=2.0, collectives=3.0, host=4.0, kernels=30)
slow = {**step, "step": 99.0}
steps = {"0": [slow] + [step] * 5, "1": [slow] + [{**step, "step": step["step"] + 1}] * 5}
summary = Path(words[words.index("--summary") + 1])
summary.write_text(json.dumps({"steps": steps if "few" not in words else {}, "memory_mb": 7}))
Path(words[words.index("--lanes") + 1]).write_text("{}")
print("ascend_parallel: overlap is on: 4 chunks; 9 of 9 linear layers covered")
"""


def installed(monkeypatch, found):
    """Let Python find torch_npu and emulated_ascend, or not."""
    real, names = importlib.util.find_spec, ("torch_npu", "emulated_ascend")
    own = real("json") if found else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: own if name in names else real(name, *rest))


@pytest.fixture
def emulation(tmp_path, monkeypatch):
    """A stand-in of emulated_ascend's command; the real one needs torch_npu (tests/ascend)."""
    package = tmp_path / "packages" / "emulated_ascend"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    installed(monkeypatch, found=True)


def test_both_runs_are_compared_by_the_slowest_ranks_median(emulation, tmp_path):
    result = try_emulated(["torchrun", "train.py"], "910B1", steps=8, limit=60, lanes=tmp_path / "lanes")
    assert (result.plain.step, result.overlapped.step, result.plain.memory_mb) == (11.0, 9.0, 7)
    assert "covered" in result.said[0] and sorted(path.name for path in (tmp_path / "lanes").iterdir()) == [
        "overlapped.json",
        "plain.json",
    ]


@pytest.mark.parametrize(("word", "said"), [("nokernel", "aclnnSort has no kernel"), ("few", "too few steps")])
def test_a_run_that_fails_begins_with_what_the_emulation_says(emulation, word, said):
    with pytest.raises(TrialError) as raised:
        try_emulated([word], "910B1", steps=8, limit=60)
    assert said in str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("output", "first"),
    [
        ("emulated_ascend: torch_npu is 2.12.0; emulated_ascend knows 2.13.0 alone", "torch_npu is 2.12.0;"),
        ("x\n[rank0]: torch.OutOfMemoryError: NPU out of memory. Tried to allocate 9 GiB", "NPU out of memory. Tried"),
        ("Traceback", "the plain run"),
    ],
)
def test_what_stopped_the_emulation_stands_first(output, first):
    text = output + "\nTraceback" * 30  # torchrun's, behind what was said
    assert reason_first("the plain run ended with 1", text).startswith(first)


def test_without_the_emulation_the_command_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    installed(monkeypatch, found=False)
    done = CliRunner().invoke(app, ["try", "--emulated", "910B1", "--", sys.executable, "train.py"])
    assert done.exit_code == 2 and "--emulated needs the package emulated_ascend" in done.stderr


def test_steps_are_counted_without_digests(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    record, weight = StepRecord(tmp_path, 5, digests=False), torch.nn.Parameter(torch.ones(2))
    record.after(torch.optim.SGD([weight], lr=0.1))  # the first optimizer is the clock once `before` has seen it
    optimizer = torch.optim.SGD([weight], lr=0.1)
    record.before(optimizer, lambda: None)
    record.after(optimizer)
    assert [json.loads(line)["digest"] for line in (tmp_path / "rank0.jsonl").read_text().splitlines()] == [None]
