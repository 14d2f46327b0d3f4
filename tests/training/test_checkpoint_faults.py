"""Checkpoints interrupted by SIGKILL, damaged on disk, or waiting for ranks that never come."""

import os
import signal
import textwrap
import time

import pytest
import torch
from checkpoints import are_as_in, model_tensors, tensor_shards
from launch import launch
from marks import promise

from ascend_parallel.training.checkpoint import CheckpointError, latest, load, save, steps, whole_state
from ascend_parallel.training.checkpoint import folder as folders

ONE = "one process"


def save_one(path, step, **options):
    return save(path, step=step, model=tensor_shards(model_tensors(), ONE, 0), **options)


def load_one(path, **options):
    model = tensor_shards(model_tensors(), ONE, 0, blank=True)
    step = load(path, model=model, **options).step
    assert are_as_in(model, tensor_shards(model_tensors(), ONE, 0))
    return step


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(target, name, path, **options):
    """Save step 2 in a process that is killed when it calls ``target.name``."""
    child = os.fork()
    if child == 0:
        setattr(target, name, kill)
        save_one(path, 2, **options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@promise("checkpoint-whole")
@pytest.mark.parametrize(
    ("target", "name", "whole"),
    [
        (folders, "prepare", [1]),  # before any write; patched where it is called
        (torch, "save", [1]),  # the first tensor's file is open
        (folders.json, "dump", [1]),  # everything but the manifest is written
        (folders.Path, "rename", [1]),  # everything but the final name
        (folders.shutil, "rmtree", [2]),  # the new checkpoint is complete, the old one half removed
    ],
)
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path, target, name, whole, monkeypatch):
    if name == "prepare":
        target = __import__("ascend_parallel.training.checkpoint.storage", fromlist=["prepare"])
    save_one(tmp_path, 1)
    killed_in(target, name, tmp_path, keep=1)
    assert steps(tmp_path) == whole
    assert load_one(tmp_path) == whole[-1]
    save_one(tmp_path, 3)
    assert load_one(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (*whole, 3)]


def test_a_rank_killed_while_saving_ends_the_others_and_leaves_the_checkpoint_before(ranks, tmp_path):
    begun = time.monotonic()
    done = launch(KILLED.format(path=str(tmp_path)), [{}, {}, {}])
    assert time.monotonic() - begun < 100
    assert done[1].returncode == -signal.SIGKILL
    for rank in 0, 2:
        assert "REFUSED" in done[rank].stdout, done[rank].stderr
    assert steps(tmp_path) == [1]
    assert len(list(tmp_path.glob("step-00000002.*.saving"))) == 1
    assert torch.equal(whole_state(tmp_path)["w"], torch.arange(6.0))
    assert ranks(2).run(continue_on_two, tmp_path) == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


KILLED = textwrap.dedent("""
    import os, signal
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter
    from ascend_parallel.training.checkpoint import save
    from ascend_parallel.sharding.tensor_shard import TensorShard

    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    model = {{"w": TensorShard(torch.arange(6.0)[2 * rank : 2 * rank + 2], (6,), (2 * rank,))}}
    save({path!r}, step=1, model=model)
    if rank == 1:
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        save({path!r}, step=2, model=model, asynchronous=True).wait()
    except RuntimeError as error:
        print("REFUSED", error)
    os._exit(0)
""")


def continue_on_two(group, path):
    from ascend_parallel.sharding.tensor_shard import TensorShard

    model = {"w": TensorShard(torch.zeros(3), (6,), (3 * group.rank(),))}
    step = load(path, model=model).step
    assert torch.equal(model["w"].local, torch.arange(6.0)[3 * group.rank() :][:3])
    save(path, step=2, model=model)
    return step


# Damage


@promise("checkpoint-checksums")
def test_each_damaged_file_is_named_and_nothing_is_filled(tmp_path):
    save_one(tmp_path, 4, values={"position": 7})
    checkpoint = latest(tmp_path)
    files = sorted(checkpoint.iterdir())
    assert [path.name for path in files] == [".metadata", "__0_0.distcp", "manifest.json"]
    for path in files:
        good = path.read_bytes()
        middle = len(good) // 2
        flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
        for damaged in (None, b"", good[:-1], good + b"x", flipped):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            model = tensor_shards(model_tensors(), ONE, 0, blank=True)
            with pytest.raises(CheckpointError) as error:
                load(tmp_path, model=model)
            assert path.name in str(error.value)
            assert are_as_in(model, tensor_shards(model_tensors(), ONE, 0, blank=True))
            path.write_bytes(good)
    assert load_one(tmp_path) == 4


def test_damage_that_one_rank_finds_is_told_by_all(ranks, tmp_path):
    save_one(tmp_path, 4)
    path = latest(tmp_path) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    messages = ranks(3).run(load_damaged, tmp_path)
    assert len(set(messages)) == 1
    assert "__0_0.distcp: its checksum differs" in messages[0]
    assert messages[0].count("rank ") == 1


def load_damaged(group, path):
    with pytest.raises(CheckpointError) as error:
        load(path, model=tensor_shards(model_tensors(), ONE, 0))
    return str(error.value)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder; give the folder"):
        load(tmp_path / "nowhere", model={})
    with pytest.raises(CheckpointError, match="no whole checkpoint; steps: none"):
        load(tmp_path, model={})


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(ranks, tmp_path):
    done = launch(ABSENT.format(path=str(tmp_path)), [{}, {}])
    assert "rank 1 of" in done[0].stdout, done[0].stderr
    assert "has not come to save of a checkpoint within 3 s" in done[0].stdout
    assert steps(tmp_path) == []


ABSENT = textwrap.dedent("""
    import time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from ascend_parallel.training.checkpoint import CheckpointError, save
    from ascend_parallel.training.checkpoint.storage import everybody
    from ascend_parallel.sharding.tensor_shard import TensorShard

    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    everybody()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            save({path!r}, step=1, model={{"w": TensorShard(torch.ones(1), (1,), (0,))}})
        except CheckpointError as error:
            print(error)
        store.set("told", "1")
    else:
        store.wait(["told"], timedelta(seconds=60))
""")
