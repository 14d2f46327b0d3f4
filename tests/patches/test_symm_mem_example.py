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


def run(ranks, *options, **variables):
    """Return what the example prints; it compiles anew, whatever earlier runs left in torch's caches."""
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    environ = {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    environ["TORCH_COMPILE_CACHE_KEY_TAG"] = uuid.uuid4().hex
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(EXAMPLE), f"--steps={STEPS}", *options]
    finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "dtype"), [(2, "bfloat16"), (3, "float32")])
def test_the_example_trains_the_same_plain_and_with_the_kernels(count, dtype):
    plain = run(count, f"--dtype={dtype}")
    ours = run(count, "--register", f"--dtype={dtype}", COC_PARALLEL_NUM="4")
    assert plain.pop("operators") == {}
    for totals in (counts := ours.pop("operators")).values():
        assert totals["calls"] == 2 * STEPS  # forward and backward
        assert totals["chunks"] > totals["calls"]
    assert set(counts) == {"all_gather_matmul", "matmul_reduce_scatter"}
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["squared gradients"] == pytest.approx(plain["squared gradients"], rel=1e-6)
    if count == 2:
        assert ours == plain
