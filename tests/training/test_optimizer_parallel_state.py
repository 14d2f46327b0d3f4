"""ParallelOptimizer: clipping, master weights, loss scaling, memory, and a state that is saved and loaded elsewhere."""

from functools import partial
from math import inf, prod

import pytest
import torch
from one_card import box_of
from optimizer_cases import OPTIMIZERS, SHAPES, WAYS, Odd, groups, made, pair, seeds
from pool import on_ranks
from torch import nn

from ascend_parallel.sharding.layout import bounds, shard
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer import (
    LossScale,
    OwnedParameter,
    ParallelOptimizer,
    optimizer_factory,
    predicted_memory,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def backward(model, step, group, rank=None):
    for seed in range(group.size()) if rank is None else [rank]:
        model(seeds(step, seed), step % 2).backward()


def clipped(group, norm_type, limit):
    for zero_stage, partition_by in WAYS:
        options = {"zero_stage": zero_stage, "partition_by": partition_by, "max_norm": limit, "norm_type": norm_type}
        whole, optimizer, mine, parallel = pair("momentum", unreduced=True, **options)
        seen = []
        for step in range(5):
            backward(whole, step, group)
            backward(mine, step, group, group.rank())
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, norm_type)
            optimizer.step()
            parallel.step()
            seen.append(norm.item())
            assert parallel.norm == pytest.approx(norm.item(), rel=1e-13)
            optimizer.zero_grad()
            parallel.zero_grad()
        torch.testing.assert_close(mine.state_dict(), whole.state_dict(), **CLOSE)
    assert min(seen) < limit < max(seen)
    return parallel.norm


@pytest.mark.sample(1)
@pytest.mark.parametrize(("norm_type", "limit"), [(2.0, 102.0), (1.5, 215.0), (inf, 21.5)])
def test_clipping_by_the_norm_of_all(ranks, norm_type, limit):
    """Steps above and below the limit; the norm has the same bits on all ranks."""
    assert len(set(ranks(3).run(clipped, norm_type, limit))) == 1


def cut(group):
    """On 2 x 2 ranks: a matrix cut in columns, replicated along the first dimension; a bias that is everywhere."""
    torch.manual_seed(1)
    whole = nn.Linear(6, 5).double()
    part = nn.Linear(3, 5).double()
    place = divmod(group.rank(), 2)
    at = bounds((5, 6), (shard(1),), (2,), place[1:])
    part.load_state_dict({"weight": whole.weight[:, at[1][0] : at[1][1]], "bias": whole.bias})
    lines = [[torch.distributed.new_group([first, first + 2])] for first in range(2)]
    replicas = lines[place[1]][0]
    targets = [
        OwnedParameter("weight", part.weight, TensorShard(part.weight, (5, 6), (0, at[1][0])), replicas, 2),
        OwnedParameter("bias", part.bias, TensorShard(part.bias, (5,), (0,)), replicas, 4),
    ]
    optimizer = OPTIMIZERS["AdamW"](whole.parameters())
    parallel = ParallelOptimizer(
        targets, optimizer_factory(OPTIMIZERS["AdamW"](whole.parameters()), whole), max_norm=1.0
    )
    for _ in range(3):
        whole.weight.grad, whole.bias.grad = torch.randn_like(whole.weight), torch.randn_like(whole.bias)
        part.weight.grad, part.bias.grad = whole.weight.grad[:, at[1][0] : at[1][1]].clone(), whole.bias.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        parallel.step()
        assert parallel.norm == pytest.approx(norm.item(), rel=1e-13)
        torch.testing.assert_close(part.weight, whole.weight[:, at[1][0] : at[1][1]], **CLOSE)
        torch.testing.assert_close(part.bias, whole.bias, **CLOSE)
    return {
        name: (tuple(held.local.shape), held.offsets, held.shape) for name, held in parallel.tensor_shards().items()
    }


