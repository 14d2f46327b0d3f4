"""A rank that is killed: the others end and name it, torchrun starts all again, and the losses go on bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch import launch

from ascend_parallel.strategy.watch import PATIENCE, Watch

TRAIN = Path(__file__).parent.parent / "examples" / "strategy" / "train.py"
STRATEGY = """
mode = "data"
[mesh]
dp = 2
[pipeline]
degree = 2
micro_batches = 4
[sharding]
level = 1
"""


def train(folder, *more):
    """Run the example on 4 ranks; return its output and losses as text, by step."""
    (folder / "strategy.toml").write_text(STRATEGY)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
    command += ["--standalone", str(TRAIN), "--strategy", str(folder / "strategy.toml")]
    command += ["--checkpoints", str(folder / "checkpoints"), "--every", "4", *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr, re.findall(r"step (\d+)  loss (\S+)", done.stdout)


def test_training_goes_on_after_a_rank_was_killed(tmp_path):
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    _, expected = train(folders[0], "--steps", "12")
    told, found = train(folders[1], "--steps", "12", "--kill", "2:6")
    assert [int(step) for step, _ in found] == [*range(6), *range(4, 12)]
    assert dict(found) == dict(expected)  # bit for bit: all digits
    assert found[:6] == expected[:6]
    for rank in (0, 1, 3):
        assert re.search(rf"rank 2 stopped in step 6 of the training \(told on rank {rank}\)", told), told


def test_a_beat_that_was_on_its_way_when_a_rank_died_is_no_life():
    watch, begin = object.__new__(Watch), time.monotonic()
    watch._rank, watch._ranks, watch._interval = 1, 3, 0.02

    def count(rank):
        passed = time.monotonic() - begin
        return passed // 0.02 if rank == 0 else int(passed > 0.005)

    watch._count = count
    assert watch.silent() == [2]


WATCHED = """
import os, signal, sys, time, datetime, torch, torch.distributed as dist
from ascend_parallel.strategy.watch import RankLostError, Watch
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank, watch = dist.get_rank(), Watch()
dist.barrier()
"""

WITHOUT_A_DEATH = """
try:
    with watch.naming(3):
        raise RuntimeError("of its own")
except RuntimeError as error:
    print(type(error).__name__, error)
dist.barrier()
before = signal.getsignal(signal.SIGTERM)
watch.stop()
print(before is not signal.SIG_DFL, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
sys.stdout.flush()
os._exit(0)
"""


def test_an_error_without_a_death_stays_what_it_is():
    for rank in launch(WATCHED + WITHOUT_A_DEATH, [{}] * 2, timeout=60):
        assert rank.stdout.splitlines() == ["RuntimeError of its own", "True True"], rank.stderr


TERMINATED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
watch.step = 7
if rank == 2:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(9)
os._exit(0)
"""


def test_a_terminated_rank_says_who_is_gone_whatever_it_waits_for():
    _, _, terminated = launch(WATCHED + TERMINATED, [{}] * 3, timeout=90)
    assert terminated.returncode == 128 + signal.SIGTERM
    assert "ascend_parallel: rank 1 stopped in step 7 of the training (told on rank 2)" in terminated.stderr
    assert PATIENCE >= 8
