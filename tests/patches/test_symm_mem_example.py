"""examples/frameworks/compiled_tp.py with torchrun: plain, and with the kernels."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/frameworks/compiled_tp.py"
STEPS = 2


def run(*options, **variables):
    """Return what the example prints on two ranks; it compiles anew, whatever earlier runs left in torch's caches."""
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    environ = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    environ |= {"TORCH_COMPILE_CACHE_KEY_TAG": uuid.uuid4().hex, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(EXAMPLE), f"--steps={STEPS}", *options]
    finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_example_trains_the_same_plain_and_with_the_kernels():
    plain = run("--dtype=bfloat16")
    ours = run("--dtype=bfloat16", "--register", COC_PARALLEL_NUM="4")
    assert plain.pop("operators") == {}
    for totals in (counts := ours.pop("operators")).values():
        assert totals["calls"] == 2 * STEPS  # forward and backward
        assert totals["chunks"] > totals["calls"]
    assert set(counts) == {"all_gather_matmul", "matmul_reduce_scatter"}
    assert ours == plain  # bit for bit, on two ranks
