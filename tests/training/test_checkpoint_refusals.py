"""Impossible saves and loads are refused on all ranks, with the same list of differences."""

import random
from dataclasses import replace

import pytest
import torch
from checkpoints import model_tensors, tensor_shards
from pool import on_ranks
from test_checkpoint import save_as
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint import (
    CheckpointError,
    load,
    save,
    steps,
    tensor_shards_of,
)


def refused(group, path, layout, change):
    """Load with a change; return the error and whether the shards stayed unchanged."""
    model = tensor_shards(model_tensors(), layout, group.rank(), blank=True)
    before = {name: replace(shard, local=shard.local.clone()) for name, shard in model.items()}
    options = {}
    if change == "names":
        model["one.wait"] = model.pop("one.weight")
    elif change == "shape on one rank" and group.rank() == 1:
        model["one.weight"] = TensorShard(torch.zeros(3, 10), (9, 10), (3, 0))
    elif change == "dtype":
        model["two.weight"] = replace(model["two.weight"], local=model["two.weight"].local.float())
    elif change == "box":
        model["one.bias"] = replace(model["one.bias"], offsets=(8,))
    elif change == "step":
        options["step"] = 11
    with pytest.raises(CheckpointError) as error:
        load(path, model=model, **options)
    untouched = {name: shard for name, shard in model.items() if name in before and model[name].local.numel()}
    same = all(torch.equal(shard.local, before[name].local) for name, shard in untouched.items() if change == "names")
    return str(error.value), same


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("names", ["model.one.wait: here, not in the checkpoint"]),
        ("shape on one rank", ["model.one.weight: shape [9, 10] here, [6, 10] in the checkpoint"]),
        ("dtype", ["model.two.weight: float32 here, float64 in the checkpoint"]),
        ("box", ["model.one.bias: [8:18] is no shard of a tensor of shape (10,)"]),
        ("step", ["no whole checkpoint of step 11; steps: 12"]),
    ],
)
def test_a_load_that_does_not_fit_is_refused_alike_on_all_ranks(ranks, tmp_path, change, words):
    ranks(2).run(save_as, tmp_path, "replicas on 1 x 2")
    results = ranks(2).run(refused, tmp_path, "replicas on 1 x 2", change)
    assert results[0] == results[1]
    assert results[0][1]
    for word in words:
        assert word in results[0][0]


def test_tensors_that_no_rank_asks_for_are_refused(ranks, tmp_path):
    ranks(2).run(save_as, tmp_path, "replicas on 1 x 2")
    results = ranks(2).run(load_less, tmp_path)
    assert results[0] == results[1]
    assert "model.two.scale: in the checkpoint, not here" in results[0]
    assert "model.one.weight" not in results[0]


def load_less(group, path):
    model = tensor_shards(model_tensors(), "replicas on 1 x 2", group.rank(), blank=True)
    del model["two.scale"]
    if group.rank() == 1:
        del model["one.weight"]  # rank 0 asks for it
    with pytest.raises(CheckpointError) as error:
        load(path, model=model)
    return str(error.value)


def test_more_than_ten_differences_are_counted(tmp_path):
    whole = {f"w{number:02}": TensorShard(torch.ones(1), (1,), (0,)) for number in range(14)}
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
    results = ranks(2).run(save_wrongly, tmp_path, fault)
    assert results[0] == results[1]
    assert words in results[0]
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
        save(path, model={"w": TensorShard(w, shape, offset)}, values=values, **options)
    return str(error.value)


def test_a_step_is_not_saved_over(tmp_path):
    model = {"w": TensorShard(torch.ones(1), (1,), (0,))}
    save(tmp_path, step=3, model=model)
    with pytest.raises(CheckpointError, match="step-00000003 is there already: remove it, or save to another folder"):
        save(tmp_path, step=3, model=model)


@on_ranks(2)
def test_what_is_no_box_is_refused_by_name(group):
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    module = torch.nn.Module()
    distribute_module(module, mesh)
    module.register_buffer("w", whole.sum(0))
    assert tensor_shards_of(torch.nn.Linear(2, 2)).keys() == {"weight", "bias"}
    assert distribute_tensor(torch.ones(2), mesh, [Replicate()]).to_local().shape == (2,)
    with pytest.raises(ValueError, match="redistribute it first") as error:
        tensor_shards_of(module)
    results = str(error.value)
    assert "w is placed as" in results