def test_clipping_and_shards_where_parameters_are_cut(ranks):
    found = ranks(4).run(cut)
    assert [bounds["weight.exp_avg"] for bounds in found] == [
        ((3, 3), (0, 0), (5, 6)),
        ((3, 3), (0, 3), (5, 6)),
        ((2, 3), (3, 0), (5, 6)),
        ((2, 3), (3, 3), (5, 6)),
    ]
    assert found[2]["bias.exp_avg_sq"] == ((2,), (3,), (5,))
    assert found[2]["bias.step"] == ((), (), ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(3)
def test_master_weights(group, dtype):
    """A 16-bit model with fp32 masters, against an fp32 model that gives the same gradients, then rounded."""
    kind = OPTIMIZERS["AdamW"]
    for zero_stage, partition_by in WAYS:
        low, master = Odd(dtype), Odd(dtype).float()
        optimizer = kind(groups(master))
        parallel = made(
            low,
            kind,
            zero_stage=zero_stage,
            partition_by=partition_by,
            master_dtype=torch.float32,
            max_norm=90.0,
            unreduced=True,
        )
        for step in range(4):
            backward(low, step, group, group.rank())
            backward(master, step, group)
            torch.nn.utils.clip_grad_norm_(master.parameters(), 90.0)
            optimizer.step()
            parallel.step()
            optimizer.zero_grad()
            parallel.zero_grad()
            for (name, param), truth in zip(low.named_parameters(), master.parameters(), strict=True):
                assert param.dtype == dtype
                # fp32 steps agree up to the norm's last bits, which may fall on either side of a rounding to 16 bits
                torch.testing.assert_close(param.float(), truth.to(dtype).float(), rtol=2**-7, atol=0, msg=name)
                assert (param != truth.to(dtype)).sum() <= 1
        shards = parallel.tensor_shards()
        for name, held in shards.items():
            if name.endswith(".master"):
                truth = master.get_parameter(name.removesuffix(".master")).detach()
                torch.testing.assert_close(held.local, truth[box_of(held)], rtol=1e-6, atol=1e-7)
        assert any(name.endswith(".master") for name in shards)
    without = made(low, kind, unreduced=True)
    assert not any(name.endswith(".master") for name in without.tensor_shards())


@on_ranks(2)
def test_loss_scaling(group):
    """An overflow on one rank skips the step on all ranks; otherwise scaling by a power of two changes nothing."""
    for zero_stage, partition_by in WAYS:
        low, twin = Odd(torch.float16), Odd(torch.float16)
        options = {
            "zero_stage": zero_stage,
            "partition_by": partition_by,
            "master_dtype": torch.float32,
            "unreduced": True,
        }
        scale = LossScale(scale=16.0, interval=2)
        parallel = made(low, OPTIMIZERS["AdamW"], loss_scale=scale, **options)
        unscaled = made(twin, OPTIMIZERS["AdamW"], **options)
        seen = []
        for step in range(5):
            parallel.scale(low(step)).backward()
            if step == 1 and group.rank() == group.size() - 1:
                parallel.zero_grad()
                low.row.register_hook(lambda gradient: gradient * inf)
                with parallel.no_sync():
                    parallel.scale(low(step)).backward()
                low.row._backward_hooks.clear()
            elif step == 1 and zero_stage == 2:
                parallel.zero_grad()
                with parallel.no_sync():
                    parallel.scale(low(step)).backward()
            before = {name: tensor.clone() for name, tensor in low.state_dict().items()}
            parallel.step()
            assert parallel.skipped == (step == 1)
            if step == 1:
                torch.testing.assert_close(low.state_dict(), before, rtol=0, atol=0)
            else:
                twin(step).backward()
                unscaled.step()
            parallel.zero_grad()
            unscaled.zero_grad()
            seen.append(scale.scale)
        assert seen == [16.0, 8.0, 8.0, 16.0, 16.0]
        torch.testing.assert_close(low.state_dict(), twin.state_dict(), rtol=0, atol=0)


def kept(group, kind, steps, zero_stage, partition_by, dtype, given=None, states=None):
    """Train for some steps from a given state; return the model's state and this rank's part of the optimizer's."""
    mine = Odd(dtype)
    if given is not None:
        mine.load_state_dict(given)
    master = torch.float32 if dtype == torch.bfloat16 else None
    parallel = made(
        mine, OPTIMIZERS[kind], zero_stage=zero_stage, partition_by=partition_by, unreduced=True, master_dtype=master
    )
    if states is not None:
        targets = parallel.empty_tensor_shards()
        for name, shard in targets.items():
            shard.local.copy_(states[name][box_of(shard)])
        parallel.load_tensor_shards(targets)
    for step in steps:
        for rank in range(4):  # as many terms, however many ranks
            if rank % group.size() == group.rank():
                mine(seeds(step, rank), step % 2).backward()
        parallel.step()
        parallel.zero_grad()
    return dict(mine.state_dict()), parallel.tensor_shards()


def together(parts):
    """Return whole tensors, made of every rank's shards; each element must be present."""
    found, filled = {}, {}
    for part in parts:
        for name, piece in part.items():
            whole = found.setdefault(name, torch.zeros(piece.shape, dtype=piece.local.dtype))
            seen = filled.setdefault(name, torch.zeros(piece.shape, dtype=torch.bool))
            whole[box_of(piece)], seen[box_of(piece)] = piece.local, True
    assert all(bool(mask.all()) for mask in filled.values())
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("AdamW", torch.float64), ("NAdam", torch.bfloat16), ("momentum", torch.float32)]
)
def test_state_goes_to_other_numbers_of_ranks_and_stages(ranks, kind, dtype):
    steps = range(4)
    straight = ranks(2).run(kept, kind, steps, 1, "slices", dtype)
    halfway = ranks(4).run(kept, kind, steps[:1], 2, "slices", dtype)
    states = together([state for _, state in halfway])
    assert set(states) >= {"unused.stepped", "sometimes.stepped", "row.stepped"}
    assert (states["unused.stepped"], states["sometimes.stepped"], states["row.stepped"]) == (0, 0, 1)
    more = ranks(3).run(kept, kind, steps[1:2], 1, "parameters", dtype, halfway[0][0], states)
    states = together([state for _, state in more])
    for zero_stage, partition_by in WAYS:
        rest = ranks(2).run(kept, kind, steps[2:], zero_stage, partition_by, dtype, more[0][0], states)
        torch.testing.assert_close(rest[0][0], straight[0][0], rtol=0, atol=0)
        torch.testing.assert_close(
            together([state for _, state in rest]), together([state for _, state in straight]), rtol=0, atol=0
        )


