"""Two jobs save the same step into one folder: one job's save is complete, and the other job gets an error."""

import os
import signal
import socket
import subprocess
import textwrap
import time

import pytest
import torch
from launch import forked_python
from marks import promise

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint import CheckpointError, CheckpointReader, load, lock, save, steps, whole_state
from ascend_parallel.training.checkpoint.folder import prepare

ROWS = 3000

# A job of two ranks that saves a step in each folder read from standard input, and prints each result.
JOB = textwrap.dedent("""
    import sys
    import torch, torch.distributed as dist
    from ascend_parallel.training.checkpoint import CheckpointError, save
    from ascend_parallel.sharding.tensor_shard import TensorShard

    store, rank, seed, rows, asynchronous = sys.argv[1], *map(int, sys.argv[2:])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(seed)
    whole = {name: torch.randn(2 * rows, 8) for name in ("a", "b", "c")}
    parts = {name: w[rank * rows :][:rows].clone() for name, w in whole.items()}
    model = {name: TensorShard(part, (2 * rows, 8), (rank * rows, 0)) for name, part in parts.items()}
    print("ready", flush=True)
    for path in sys.stdin:
        try:
            save(path.strip(), step=7, model=model, values={"seed": seed}, asynchronous=asynchronous).wait()
            print("saved", flush=True)
        except CheckpointError as error:
            print("refused", repr(str(error)), flush=True)
""")


class Job:
    """Two processes that read the next folder from their standard input."""

    def __init__(self, store, seed, asynchronous):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [
            subprocess.Popen(
                [forked_python(), "-c", JOB, *map(str, (store, rank, seed, ROWS, int(asynchronous)))], **pipes
            )
            for rank in range(2)
        ]

    def tell(self, path):
        for rank in self.ranks:
            rank.stdin.write(f"{path}\n")
            rank.stdin.flush()

    def answers(self):
        return [rank.stdout.readline().strip() for rank in self.ranks]

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def truth(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(2 * ROWS, 8) for name in ("a", "b", "c")}


def race(folder, rounds, asynchronous):
    """Let two jobs race in new folders; return how often each won."""
    jobs = {seed: Job(folder / f"store {seed}", seed, asynchronous) for seed in (11, 22)}
    won = dict.fromkeys(jobs, 0)
    try:
        assert [job.answers() for job in jobs.values()] == [["ready"] * 2] * 2
        for number in range(rounds):
            path = folder / str(number)
            for seed in sorted(jobs, reverse=number % 2 == 1):
                jobs[seed].tell(path)
            answers = {seed: job.answers() for seed, job in jobs.items()}
            winners = [seed for seed, answer in answers.items() if answer == ["saved", "saved"]]
            assert len(winners) == 1, answers
            (loser,) = (answer for seed, answer in answers.items() if seed != winners[0])
            assert loser[0] == loser[1]
            assert "is being saved by another job, process" in loser[0] or "is there already" in loser[0]
            won[winners[0]] += 1
            assert [file.name for file in path.iterdir()] == ["step-00000007"]
            found, expected = whole_state(path), truth(winners[0])
            assert CheckpointReader.open(path).values == {"seed": winners[0]}
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    finally:
        for job in jobs.values():
            job.end()
    return won


@promise("checkpoint-whole")
@pytest.mark.slow
def test_two_jobs_that_save_one_step_leave_the_checkpoint_of_one(tmp_path):
    race(tmp_path, 10, asynchronous=False)


@promise("checkpoint-whole")
@pytest.mark.stress
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_races_are_each_won_by_one(tmp_path, asynchronous):
    assert all(race(tmp_path, 150, asynchronous).values())


# The lock


MODEL = {"w": TensorShard(torch.arange(6.0), (6,), (0,))}


def owned(path, **changes):
    """Leave the lock of a job on another host, or of an ended job."""
    made = lock.StepLock(path, "0123abcd")
    made.acquire()
    owner = lock.owner_of(lock.read(path))
    made.release()
    answer = lock.json.dumps({**lock.asdict(owner), **changes}) + "\n"
    path.write_text(answer)


