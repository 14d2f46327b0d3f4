"""examples/frameworks/compiled_tp.py with torchrun, with the kernels; test_symm_mem_compile.py has the bits."""

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
def test_the_example_trains_with_the_kernels():
    ours = run("--dtype=bfloat16", "--register", COC_PARALLEL_NUM="4")
    for totals in (counts := ours["operators"]).values():
        assert totals["calls"] == 2 * STEPS  # forward and backward
        assert totals["chunks"] > totals["calls"]
    assert set(counts) == {"all_gather_matmul", "matmul_reduce_scatter"}
    first, *_, last = ours["losses"]
    assert last < first and ours["squared gradients"] > 0
