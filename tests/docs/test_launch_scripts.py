"""The launch scripts of examples/launch: the one for CPUs runs, and the one for NPUs switches overlap on alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "examples/launch"
CPU, NPU = LAUNCH / "gpt_cpu.sh", LAUNCH / "qwen3_32b_npu.sh"


def launch(folder, **variables):
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.run(["bash", str(CPU)], env=environ, cwd=folder, capture_output=True, text=True, timeout=300)


def test_both_scripts_switch_overlap_on_with_the_same_lines():
    switches = re.compile(r"^(?:export .*COC.*|.*ascend-parallel .*)$", re.MULTILINE)
    lines = [switches.findall(path.read_text()) for path in (CPU, NPU)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4


@pytest.mark.slow
def test_the_script_for_cpus_trains_verifies_and_draws_a_timeline(tmp_path):
    variables = {"ITERATIONS": "3", "COC_PARALLEL_NUM": "4", "COC_VERIFY": "2"}
    finished = launch(tmp_path, COC_TIMELINE=str(tmp_path / "timeline"), **variables)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    for part in ("9 of 9 linear layers covered", "verification, every 2 calls", "0 over the limit"):
        assert part in finished.stderr, (part, finished.stderr)
    assert "nothing is wrong" in finished.stdout
    assert list((tmp_path / "timeline").glob("*.html"))


@pytest.mark.slow
def test_a_script_stops_before_the_training_when_the_doctor_finds_something_wrong(tmp_path):
    finished = launch(tmp_path, COC_PARALLEL_NUMM="4")
    assert finished.returncode != 0
    assert "step" not in finished.stdout
