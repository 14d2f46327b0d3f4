"""COC_PARALLEL_NUM=auto on emulated NPUs: what it times, and what runs where it cuts nothing.

Times are those of the emulation's host. Tests ask what is measured and what the decision is, not how fast.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from programs import counted, gpt


def every_cut_loses(layer, operator, candidates, rounds):
    """Stand in for the clock's last word: the machine's other work must not decide."""
    return {sizes: [float(len(sizes))] * rounds for sizes in candidates}


def each_step(number, sequence):
    """Train; return losses and gradients, the operators of each step, what was timed by events, and what ran ours."""
    import ascend_parallel
    from ascend_parallel.patches.tuned import all_kept_whole
    from ascend_parallel.tuning.measured import decider, pass_times

    decider.CHUNKS.clear()
    ascend_parallel.ops.COUNTS.clear()
    numbers, elapsed, own = [], torch.npu.Event.elapsed_time, []

    def run_step(step):
        result, asked = counted(step)
        numbers.append(asked)
        return result

    def timed(first, last):
        own.append(elapsed(first, last))
        return own[-1]

    with (
        patch.object(torch.npu.Event, "elapsed_time", timed),
        patch.object(pass_times.TimedLinear, "time_sizes", every_cut_loses),
    ):
        results, covered = gpt({"num_chunks": number}, sequence=sequence, steps=3, run_step=run_step)
    whole, ours = all_kept_whole(ascend_parallel.Settings(auto=True)), ascend_parallel.ops.COUNTS.as_dict()
    ascend_parallel.configure(num_chunks=1)
    return results, numbers, own, whole, ours, covered


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_that_auto_leaves_whole_are_megatrons_own(ranks, tmp_path, sequence):
    """After the first step the run asks the device for what the plain run does, and no layer of this package runs."""
    pool = ranks(XDG_CACHE_HOME=str(tmp_path))
    plain, auto = (pool.run(each_step, number, sequence) for number in (1, "auto"))
    for (theirs, theirs_asked, *_), (ours, asked, timed, whole, counts, covered) in zip(plain, auto, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert timed and min(timed) >= 0
        assert whole is not None and whole.endswith("nothing is lost"), whole
        assert not counts
        assert "9 of 9" in covered, covered
        assert asked[1:] == theirs_asked[1:]
        assert asked[0] != theirs_asked[0]


STEPS = 104  # more than the turns of whole steps, with all finals


def each_way(number, sequence):
    """Train; return the losses and gradients, and the way of each step."""
    import ascend_parallel
    from ascend_parallel.ops import registry

    ways = []

    def run_step(step):
        from megatron.core.tensor_parallel import RowParallelLinear

        result, megatron = step(), vars(RowParallelLinear.forward).get("ascend_parallel")
        ways.append(None if megatron is None else [each.way for each in megatron.decider.groups.values()])
        return result

    with (
        patch.object(pass_times_of().TimedLinear, "time_sizes", every_cut_loses),
        patch.object(registry, "fills", lambda *_: True),  # so small matmuls leave units of an NPU without work
    ):
        results, _ = gpt({"num_chunks": number}, sequence=sequence, steps=STEPS, run_step=run_step)
    ascend_parallel.configure(num_chunks=1)
    return results, ways


def pass_times_of():
    from ascend_parallel.tuning.measured import pass_times

    return pass_times


def test_whole_steps_run_in_turn_with_plains_bits_on_all_ranks_alike(ranks, tmp_path):
    pool = ranks(XDG_CACHE_HOME=str(tmp_path))
    plain, auto = (pool.run(each_way, number, True) for number in (1, "auto"))
    for (theirs, _), (ours, ways) in zip(plain, auto, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert ways == auto[0][1]
        assert {way for (way,) in ways} == {0, 1, 2, 4}
        assert ways[-1] == ways[-4]


MODEL = Path(__file__).parent / "auto_steps.py"


@pytest.mark.slow
def test_by_the_virtual_clock_layers_stay_whole_where_the_device_waits_for_the_host(tmp_path):
    """A host eight times as slow as this machine's: its other work must not decide."""
    words = ["run", "--clock", "--device", "half-H100", "--host", "8", "--ranks", "2", str(MODEL), "512"]
    environment = {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "emulated_ascend", *words], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[1], [1]], done.stdout
    said = [line for line in done.stderr.splitlines() if "whole steps" in line]
    assert len(said) == 1 and "the device waits for the host" in said[0], done.stderr[-3000:]