def test_a_lock_is_held_by_one_and_says_by_whom(tmp_path):
    held = prepare(tmp_path, 5, "aa")
    with pytest.raises(
        CheckpointError, match=rf"step-00000005 is being .* process {os.getpid()} of {socket.gethostname()}"
    ):
        save(tmp_path, step=5, model=MODEL)
    save(tmp_path, step=6, model=MODEL)
    held.release()
    save(tmp_path, step=5, model=MODEL)
    assert steps(tmp_path) == [5, 6]


def test_the_lock_of_a_process_that_was_killed_is_taken_at_once(tmp_path):
    child = os.fork()
    if child == 0:
        prepare(tmp_path, 5, "bb")
        (tmp_path / "step-00000005.bb.saving").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    begun = time.monotonic()
    save(tmp_path, step=5, model=MODEL)
    assert time.monotonic() - begun < lock.STILL / 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_pid_that_is_used_again_is_another_process(tmp_path):
    owned(tmp_path / "step-00000005.lock", started=1)
    save(tmp_path, step=5, model=MODEL)
    assert steps(tmp_path) == [5]


@pytest.mark.sample(1)
@pytest.mark.parametrize("answer", [None, "", "{", '{"token": 1}\n'])
def test_a_lock_of_another_host_is_taken_once_it_stands_still(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(lock, "STILL", 1.5)
    path = tmp_path / "step-00000005.lock"
    path.write_text(answer) if answer is not None else owned(path, place="elsewhere", host="elsewhere")
    save(tmp_path, step=5, model=MODEL)
    assert steps(tmp_path) == [5]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_lock_of_another_host_that_beats_is_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.2)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    held = prepare(tmp_path, 5, "cc")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is being saved by another job"):
        save(tmp_path, step=5, model=MODEL)
    held.release()


def test_directories_of_saves_under_way_are_left_and_all_others_removed(tmp_path):
    held = prepare(tmp_path, 5, "dd")
    for name in (
        "step-00000005.dd.saving",
        "step-00000005.ee.saving",
        "step-00000004.saving",
        "step-00000003.ff.removing",
    ):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "step-00000009.lock").write_text("{}")
    save(tmp_path, step=6, model=MODEL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000005.dd.saving",
        "step-00000005.lock",
        "step-00000006",
        "step-00000009.lock",  # of another host, as far as is known
    ]
    held.release()


def test_a_save_whose_lock_was_taken_cannot_overwrite_the_others(tmp_path, monkeypatch):
    """Two savers that both believe to hold the lock: the result is entirely one saver's."""
    from ascend_parallel.training.checkpoint import storage

    real, ones = storage.complete, {"w": TensorShard(torch.ones(6), (6,), (0,))}

    def late(*arguments):
        monkeypatch.undo()
        (tmp_path / "step-00000005.lock").unlink()
        save(tmp_path, step=5, model=ones)
        real(*arguments)

    monkeypatch.setattr(storage, "complete", late)
    with pytest.raises(CheckpointError, match=r"not a file system that all ranks share|by another job meanwhile"):
        save(tmp_path, step=5, model=MODEL)
    filled = {"w": TensorShard(torch.zeros(6), (6,), (0,))}
    load(tmp_path, model=filled)
    assert torch.equal(filled["w"].local, torch.ones(6))


@promise("checkpoint-checksums")
def test_checksums_are_of_what_was_written_not_of_what_is_read_back(tmp_path, monkeypatch):
    """A disk that returns other bytes than were written: the load fails."""
    from ascend_parallel.training.checkpoint import storage

    real = storage.complete

    def corrupted(saving, *arguments):
        file = saving / "__0_0.distcp"
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        real(saving, *arguments)

    monkeypatch.setattr(storage, "complete", corrupted)
    save(tmp_path, step=5, model=MODEL)
    with pytest.raises(CheckpointError, match="its checksum differs from the manifest's"):
        load(tmp_path, model=MODEL)
