"""ascend-parallel doctor: what it finds, what it tries, and how it ends."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ascend_parallel.doctor import trial
from ascend_parallel.ops.registry import KERNELS


def doctor(*arguments, **variables):
    environ = {name: value for name, value in os.environ.items() if "COC" not in name}
    command = [sys.executable, "-m", "ascend_parallel", "doctor", *arguments]
    return subprocess.run(
        command, env={**environ, "COLUMNS": "200", **variables}, capture_output=True, text=True, timeout=120
    )


def test_a_machine_without_faults():
    ended = doctor("--json", "--group", "2", COC_PARALLEL_NUM="4")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["healthy"]) == (0, True)
    assert report["verdict"] == "nothing is wrong; overlap is on"
    found = {(f["section"], f["name"]): f["found"] for f in report["findings"]}
    assert found["versions", "torch"] == torch.__version__
    assert "COC_PARALLEL_NUM=4" in found["settings", "variables"]
    assert "methods of megatron-core" in found["patches", "state"]
    tried = {name: found["tried on 2 processes", name] for name in KERNELS}
    assert tried["npu"].startswith("not tried: device cpu")
    assert {tried[name] for name in ("chunked", "reference", "ordered")} == {"right"}
    assert set(tried) == {name for section, name in found if section == "kernels"}


def test_a_misspelt_variable_is_bad_and_said_in_words():
    ended = doctor(COC_PARALEL_NUM="4")
    assert ended.returncode == 1
    assert "COC_PARALLEL_NUM" in ended.stdout
    assert "1 thing to put right: variables" in ended.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"COC_PARALLEL_NUM": "abc"}, "COC_PARALLEL_NUM='abc'"), ({"COC_PLAN": "none.json"}, "cannot be read")],
)
def test_a_bad_setting_is_a_finding_and_no_traceback(variables, message):
    ended = doctor("--json", **variables)
    assert ended.returncode == 1
    bad = [finding["found"] for finding in json.loads(ended.stdout)["findings"] if finding["verdict"] == "bad"]
    assert message in bad[0]
    words = [sys.executable, "-m", "ascend_parallel", "status"]
    status = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert status.returncode == 2
    assert message in status.stderr
    assert "Traceback" not in status.stderr
    code = "import ascend_parallel"  # a program of the user's has to stop
    own = subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, timeout=60)
    assert own.returncode == 1


def test_one_rank_is_refused():
    ended = doctor("--group", "1")
    assert ended.returncode == 2
    assert "2 or more" in ended.stderr


def test_other_ranks_are_silent():
    ended = doctor("--json", RANK="1")
    assert (ended.returncode, ended.stdout) == (0, "")


class Wrong:
    """The reference kernel, with every result too large."""

    def __getattr__(self, name):
        return getattr(KERNELS["reference"], name)

    def matmul_all_reduce(self, *args, **kwargs):
        pending = KERNELS["reference"].matmul_all_reduce(*args, **kwargs)
        pending.wait().mul_(1.01)
        return pending


def planted(group):
    kept = dict(KERNELS)
    KERNELS["chunked"] = Wrong()
    try:
        return trial.try_all(group)
    finally:
        KERNELS.update(kept)


def test_a_wrong_kernel_is_found(ranks):
    for found in ranks(2).run(planted):
        assert found["chunked"].startswith("wrong: matmul_all_reduce is off by 1.0e-02")
        assert found["reference"] == "right"
