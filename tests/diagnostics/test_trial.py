"""`ascend-parallel try`: a launch is compared as it is; each failure ends with its reason, and with no process left."""

import contextlib
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics import trial
from ascend_parallel.diagnostics.audit.account import RankTime
from ascend_parallel.diagnostics.step_record import VARIABLE, StepRecord
from ascend_parallel.diagnostics.trial import LOSS, SAID, TrialError, TrialResult, step_profile, try_overlap

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


def test_a_step_behind_the_last_is_profiled_unless_the_program_profiles_itself(tmp_path, monkeypatch):
    ended = []
    gc.collect()  # profilers of other tests
    monkeypatch.setattr(os, "_exit", ended.append)
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def run(rank, own):
        monkeypatch.setenv("RANK", str(rank))
        record = StepRecord(tmp_path, 2, profiles=True)
        for _ in range(3):
            with torch.profiler.profile() if own else contextlib.nullcontext():
                record.before(optimizer, lambda: None)
                record.after(optimizer)
            (torch.ones(8, 8) @ weight).sum().backward()
        record.before(optimizer, lambda: None) if own else None

    run(0, own=False)
    assert ended == [0]
    profiled, reason = step_profile(tmp_path)
    assert reason == "" and profiled.mean.matmul > 0 and profiled.mean.exposed == 0
    run(1, own=True)
    assert [path.name for path in tmp_path.glob("*.trace")] == ["rank0.trace"]
    assert step_profile(tmp_path) == (None, "1 of 2 ranks wrote one")
    assert step_profile(tmp_path / "nothing")[1].startswith("the program ended with its last step")


def test_ranks_begin_their_profiles_together(tmp_path, monkeypatch):
    """A rank that begins earlier would show the other's start as waiting for collectives."""
    gc.collect()  # profilers of other tests
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    record = StepRecord(tmp_path, 1, profiles=True)
    came = []

    def come():
        came.append(torch.autograd.profiler._is_profiler_enabled)
        (tmp_path / "rank1.profiled").touch()

    other = threading.Timer(2.0, come)
    other.start()
    record.before(optimizer, lambda: None)
    record.after(optimizer)
    assert came == [True]
    record._profiler.stop()


@pytest.mark.parametrize("kind", ["scheduled", "later", "full"])
def test_a_profile_that_cannot_be_leaves_the_program_as_it_is(tmp_path, monkeypatch, capsys, kind):
    """A profiler that the program has begun or begins, and a full disk: the program ends as without a profile."""
    ended = []
    gc.collect()  # profilers of other tests
    monkeypatch.setattr(os, "_exit", ended.append)
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    record = StepRecord(tmp_path, 1, profiles=True)
    plan = torch.profiler.schedule(wait=0, warmup=1, active=1)
    own = torch.profiler.profile(schedule=plan) if kind == "scheduled" else contextlib.nullcontext()
    with own:  # scheduled, it warms up, and records from the next step on
        record.before(optimizer, lambda: None)
        record.after(optimizer)
        if kind == "scheduled":
            own.step()
        with torch.profiler.profile() if kind == "later" else contextlib.nullcontext():
            (torch.ones(8, 8) @ weight).sum().backward()
        if kind == "full":
            monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
        record.before(optimizer, lambda: None)
    assert ended == [0] and (tmp_path / "rank0.done").exists() and not list(tmp_path.glob("*.trace"))
    assert ("was not written: no space left" in capsys.readouterr().err) == (kind == "full")


def full(*_):
    raise OSError("no space left")


def test_the_verdict_says_where_the_time_went():
    times = {"rank": None, "step": 10.0, "matmul": 5.0, "computing": 6.0, "communicating": 4.0, "idle": 1.0}
    plain, overlapped = RankTime(**times, exposed=3.0, host=0.5), RankTime(**times, exposed=1.0, host=0.75)
    result = made(plain_profile=plain, overlapped_profile=overlapped)
    assert "exposed communication is 3.0 ms plain and 1.0 ms overlapped" in result.verdict
    assert "waiting for the host 0.5 and 0.8 ms" in result.verdict
    assert "profile   overlapped: matmuls 5.00, other work 1.00, exposed communication 1.00" in "\n".join(
        result.lines()
    )
    assert json.loads(json.dumps(result.as_dict()))["plain_profile"]["exposed"] == 3.0
    foreseen = "\n".join(made(foreseen_ms=7.06).lines())
    assert "audit     foresaw 7.1 ms less of a step by the plain profile; 10.0 ms were measured" in foreseen
    assert "profile   none: no reason" in "\n".join(made(unprofiled="no reason").lines())


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
    assert found.plain_profile.matmul > 0 and found.overlapped_profile.matmul > 0 and found.unprofiled == ""


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


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sleep 300", 1, "is not done within 8 s"),
        ("echo out of memory; exit 7", 1, "ended with 7"),
        (f"kill -TERM {os.getpid()}; sleep 300", 143, "was cut off"),
    ],
    ids=["hangs", "fails", "cut off"],
)
def test_two_runs_are_compared_though_the_third_fails(ending, status, reason):
    line = json.dumps({"step": 1, "seconds": 0.5, "digest": "a"})
    steps = f"for step in 1 2 3 4 5 6; do echo '{line}' >> $folder/rank0.jsonl; done"
    program = (
        f"import json, os, subprocess, sys; given = json.loads(os.environ[{VARIABLE!r}]); "
        f"words = [{ending!r}] if 'COC_TIMELINE' in os.environ else [{steps!r}]; "
        "sys.exit(subprocess.run(['sh', '-c', *words], env={'folder': given['folder'], **os.environ}).returncode)"
    )
    limit = "8" if ending == "sleep 300" else "60"
    words = ["try", "--steps", "6", "--limit", limit, "--", sys.executable, "-S", "-c", program]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status
    assert "plain 500.0 ms, overlapped 500.0 ms: 1.00 x" in result.stdout
    assert f"exposed   not known: the recorded run {reason}" in result.stdout
    assert ("out of memory" in result.stderr) == ("memory" in ending)
    assert "plain: done in" in result.stderr and "500.0 ms a step" in result.stderr  # without a terminal, line by line


def test_a_run_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """Also a rank in a session of its own that does not heed SIGTERM."""
    monkeypatch.setattr(trial, "PATIENCE", 0.5)
    rank = "trap '' TERM; echo $$ > " + str(tmp_path / "pid") + "; while true; do sleep 1; done"
    script = 'setsid sh -c "$PROGRAM" & sleep 300'
    monkeypatch.setenv("PROGRAM", rank)
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
