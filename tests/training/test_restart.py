"""A rank is killed: the others end and name it, torchrun restarts all, and the losses continue bit for bit."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
import train as example
from launch import forked_python, launch
from marks import promise

from ascend_parallel.training import rank_watch
from ascend_parallel.training.rank_watch import PATIENCE, Heartbeats, RankWatch

STRATEGY = """
mode = "data"
[mesh]
dp = 2
[pipeline]
degree = 2
micro_batches = 4
[sharding]
zero_stage = 1
"""


def words_of(folder, *more):
    """Write the strategy; return the words of the example's command line."""
    (folder / "strategy.toml").write_text(STRATEGY)
    words = [example.__file__, "--strategy", str(folder / "strategy.toml"), "--checkpoints", str(folder / "saved")]
    return [*words, "--every", "4", "--steps", "12", *more]


def losses_in(text):
    """Return step and loss of each line, as text."""
    return re.findall(r"step (\d+)  loss (\S+)", text)


def trained_here(_group, words):
    """Run the example on this rank; return the losses that it prints, on rank 0."""
    with patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main()
    return losses_in(printed.getvalue())


def restarted(words):
    """Run the example on 4 ranks under torchrun; return what it says on stderr, and the losses."""
    command = [forked_python(), "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
    command += ["--standalone", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr, losses_in(done.stdout)


@promise("training-dead-rank")
@pytest.mark.slow
def test_training_goes_on_after_a_rank_was_killed(ranks, tmp_path):
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    expected, *_ = ranks(4).run(trained_here, words_of(folders[0]))
    output, found = restarted(words_of(folders[1], "--kill", "2:6"))
    assert [int(step) for step, _ in found] == [*range(6), *range(4, 12)]
    assert dict(found) == dict(expected)  # bit for bit: all digits
    assert found[:6] == expected[:6]
    for rank in (0, 1, 3):
        assert re.search(rf"rank 2 stopped in step 6 of the training \(reported by rank {rank}\)", output), output


def test_a_beat_that_was_on_its_way_when_a_rank_died_is_no_life():
    store = dist.PrefixStore("job", dist.HashStore())
    heartbeats = [Heartbeats(store, rank, 3, 0.05) for rank in range(3)]
    ended = threading.Event()

    def beating():
        while not ended.wait(0.02):
            heartbeats[0].beat()

    threads = [threading.Thread(target=beating), threading.Timer(0.01, heartbeats[2].beat)]
    for thread in threads:
        thread.start()
    found = heartbeats[1].stopped()
    ended.set()
    for thread in threads:
        thread.join()
    assert found == {2: 1} == heartbeats[0].reported()
    heartbeats[2].beat()
    assert not heartbeats[0].reported()


WATCHED = """
import os, select, signal, sys, time, datetime, torch, torch.distributed as dist
from ascend_parallel.training.rank_watch import RankLostError, RankWatch
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank, watch = dist.get_rank(), RankWatch(interval=0.1)
store = dist.distributed_c10d._get_default_store()
store.set(f"process/{rank}", str(os.getpid()))
dist.barrier()
"""

WITHOUT_A_DEATH = """
try:
    with watch.name_lost_ranks(3):
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
    sys.stderr = None  # as torch's hook for uncaught errors takes it for a while
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()
select.select([os.pidfd_open(int(store.get("process/2")))], [], [], 60)  # the store's host leaves last
os._exit(0)
"""


@pytest.mark.slow
def test_a_terminated_rank_says_who_is_gone_whatever_it_waits_for():
    _, _, terminated = launch(WATCHED + TERMINATED, [{}] * 3, timeout=90)
    assert terminated.returncode == 128 + signal.SIGTERM
    assert "ascend_parallel: rank 1 stopped in step 7 of the training (reported by rank 2)" in terminated.stderr
    assert PATIENCE >= 8


FIRST_TO_LEAVE = """
others = [int(store.get(f"process/{other}")) for other in range(4) if other not in (rank, 2)]
dist.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with watch.name_lost_ranks(5):
        if rank == 1:
            raise RuntimeError("the connection was closed")
        signal.pause()  # until a launcher ends it
except RankLostError as error:
    print(error, flush=True)
    for other in others:  # like a launcher that ends all ranks as soon as any rank has ended
        os.kill(other, signal.SIGKILL)
    os._exit(1)
"""


@promise("training-dead-rank")
@pytest.mark.slow
def test_no_survivor_leaves_before_all_have_said_who_died():
    zero, first, _, three = launch(WATCHED + FIRST_TO_LEAVE, [{}] * 4, timeout=90)
    assert first.stdout == "rank 2 stopped in step 5 of the training (reported by rank 1)\n"
    for rank, survivor in ((0, zero), (3, three)):
        assert survivor.returncode == -signal.SIGKILL
        assert f"rank 2 stopped in step 5 of the training (reported by rank {rank})" in survivor.stderr


HOST_DIES = """
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
with watch.name_lost_ranks(5):
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_every_survivor_says_so_if_the_host_of_the_store_died():
    _, *survivors = launch(WATCHED + HOST_DIES, [{}] * 3, timeout=90)
    for rank, survivor in enumerate(survivors, 1):
        assert f"RankLostError: rank 0 stopped in step 5 of the training (reported by rank {rank})" in survivor.stderr


class StandingStore:
    """A store whose host was stopped by a debugger or a full memory: a call does not come back."""

    def clone(self):
        return self

    def __getattr__(self, _):
        return lambda *_: time.sleep(60)


def test_a_watch_ends_although_the_host_of_the_store_stands_still():
    job = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2, group=SimpleNamespace(WORLD="everybody"))
    stores = SimpleNamespace(_get_process_group_store=lambda _: StandingStore())
    with patch.multiple(rank_watch, dist=job, c10d=stores, _warn_of_restarts=lambda _: None):
        watch = RankWatch(interval=0.01)
    time.sleep(0.1)  # the thread is in its call
    begin = time.monotonic()
    watch.stop()
    assert time.monotonic() - begin < 10
