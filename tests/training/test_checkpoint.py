"""Checkpoints saved under one layout and loaded under another, bit for bit, on real ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from checkpoints import LAYOUTS, are_as_in, model_tensors, optimizer_tensors, ranks_of, tensor_shards
from pool import on_ranks

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint import (
    CheckpointError,
    latest,
    load,
    save,
    steps,
    whole_state,
)

VALUES = {"data position": 160, "scheduler": {"last_epoch": 4, "_last_lr": [0.1]}, "done": False}


def save_as(group, path, layout, **options):
    model = tensor_shards(model_tensors(), layout, group.rank())
    optimizer = tensor_shards(optimizer_tensors(), layout, group.rank(), optimizer=True)
    return save(path, step=12, model=model, optimizer=optimizer, values=VALUES, **options).wait().name


def load_as(group, path, layout):
    rank = 0 if group is None else group.rank()
    sources = (model_tensors(), False), (optimizer_tensors(), True)
    filled = [tensor_shards(tensors, layout, rank, optimizer=own, blank=True) for tensors, own in sources]
    expected = [tensor_shards(tensors, layout, rank, optimizer=own) for tensors, own in sources]
    assert not are_as_in(filled[0], expected[0])
    loaded = load(path, model=filled[0], optimizer=filled[1])
    assert (loaded.step, loaded.values) == (12, VALUES)
    return all(map(are_as_in, filled, expected))


@pytest.mark.sample(1)
@pytest.mark.parametrize("saved", [layout for layout in LAYOUTS if ranks_of(layout) > 1])
def test_a_checkpoint_loads_under_every_other_layout(ranks, tmp_path, saved):
    names = ranks(ranks_of(saved)).run(save_as, tmp_path, saved)
    assert names == ["step-00000012"] * ranks_of(saved)
    for layout in LAYOUTS:
        if ranks_of(layout) == 1:
            assert load_as(None, tmp_path, layout)
        else:
            assert all(ranks(ranks_of(layout)).run(load_as, tmp_path, layout)), layout


def test_one_process_saves_for_many(ranks, tmp_path):
    model, optimizer = (
        tensor_shards(model_tensors(), "one process", 0),
        tensor_shards(optimizer_tensors(), "one process", 0),
    )
    save(tmp_path, step=12, model=model, optimizer=optimizer, values=VALUES)
    assert all(ranks(4).run(load_as, tmp_path, "two stages on 2 x 2"))
    for space, tensors in ("model", model_tensors()), ("optimizer", optimizer_tensors()):
        found = whole_state(tmp_path, space=space)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_replica_is_written_once_and_the_work_is_spread(ranks, tmp_path):
    ranks(4).run(save_copies, tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step-00000001").glob("*.distcp"))]
    assert len(sizes) == 4
    assert sum(sizes) < 1.2 * 8 * 4 * 65536
    assert max(sizes) < 1.2 * min(sizes)


def save_copies(group, path):
    held = {f"layer {number}": TensorShard(torch.full((65536,), number), (65536,), (0,)) for number in range(8)}
    save(path, step=1, model={name: replace(shard, local=shard.local.int()) for name, shard in held.items()})


@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_an_asynchronous_save_is_of_the_moment_it_was_called(group, tmp_path):
    rows = torch.full((2, 300_000), float(group.rank()))
    model = {"w": TensorShard(rows, (2 * group.size(), 300_000), (2 * group.rank(), 0))}
    begun = save(tmp_path, step=1, model=model, asynchronous=True)
    for _ in range(3):  # training goes on, with collectives of its own
        rows.add_(100.0)
        dist.all_reduce(rows)
    second = save(tmp_path, step=2, model=model, asynchronous=True)  # waits for the first
    assert begun.done()
    changed = rows.clone()
    rows.zero_()
    load(tmp_path, model=model, step=1)  # waits for the second
    first = rows.clone()
    load(tmp_path, model=model)
    assert second.done() and torch.equal(rows, changed) and (first == group.rank()).all()


def test_the_error_of_an_asynchronous_save_is_raised_by_wait_and_by_the_next_call(ranks, tmp_path):
    messages = ranks(2).run(fail_in_background, tmp_path)
    assert messages[0] == messages[1]
    by_wait, by_save = messages[0]
    assert "rank 1: OSError: the disk is full" in by_wait
    assert by_save.count("the asynchronous save to") == 2
    assert "the disk is full" in by_save
    assert steps(tmp_path) == [5]


def fail_in_background(group, path):
    model = {"w": TensorShard(torch.ones(1), (2,), (group.rank(),))}
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 1:
            patch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", _disk_full)
        with pytest.raises(CheckpointError) as by_wait:
            save(path, step=3, model=model, asynchronous=True).wait()
        save(path, step=4, model=model, asynchronous=True)
        with pytest.raises(CheckpointError) as by_save:
            save(path, step=5, model=model)
    save(path, step=5, model=model)
    return str(by_wait.value), str(by_save.value)


def _disk_full(*_):
    raise OSError("the disk is full")


def test_shards_may_be_views_of_any_stride(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    save(
        tmp_path,
        step=1,
        model={"w": TensorShard(whole.t(), (6, 4), (0, 0)), "half": TensorShard(whole[:, ::2], (4, 3), (0, 0))},
    )
    wide = torch.zeros(4, 12)
    load(
        tmp_path,
        model={"w": TensorShard(wide[:, :6].t(), (6, 4), (0, 0)), "half": TensorShard(wide[:, 6::2], (4, 3), (0, 0))},
    )
    assert torch.equal(wide[:, :6], whole)
    assert torch.equal(wide[:, 6::2], whole[:, ::2])
    assert not wide[:, 7::2].any()
    assert (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_size < 30_000


def test_the_last_ones_are_kept(tmp_path):
    model = {"w": TensorShard(torch.ones(1), (1,), (0,))}
    for step in (1, 2, 9, 10):
        save(tmp_path, step=step, model=model, keep=2)
    assert steps(tmp_path) == [9, 10]
    assert latest(tmp_path) == tmp_path / "step-00000010"
    assert latest(tmp_path / "nowhere") is None
    save(tmp_path, step=11, model=model)
    assert steps(tmp_path) == [9, 10, 11]
