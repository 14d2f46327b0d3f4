"""ascend-parallel doctor: its findings, its trial of kernels and its exit status."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from environments import call, environment
from launch import forked_python
from loops import REASON
from marks import promise
from typer.testing import CliRunner

from ascend_parallel import Settings
from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.doctor import ContextRequest, Finding, Report, trial
from ascend_parallel.diagnostics.doctor.findings import LOOP_COST, REBUILD
from ascend_parallel.ops.call import PART_NAMES
from ascend_parallel.ops.registry import KERNELS
from ascend_parallel.overlap.choices import overlap_in_words


def doctor(*arguments, cwd=None, **variables):
    environ = {name: value for name, value in os.environ.items() if "COC" not in name}
    command = [forked_python(), "-m", "ascend_parallel", "doctor", *arguments]
    return subprocess.run(
        command, env={**environ, "COLUMNS": "200", **variables}, capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_the_cost_of_pythons_loop_is_that_of_the_benchmarks_table():
    """The largest ratio of the last column of "Python's / C++"."""
    lines = (Path(__file__).parents[2] / "benchmarks/README.md").read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if line.endswith("| Python's / C++ |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    most = max(float(row.split("|")[-2]) for row in rows)
    assert f"up to {most} times" in LOOP_COST


def test_a_machine_without_faults():
    ended = doctor("--json", "--group", "2", "--context", "8,2,4", COC_PARALLEL_NUM="4")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["healthy"]) == (0, True)
    assert report["verdict"].startswith("nothing is wrong; overlap is on: 4 chunks (COC_PARALLEL_NUM=4)")
    found = {(f["section"], f["name"]): f["found"] for f in report["findings"]}
    assert found["versions", "torch"] == torch.__version__
    assert "COC_PARALLEL_NUM=4" in found["settings", "variables"]
    assert "methods of megatron-core" in found["patches", "state"]
    tried = {name: found["tried on 2 processes", name] for name in KERNELS}
    assert tried["npu"].startswith("not tried: device cpu")
    assert {tried[name] for name in ("chunked", "reference", "ordered")} == {"right"}
    assert set(tried) == {name for section, name in found if section == "kernels"}
    assert found["chunks", "loop"] == (f"in Python: {REASON}" if REASON else "in C++")
    calls = [call for call in report["tried"]["calls"] if "refused" not in call]
    assert {(call["dtype"], call["chunks"]) for call in calls if call["kernel"] == "chunked"} == {
        (dtype, count) for dtype in ("float32", "bfloat16") for count in (2, 3, 8)
    }
    assert all(call["bits"] and call["again"] for call in calls if call["kernel"] == "reference")
    assert all(0 < call["error"] <= call["limit"] for call in calls)
    assert {found["tried on 2 processes", name] for name in PART_NAMES} == {"right"}
    assert "keys and values are gathered, because" in found["context parallelism", "8 heads, 2 of keys"]
    assert found["context parallelism", "groups"] == "2, of heads [1, 1]"


SHARED = [  # heads of queries, of keys, ranks; settings; what is found, by verdict
    ((32, 8, 4), {"num_chunks": 4}, [("good", "heads are exchanged"), ("good", "2, of heads [1, 1]")]),
    ((32, 8, 4), {"num_chunks": 4, "strict": True}, [("good", "heads are exchanged"), ("good", "2, of heads [1, 1]")]),
    ((32, 8, 2), {"auto": True}, [("good", "heads are exchanged"), ("good", "measured in the run; at most 4")]),
    ((32, 8, 2), {}, [("good", "heads are exchanged"), ("note", "1: nothing is hidden")]),
    ((8, 1, 2), {"num_chunks": 4}, [("note", "keys and values are gathered"), ("note", "one head of keys")]),
    ((32, 8, 8), {"num_chunks": 4}, [("good", "heads are exchanged"), ("note", "one head of keys")]),
    ((8, 3, 2), {}, [("bad", "refused on 2 ranks: head_exchange: 8 heads of queries, no multiple of 3")]),
    ((32, 8, 4), {"deterministic": "tp"}, [("bad", "refused: weight gradients are summed over the ranks")]),
    ((32, 8, 1), {"num_chunks": 4}, [("good", "one rank: nothing is exchanged")]),
]


@pytest.mark.parametrize(("heads", "settings", "expected"), SHARED, ids=str)
def test_doctor_says_whether_and_how_ranks_would_share_a_sequence(heads, settings, expected):
    request = ContextRequest(queries=heads[0], keys=heads[1], ranks=heads[2])
    found = [(finding.verdict, finding.found) for finding in request.findings(Settings(**settings))]
    assert [verdict for verdict, _ in found] == [verdict for verdict, _ in expected]
    for (_, text), (_, begins) in zip(found, expected, strict=True):
        assert text.startswith(begins)


def test_heads_that_are_no_heads_are_refused():
    ended = CliRunner().invoke(app, ["doctor", "--context", "32,8"])
    assert ended.exit_code == 2 and "'32,8' is not allowed: give HEADS,KEYS,RANKS such as 32,8,4" in ended.stderr


def test_the_verdict_says_what_a_missing_extension_costs():
    """A plain ``pip install .`` leaves it out, since pip builds where it sees no torch."""
    reason = "the C++ extension is not built: install with a compiler and --no-build-isolation"
    report = Report([Finding("kernels", "shm", reason, "note", REBUILD)], Settings(num_chunks=4))
    assert report.healthy
    assert report.verdict.endswith(
        f"; chunks are looped over in Python, and CPU ranks have no shared-memory kernel: {reason}"
    )


def test_a_misspelt_variable_is_bad_and_said_in_words():
    ended = doctor(COC_PARALEL_NUM="4")
    assert ended.returncode == 1
    assert "COC_PARALLEL_NUM" in ended.stdout
    assert "1 thing to fix: variables" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("matches", "suffix"), [(True, ""), (True, ".post8"), (True, "rc1"), (False, ".post8")])
def test_a_torch_npu_of_another_torch_is_bad(tmp_path, suffix, matches):
    release = torch.__version__.split("+")[0]
    if not matches:
        *first, patch = release.split(".")
        release = ".".join([*first, str(int(patch) + 1)])
    package = tmp_path / f"torch_npu-{release}{suffix}.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {release}{suffix}\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    report = json.loads(doctor("--json", PYTHONPATH=os.pathsep.join(paths)).stdout)
    found = [f for f in report["findings"] if f["name"] == "torch_npu"]
    assert found[0]["found"] == release + suffix
    advice = [f["advice"] for f in found if f["verdict"] == "bad"]
    of_this = f"install torch_npu {torch.__version__.split('+')[0]}, or its post-release"
    assert advice == ([] if matches else [f"this torch is {torch.__version__}: {of_this}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [({"COC_PARALLEL_NUM": "abc"}, "COC_PARALLEL_NUM='abc'"), ({"COC_PLAN": "none.json"}, "cannot be read")],
)
def test_a_bad_setting_is_a_finding_and_no_traceback(variables, message):
    ended = doctor("--json", **variables)
    assert ended.returncode == 1
    bad = [finding["found"] for finding in json.loads(ended.stdout)["findings"] if finding["verdict"] == "bad"]
    assert message in bad[0]
    words = [forked_python(), "-m", "ascend_parallel", "status"]
    status = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert status.returncode == 2
    assert message in status.stderr
    assert "Traceback" not in status.stderr
    code = "import ascend_parallel"  # a program of the user's has to stop
    own = subprocess.run(
        [forked_python(), "-c", code], env={**os.environ, **variables}, capture_output=True, timeout=60
    )
    assert own.returncode == 1


def both(python, **variables):
    """Return the exit codes and outputs of doctor and status, which must agree."""
    found = [call(python, "-m", "ascend_parallel", command, **variables) for command in ("doctor", "status")]
    assert found[0].returncode == found[1].returncode, found
    return found[0].returncode, *(process.stdout + process.stderr for process in found)


@promise("doctor-exit")
@pytest.mark.slow
def test_without_megatron_nothing_is_overlapped_and_both_say_so(tmp_path):
    python = environment(tmp_path, without=["megatron"])
    status, doctor, said = both(python, COC_PARALLEL_NUM="4", COC_FRAMEWORKS="megatron")
    assert status == 1
    assert doctor.splitlines()[-1] == "1 thing to fix: megatron-core"
    assert "found none installed: the variables have nothing to overlap" in said
    assert "overlap is on" not in doctor + said
    status, doctor = (call(python, "-m", "ascend_parallel", command) for command in ("status", "doctor"))
    assert status.returncode == doctor.returncode == 0
    assert "nothing is wrong; overlap is off" in doctor.stdout
    assert "megatron-core" in doctor.stdout


@promise("doctor-exit")
@pytest.mark.slow
def test_what_keeps_a_training_from_overlapping_ends_both_with_1():
    off = {"COC_PARALLEL_NUM": "4", "COC_PARALEL_NUM": "4", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    status, *said = both(forked_python(), **off)
    assert status == 1
    for text in said:
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in text
        assert "COC_PARALEL_NUM" in text
        assert "overlap is on" not in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "off: export COC_PARALLEL_NUM=auto"),
        (Settings(num_chunks=4, mode=0), "off: COC_MODE=0"),
        (Settings(num_chunks=4, mode=1), "off: COC_MODE=1 runs the layers without chunks"),
        (Settings(mode=2), "off: COC_PARALLEL_NUM=1"),
        (Settings(mode=2, customized_coc={(1, 2, 3): 1}), "off: COC_PARALLEL_NUM=1"),
        (Settings(mode=2, customized_coc={(1, 2, 3): 2}), "on: 1 shape of customized_coc"),
        (Settings(num_chunks=8), "on: 8 chunks"),
        (Settings(auto=True), "on: the chunks that a model and measurements find best"),
        (Settings(tune="plan.json"), "on: the chunks that are fastest in the run (COC_TUNE=plan.json)"),
        (Settings(fused=True), "on: fused operators where they can run, else 4 chunks"),
        (Settings(fused=True, num_chunks=2), "on: fused operators where they can run, else 2 chunks"),
    ],
)
def test_overlap_is_on_only_where_something_is_overlapped(settings, words):
    assert overlap_in_words(settings).startswith(words)


def test_one_rank_is_refused():
    ended = CliRunner().invoke(app, ["doctor", "--group", "1"])
    assert ended.exit_code == 2
    assert "greater than or equal to 2" in ended.stderr


@pytest.mark.slow
def test_other_ranks_are_silent():
    ended = doctor("--json", RANK="1")
    assert (ended.returncode, ended.stdout) == (0, "")


class Wrong:
    """The reference kernel, with every sum of rank 1 multiplied by a factor."""

    def __init__(self, factor):
        self.factor = factor

    def __getattr__(self, name):
        return getattr(KERNELS["reference"], name)

    def matmul_all_reduce(self, x, w, group, *args, **kwargs):
        pending = KERNELS["reference"].matmul_all_reduce(x, w, group, *args, **kwargs)
        pending.wait().mul_(self.factor if group.rank() == 1 else 1)
        return pending


def planted(group, factor):
    kept, send, sent = dict(KERNELS), dist.all_to_all_single, []
    KERNELS["chunked"] = Wrong(factor)

    def scaled(out, x, *sizes, **options):
        sent.append(x * 1.01)
        return send(out, sent[-1], *sizes, **options)

    try:
        with mock.patch.object(dist, "all_to_all_single", scaled):
            return trial.try_all(group)
    finally:
        KERNELS.update(kept)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "off"), [(1.01, "1.0e-02"), (float("nan"), "nan")])
def test_a_kernel_that_is_wrong_on_one_rank_is_found_by_all(ranks, factor, off):
    for tried in ranks(2).run(planted, factor):
        found = trial.outcomes(tried)
        assert found["chunked"].startswith(f"wrong: matmul_all_reduce of float32 is off by {off}")
        assert ("bfloat16" in found["chunked"]) == (factor != 1.01)  # 1 % is rounding there
        assert found["reference"] == "right"
        assert found["expert_exchange"] == "wrong: rows came back from other experts"
        assert found["head_exchange"].startswith("wrong: off by ")
        assert found["key_gather"].startswith("wrong: off by ")
        wrong = [call for call in tried["calls"] if call["kernel"] == "chunked" and not call["bits"]]
        assert {call["operator"] for call in wrong} == {"matmul_all_reduce"}


def test_processes_that_fail_are_wrong_for_every_kernel_and_have_no_calls():
    tried = trial.try_kernels(2, time_limit=0.01)
    assert set(tried) == {"error"}
    assert {found[:20] for found in trial.outcomes(tried).values()} == {"wrong: rank 0, 1 not"[:20]}


@pytest.mark.slow
def test_ranks_use_the_package_of_the_doctor_and_another_in_the_current_folder_is_said(tmp_path):
    """As in a checkout: python -m imports the folder's package, the command the installed one."""
    other = tmp_path / "ascend_parallel"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the package of the current folder')")
    code = "import os, sys; import ascend_parallel.cli.app as cli; os.chdir(sys.argv.pop(1)); cli.app()"
    words = [sys.executable, "-c", code, str(tmp_path), "doctor", "--json", "--group", "2"]
    environ = {name: value for name, value in os.environ.items() if "COC" not in name}
    package = str(Path(trial.__file__).parents[3])
    ended = subprocess.run(words, env={**environ, "PYTHONPATH": package}, capture_output=True, text=True, timeout=120)
    report = json.loads(ended.stdout)
    tried = [found["found"] for found in report["findings"] if found["section"] == "tried on 2 processes"]
    assert report["healthy"] and "right" in tried, report


@pytest.mark.slow
def test_a_package_that_only_the_current_folder_imports_is_bad(tmp_path):
    (tmp_path / "ascend_parallel").symlink_to(Path(trial.__file__).parents[2])
    checkout = doctor("--json", cwd=tmp_path)
    bad = [found["found"] for found in json.loads(checkout.stdout)["findings"] if found["verdict"] == "bad"]
    assert len(bad) == 1 and "a program in another folder imports" in bad[0], checkout