@on_ranks(2)
def test_states_that_are_not_this_ranks(group):
    mine = Odd()
    parallel = made(mine, OPTIMIZERS["AdamW"])
    shards = parallel.empty_tensor_shards()
    name = next(iter(shards))
    with pytest.raises(ValueError, match=f"{name} is missing among the shards given"):
        parallel.load_tensor_shards({key: held for key, held in shards.items() if key != name})
    with pytest.raises(ValueError, match="elsewhere is of another rank"):
        parallel.load_tensor_shards({**shards, "elsewhere": shards[name]})
    wrong = TensorShard(torch.zeros(1), (1,), (0,))
    with pytest.raises(ValueError, match=r"is \[1\] at \[0\] of \[1\]; this rank has"):
        parallel.load_tensor_shards({**shards, "odd.exp_avg": wrong})
    backward(mine, 1, group)
    parallel.step()
    twin = made(Odd(), OPTIMIZERS["AdamW"])
    twin.load_state_dict(parallel.state_dict())
    for name, held in twin.tensor_shards().items():
        assert torch.equal(held.local, parallel.tensor_shards()[name].local)
    assert twin.plain_state() == parallel.plain_state()


def held(group, zero_stage, partition_by):
    """Return the bytes of parameters, gradients and state between backward and step, by counting tensors."""
    mine = Odd(torch.bfloat16)
    parallel = made(
        mine,
        OPTIMIZERS["AdamW"],
        zero_stage=zero_stage,
        partition_by=partition_by,
        unreduced=True,
        master_dtype=torch.float32,
    )
    for step in range(2):
        mine(seeds(step, group.rank()), True).backward()
        mine.unused.grad = None if zero_stage == 2 else torch.zeros_like(mine.unused)
        gradients = [param.grad for param in mine.parameters()] + [owned.inner.grad for owned in parallel._owned]
        sizes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        parallel.step()
        parallel.zero_grad()
    named = [held for name, held in parallel.tensor_shards().items() if not name.endswith((".step", ".stepped"))]
    return sum(param.nbytes for param in mine.parameters()), sizes, sum(held.local.nbytes for held in named)


@pytest.mark.parametrize(("zero_stage", "partition_by"), WAYS)
def test_memory_is_as_predicted(ranks, zero_stage, partition_by):
    shapes = [*SHAPES.values(), (3,), (5,)]
    found = ranks(3).run(held, zero_stage, partition_by)
    options = {
        "zero_stage": zero_stage,
        "ranks": 3,
        "partition_by": partition_by,
        "itemsize": 2,
        "master_itemsize": 4,
        "states": 2,
    }
    for rank, counted in enumerate(found):
        memory = predicted_memory(shapes, rank=rank, **options)
        assert (memory.parameters, memory.gradients, memory.optimizer) == counted


def test_the_formula_of_zero():
    """With sizes that divide: arXiv:1910.02054, 16 bytes per element of which 12 are the optimizer's."""
    shapes, ranks = [(8, 16), (32,)], 4
    elements = sum(prod(shape) for shape in shapes)
    memory = partial(predicted_memory, shapes, ranks=ranks, itemsize=2, master_itemsize=4)
    assert memory(zero_stage=0).total == 16 * elements
    assert memory(zero_stage=1).total == (2 + 2 + 12 / ranks) * elements
    assert memory(zero_stage=2).total == (2 + (4 + 12) / ranks) * elements  # gradients add up in fp32
    assert memory(zero_stage=3).total == 16 / ranks * elements
    assert predicted_memory(shapes, zero_stage=2, ranks=ranks).total == (4 + (4 + 8) / ranks) * elements
