"""Checkpoints saved under one layout and loaded under another, bit for bit, on real ranks."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import LAYOUTS, are_as_in, model_tensors, optimizer_tensors, pieces, ranks_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ascend_parallel.sharding.pieces import Piece
from ascend_parallel.strategy.checkpoint import (
    CheckpointError,
    latest,
    load,
    pieces_of,
    pieces_of_optimizer,
    save,
    steps,
    whole_state,
)

VALUES = {"data position": 160, "scheduler": {"last_epoch": 4, "_last_lr": [0.1]}, "done": False}


def save_as(group, path, layout, **options):
    model = pieces(model_tensors(), layout, group.rank())
    optimizer = pieces(optimizer_tensors(), layout, group.rank(), optimizer=True)
    return save(path, step=12, model=model, optimizer=optimizer, values=VALUES, **options).wait().name


def load_as(group, path, layout):
    rank = 0 if group is None else group.rank()
    sources = (model_tensors(), False), (optimizer_tensors(), True)
    filled = [pieces(tensors, layout, rank, optimizer=own, blank=True) for tensors, own in sources]
    wanted = [pieces(tensors, layout, rank, optimizer=own) for tensors, own in sources]
    assert not are_as_in(filled[0], wanted[0])
    loaded = load(path, model=filled[0], optimizer=filled[1])
    assert (loaded.step, loaded.values) == (12, VALUES)
    return all(map(are_as_in, filled, wanted))


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
    model, optimizer = pieces(model_tensors(), "one process", 0), pieces(optimizer_tensors(), "one process", 0)
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
    held = {f"layer {number}": Piece(torch.full((65536,), number), (65536,), (0,)) for number in range(8)}
    save(path, step=1, model={name: replace(piece, local=piece.local.int()) for name, piece in held.items()})


@pytest.mark.parametrize("count", [2, 3])
def test_an_asynchronous_save_is_of_the_moment_it_was_called(ranks, tmp_path, count):
    assert all(ranks(count).run(save_and_change, tmp_path))


def save_and_change(group, path):
    rows = torch.full((2, 300_000), float(group.rank()))
    model = {"w": Piece(rows, (2 * group.size(), 300_000), (2 * group.rank(), 0))}
    begun = save(path, step=1, model=model, asynchronous=True)
    for _ in range(3):  # training goes on, with collectives of its own
        rows.add_(100.0)
        dist.all_reduce(rows)
    second = save(path, step=2, model=model, asynchronous=True)  # waits for the first
    assert begun.done()
    changed = rows.clone()
    rows.zero_()
    load(path, model=model, step=1)  # waits for the second
    first = rows.clone()
    load(path, model=model)
    return second.done() and torch.equal(rows, changed) and (first == group.rank()).all().item()


def test_the_error_of_an_asynchronous_save_is_raised_by_wait_and_by_the_next_call(ranks, tmp_path):
    told = ranks(2).run(fail_in_background, tmp_path)
    assert told[0] == told[1]
    by_wait, by_save = told[0]
    assert "rank 1: OSError: the disk is full" in by_wait
    assert by_save.count("the asynchronous save to") == 2
    assert "the disk is full" in by_save
    assert steps(tmp_path) == [5]


def fail_in_background(group, path):
    model = {"w": Piece(torch.ones(1), (2,), (group.rank(),))}
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


def test_pieces_may_be_views_of_any_stride(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    save(tmp_path, step=1, model={"w": Piece(whole.t(), (6, 4), (0, 0)), "half": Piece(whole[:, ::2], (4, 3), (0, 0))})
    wide = torch.zeros(4, 12)
    load(tmp_path, model={"w": Piece(wide[:, :6].t(), (6, 4), (0, 0)), "half": Piece(wide[:, 6::2], (4, 3), (0, 0))})
    assert torch.equal(wide[:, :6], whole)
    assert torch.equal(wide[:, 6::2], whole[:, ::2])
    assert not wide[:, 7::2].any()
    assert (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_size < 30_000


def test_the_last_ones_are_kept(tmp_path):
    model = {"w": Piece(torch.ones(1), (1,), (0,))}
    for step in (1, 2, 9, 10):
        save(tmp_path, step=step, model=model, keep=2)
    assert steps(tmp_path) == [9, 10]
    assert latest(tmp_path) == tmp_path / "step-00000010"
    assert latest(tmp_path / "nowhere") is None
    save(tmp_path, step=11, model=model)
    assert steps(tmp_path) == [9, 10, 11]


# Refusals


def refused(group, path, layout, change):
    """Try to load with something changed; return what was said and whether the pieces were left alone."""
    model = pieces(model_tensors(), layout, group.rank(), blank=True)
    before = {name: replace(piece, local=piece.local.clone()) for name, piece in model.items()}
    options = {}
    if change == "names":
        model["one.wait"] = model.pop("one.weight")
    elif change == "shape on one rank" and group.rank() == 1:
        model["one.weight"] = Piece(torch.zeros(3, 10), (9, 10), (3, 0))
    elif change == "dtype":
        model["two.weight"] = replace(model["two.weight"], local=model["two.weight"].local.float())
    elif change == "box":
        model["one.bias"] = replace(model["one.bias"], offsets=(8,))
    elif change == "step":
        options["step"] = 11
    with pytest.raises(CheckpointError) as error:
        load(path, model=model, **options)
    untouched = {name: piece for name, piece in model.items() if name in before and model[name].local.numel()}
    same = all(torch.equal(piece.local, before[name].local) for name, piece in untouched.items() if change == "names")
    return str(error.value), same


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("names", ["model.one.wait: here, not in the checkpoint"]),
        ("shape on one rank", ["model.one.weight: shape [9, 10] here, [6, 10] in the checkpoint"]),
        ("dtype", ["model.two.weight: float32 here, float64 in the checkpoint"]),
        ("box", ["model.one.bias: [8:18] is no box of a tensor of shape (10,)"]),
        ("step", ["no whole checkpoint of step 11; steps: 12"]),
    ],
)
def test_a_load_that_does_not_fit_is_refused_alike_on_all_ranks(ranks, tmp_path, change, words):
    ranks(2).run(save_as, tmp_path, "replicas on 1 x 2")
    told = ranks(2).run(refused, tmp_path, "replicas on 1 x 2", change)
    assert told[0] == told[1]
    assert told[0][1]
    for word in words:
        assert word in told[0][0]


def test_tensors_that_no_rank_asks_for_are_refused(ranks, tmp_path):
    ranks(2).run(save_as, tmp_path, "replicas on 1 x 2")
    told = ranks(2).run(load_less, tmp_path)
    assert told[0] == told[1]
    assert "model.two.scale: in the checkpoint, not here" in told[0]
    assert "model.one.weight" not in told[0]


def load_less(group, path):
    model = pieces(model_tensors(), "replicas on 1 x 2", group.rank(), blank=True)
    del model["two.scale"]
    if group.rank() == 1:
        del model["one.weight"]  # rank 0 asks for it
    with pytest.raises(CheckpointError) as error:
        load(path, model=model)
    return str(error.value)


def test_more_than_ten_differences_are_counted(tmp_path):
    whole = {f"w{number:02}": Piece(torch.ones(1), (1,), (0,)) for number in range(14)}
    save(tmp_path, step=0, model=whole)
    with pytest.raises(CheckpointError, match=r"w09: in the checkpoint, not here\n  and 4 more"):
        load(tmp_path, model={})


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("step", "step: 1 on rank 0, 2 on rank 1"),
        ("values", "values['lr']: 0.5 on rank 0, 0.25 on rank 1"),
        ("unreadable", "rank 0: values: give numbers, strings, tensors"),
        ("shape", "model.w: shape [4, 1] on rank 1, [4] on a rank before"),
        ("overlap", "model.w"),
        ("hole", "model.w"),
        ("lengths", "model.w: [3] and [4] from [0]"),
        ("nobody", "model.w: no rank gives it"),
        ("keep", "keep=0"),
    ],
)
def test_a_save_that_does_not_fit_is_refused_alike_on_all_ranks(ranks, tmp_path, fault, words):
    told = ranks(2).run(save_wrongly, tmp_path, fault)
    assert told[0] == told[1]
    assert words in told[0]
    assert steps(tmp_path) == []


def save_wrongly(group, path, fault):
    rank = group.rank()
    w, offset = torch.ones(2), (2 * rank,)
    values, shape, options = {"lr": 0.5}, (4,), {"step": 1}
    if fault == "step":
        options["step"] = 1 + rank
    elif fault == "values":
        values["lr"] = 0.5 / (1 + rank)
    elif fault == "unreadable":
        values["lr"] = random.Random(3)
    elif fault == "shape" and rank == 1:
        w, shape, offset = torch.ones(2, 1), (4, 1), (2, 0)
    elif fault == "overlap":
        w, offset = torch.ones(3), (rank,)
    elif fault == "hole":
        w = torch.ones(1)
    elif fault == "lengths":
        w, offset = torch.ones(3 + rank), (0,)
    elif fault == "nobody":
        w = torch.ones(0)
    elif fault == "keep":
        options["keep"] = 0
    with pytest.raises(CheckpointError) as error:
        save(path, model={"w": Piece(w, shape, offset)}, values=values, **options)
    return str(error.value)


def test_a_step_is_not_saved_over(tmp_path):
    model = {"w": Piece(torch.ones(1), (1,), (0,))}
    save(tmp_path, step=3, model=model)
    with pytest.raises(CheckpointError, match="step-00000003 is there already: remove it, or save to another folder"):
        save(tmp_path, step=3, model=model)


# Random states


def test_random_states_are_each_ranks_own_or_the_first_ones(ranks, tmp_path):
    drawn = ranks(2).run(draw_after_saving, tmp_path)
    assert drawn[0] != drawn[1]
    assert ranks(2).run(draw_after_loading, tmp_path) == drawn
    assert ranks(3).run(draw_after_loading, tmp_path) == [drawn[0]] * 3


def _draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), torch.randn(2).tolist()


def draw_after_saving(group, path):
    for seed in torch.manual_seed, random.seed, np.random.seed:
        seed(100 + group.rank())
    _draw()
    save(path, step=1, model={"w": Piece(torch.ones(1), (1,), (0,))})
    return _draw()


def draw_after_loading(group, path):
    torch.manual_seed(0)
    load(path, model={"w": Piece(torch.ones(1), (1,), (0,))})
    return _draw()


# Models of torch


class Small(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, width, dtype=torch.float64)
        self.second = torch.nn.Linear(width, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.tensor(4))

    def forward(self, x):
        return self.second(torch.nn.functional.dropout(self.first(x).tanh(), 0.2, self.training))


def train(module, optimizer, count, start):
    losses = []
    for step in range(start, start + count):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    return losses


def test_training_goes_on_bit_for_bit(tmp_path):
    module = Small()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    train(module, optimizer, 6, 0)
    save(tmp_path, step=6, model=pieces_of(module), optimizer=pieces_of_optimizer(module, optimizer))
    wanted = train(module, optimizer, 10, 6)
    again = Small()
    fresh = torch.optim.AdamW(again.parameters(), lr=0.02)
    step = load(tmp_path, model=pieces_of(again), optimizer=pieces_of_optimizer(again, fresh)).step
    assert train(again, fresh, 10, step) == wanted
    assert torch.equal(again.first.weight, module.first.weight)


def test_fully_sharded_training_goes_on_in_one_process_and_on_other_ranks(ranks, tmp_path):
    module = Small().eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    train(module, optimizer, 6, 0)
    wanted = train(module, optimizer, 10, 6)
    ranks(3).run(train_sharded, tmp_path, 0, None)  # 8 rows on 3 ranks: 3, 3, 2
    for losses in ranks(2).run(train_sharded, tmp_path, 10, "fsdp") + ranks(4).run(train_sharded, tmp_path, 10, "2d"):
        torch.testing.assert_close(losses, wanted, rtol=1e-11, atol=0)
    again = Small().eval()
    fresh = torch.optim.AdamW(again.parameters(), lr=0.02)
    load(tmp_path, model=pieces_of(again), optimizer=pieces_of_optimizer(again, fresh))
    torch.testing.assert_close(train(again, fresh, 10, 6), wanted, rtol=1e-11, atol=0)


def train_sharded(group, path, count, load_as):
    module = Small().eval()
    if load_as == "2d":  # fully_shard over tensor parallel: strided shards
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (group.size(),)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    if load_as is None:
        train(module, optimizer, 6, 0)
        save(path, step=6, model=pieces_of(module), optimizer=pieces_of_optimizer(module, optimizer))
        return None
    load(path, model=pieces_of(module), optimizer=pieces_of_optimizer(module, optimizer))
    return train(module, optimizer, count, 6)


def test_stages_on_meshes_of_their_own(ranks, tmp_path):
    assert ranks(3).run(save_stages, tmp_path) == [["one"], ["one", "two"], ["two"]]
    found = whole_state(tmp_path)
    assert torch.equal(found["one"], torch.arange(10.0).view(5, 2))
    assert torch.equal(found["two"], -torch.arange(10.0).view(5, 2))


def save_stages(group, path):
    module = torch.nn.Module()
    for name, place, sign in ("one", [0, 1], 1), ("two", [1, 2], -1):
        mesh = DeviceMesh("cpu", place)
        part = distribute_tensor(sign * torch.arange(10.0).view(5, 2), mesh, [Shard(0)], src_data_rank=None)
        module.register_buffer(name, part)
    held = pieces_of(module)
    save(path, step=1, model=held)
    return list(held)


def test_what_is_no_box_is_refused_by_name(ranks):
    for told in ranks(2).run(refuse_partial):
        assert "w is placed as" in told


def refuse_partial(group):
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    module = torch.nn.Module()
    distribute_module(module, mesh)
    module.register_buffer("w", whole.sum(0))
    assert pieces_of(torch.nn.Linear(2, 2)).keys() == {"weight", "bias"}
    assert distribute_tensor(torch.ones(2), mesh, [Replicate()]).to_local().shape == (2,)
    with pytest.raises(ValueError, match="redistribute it first") as error:
        pieces_of(module)
    return str(error.value)
