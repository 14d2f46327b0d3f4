"""examples/policy_gradient: the ratio is exactly 1 in the first epoch of every step, and all hold the same weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT, environment

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "policy_gradient" / "loop.py"
EXACT = "exactly 1, then"
# A hand-over that leaves the server with keys of the policy before.
FORGOTTEN = f"""
import sys
sys.path.insert(0, {str(LOOP.parent)!r})
import loop
loop.LLM.reset_prefix_cache = lambda llm: None
loop.main()
"""


def steps(script, *options, **variables):
    """Run the loop on two ranks; return a line of each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = environment(**variables)
    ended = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "leaked" not in ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.promise("invariant-loop")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_exactly_one_and_the_weights_are_equal(dtype):
    found = steps(LOOP, "--steps", "3", "--dtype", dtype, COC_DETERMINISTIC="invariant", COC_PARALLEL_NUM=4)
    assert len(found) == 3
    for line in found:
        assert line.count(EXACT) == 2, line
        assert line.endswith("weights of all three equal")
        after = re.findall(r"then ([\d.]+) to ([\d.]+)", line)
        assert after[0] == after[1]  # both trainers took the same step
        assert float(after[0][0]) < 0.9 < 1.1 < float(after[0][1])


@pytest.mark.slow
def test_without_the_variable_and_with_keys_of_the_policy_before_it_is_not(tmp_path):
    """The comparison above can fail."""
    (line,) = steps(LOOP, "--steps", "1")
    assert EXACT not in line
    script = tmp_path / "forgotten.py"
    script.write_text(FORGOTTEN)
    first, second = steps(script, "--steps", "2", COC_DETERMINISTIC="invariant")
    assert first.count(EXACT) == 2
    assert EXACT not in second
