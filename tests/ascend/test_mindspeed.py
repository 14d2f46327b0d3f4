"""MindSpeed's CoC taken over by COC_TAKE_OVER=1, on the real MindSpeed and Megatron-LM over emulated NPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

checkouts = all(Path(os.environ.get(name, ".none")).is_dir() for name in ("MINDSPEED", "MEGATRON"))
needs_checkouts = pytest.mark.skipif(
    not checkouts, reason="MINDSPEED and MEGATRON name no checkouts of MindSpeed 26.1.0_core_r0.12.1 and core_v0.12.1"
)


@needs_checkouts
@pytest.mark.parametrize("sequence", ["", "--sequence-parallel"], ids=["all-reduce", "sequence"])
def test_mindspeeds_coc_is_taken_over(sequence):
    flags = f"--use-ascend-coc --coc-parallel-num 2 {sequence}".split()
    words = ["run", "--ranks", "2", str(Path(__file__).with_name("mindspeed_program.py")), *flags]
    variables = {"COC_TAKE_OVER": "1", "EXPECTED": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "emulated_ascend", *words],
        env=os.environ | variables, capture_output=True, text=True, timeout=190,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.count("every check was made") == 2
    assert "in place of MindSpeed's CoC, with its arguments: on" in done.stdout + done.stderr
