"""The command line on emulated NPUs: doctor names the emulation, report measures it."""

import json
import subprocess
import sys

import pytest


def command(*words, seconds=150):
    return subprocess.run(
        [sys.executable, "-m", "ascend_parallel", *words], capture_output=True, text=True, timeout=seconds
    )


def test_doctor_names_the_emulation_and_the_devices():
    done = command("doctor", "--json")
    findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]  # torch_npu warns on stdout without CANN
    found = {(each["section"], each["name"]): each for each in findings}
    assert found["versions", "torch_npu"]["found"] == "2.13.0"
    assert found["versions", "CANN"]["found"] == "emulated by emulated_ascend: nothing runs on an NPU"
    operators = found["versions", "fused operators"]["found"]
    assert operators.startswith("Ascend910B1: matmul_all_reduce on 1 to 8 ranks, ")
    assert "all_to_all_matmul on 2 to 8 ranks, matmul_all_to_all on 2 to 8 ranks" in operators
    assert "experts" not in operators  # A3 alone
    assert found["devices", "accelerators"]["found"] == "8 of npu"
    assert found["kernels", "npu"]["found"] == "available"
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_report_measures_emulated_devices_and_says_so(tmp_path):
    done = command("report", "--ranks", "2", "--device", "npu", "--quick", "--only", "doctor", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "ascend_parallel_report.json").read_text())
    assert "emulated by emulated_ascend" in json.dumps(written)
    assert "emulated by emulated_ascend" in (tmp_path / "ascend_parallel_report.md").read_text()
