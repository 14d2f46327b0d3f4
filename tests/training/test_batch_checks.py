"""Batches that differ within a replica: an error on all ranks, in every mode."""

import gpt
import modes
import pytest
import torch
import torch.distributed as dist
from marks import promise
from mesh_stages import MEGATRON
from one_card import losses_of
from pool import on_ranks
from test_train_step import check
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.training import PipelineOptions, Strategy, StrategyOptionError, train_step

GRID = {"mesh": {"dp": 2, "tp": 2}}
TP = {"mode": "semi_auto", "operators": MEGATRON, **GRID}
TWO_STAGES = {"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(degree=2, micro_batches=2)}
LOCAL = {"local_batches": True}


def small():
    torch.manual_seed(0)
    model = gpt.GPT(layers=2, width=16, heads=2).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def said_by(step, batches):
    """Train on batches until a batch is refused; return the error and the batch's number."""
    number = 0
    try:
        for batch in batches:
            step(*batch)
            number += 1
    except (DisagreementError, ValueError) as error:
        return type(error).__name__, str(error), number
    finally:
        step.close()
    return "", "", -1


def told_apart(_group, options, more, stray):
    """Give one rank another batch from the second step on."""
    strategy, rank = Strategy(**options), dist.get_rank()

    def batch_of(number):
        whole = gpt.batch_of(number + 50 * (number > 0 and rank == stray))
        place = strategy.data_rank(rank)
        return tuple(tensor.chunk(2)[place] for tensor in whole) if more.get("local_batches") else whole

    if strategy.mode == "hybrid":
        torch.manual_seed(0)
        whole, mesh = modes.MLP().double(), strategy.meshes()[0]
        model = modes.ParallelMLP(whole, mesh.group("tp"))
        parts = torch.arange(96.0, dtype=torch.float64).view(2, 6, 8)[strategy.data_rank(rank)]
        batches = [(parts + 50 * (number > 0 and rank == stray),) for number in range(3)]
        optimizer = torch.optim.AdamW(model.parameters())
        step = train_step(model, batches[0], optimizer, strategy, loss=modes.mean_square)
        return said_by(step, batches)
    model, optimizer = small()
    step = train_step(model, gpt.batch_of(0), optimizer, strategy, **more)
    return said_by(step, map(batch_of, range(3)))


@promise("replica-batches")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "more", "stray", "replica"),
    [
        ({"mode": "data", "mesh": {"dp": 4}}, {}, 2, "ranks 0, 1, 3; * on rank 2"),
        (TP, {}, 1, "ranks 0, 2, 3; * on rank 1"),
        (TP, LOCAL, 3, "rank 2; * on rank 3"),
        (TP, {**LOCAL, "static": False}, 1, "rank 0; * on rank 1"),
        ({"mode": "auto", "hardware": "cpu-gloo", **GRID}, {}, 3, "ranks 0, 1, 2; * on rank 3"),
        ({"mode": "hybrid", **GRID}, {}, 2, "rank 2; * on rank 3"),
        (TWO_STAGES, {}, 3, "ranks 0, 1, 2; * on rank 3"),
        (TWO_STAGES, LOCAL, 2, "rank 0; * on rank 2"),
    ],
)
def test_a_batch_that_differs_inside_a_replica_is_an_error_on_all_ranks(ranks, options, more, stray, replica):
    for kind, message, number in ranks(4).run(told_apart, options, more, stray):
        assert (kind, number) == ("DisagreementError", 1)
        first, second = replica.split("; * ")
        assert "differently: argument 0 of the batch is [" in message
        assert f" on {first}; [" in message
        assert f" {second} (batch 1 of this run" in message
        assert "num_replicas=" in message


def sampled(_group, by_data):
    """Read local batches by a DistributedSampler of the global rank, or of the place along dp; return the error."""
    strategy, rank = Strategy(**TP), dist.get_rank()
    data = TensorDataset(*map(torch.cat, zip(*(gpt.batch_of(number) for number in range(4)), strict=True)))
    among = (2, strategy.data_rank(rank)) if by_data else (4, rank)
    sampler = DistributedSampler(data, num_replicas=among[0], rank=among[1], shuffle=False)
    model, optimizer = small()
    step = train_step(model, gpt.batch_of(0), optimizer, strategy, local_batches=True)
    return said_by(step, DataLoader(data, batch_size=8, sampler=sampler))


@promise("replica-batches")
def test_a_sampler_of_the_global_rank_is_refused_and_one_of_the_data_rank_is_not(ranks):
    for rank, (kind, message, number) in enumerate(ranks(4).run(sampled, False)):
        assert (kind, number) == ("DisagreementError", 0), rank
        assert "num_replicas=2, rank=strategy.data_rank(rank)), which is 0 on rank 0" in message
    assert all(message == ("", "", -1) for message in ranks(4).run(sampled, True))


def trained_on_parts(_group, options, more):
    """Train on more local batches than the first ones, which are all compared; return as `trained` does."""
    strategy, steps = Strategy(**options), 12
    model, optimizer = small()
    step = train_step(model, gpt.batch_of(0), optimizer, strategy, local_batches=True, check_batches=3, **more)
    place = strategy.data_rank(dist.get_rank())
    parts = [tuple(tensor.chunk(2)[place] for tensor in gpt.batch_of(number)) for number in range(steps)]
    losses = [step(*part).item() for part in parts]
    step.close()
    return losses, losses_of(*small(), map(gpt.batch_of, range(steps))), 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [{}, {"static": False}])
def test_parts_that_differ_between_replicas_train(ranks, more):
    check(ranks(4).run(trained_on_parts, TP, more))


def late(_group, every):
    """Give rank 1 a different batch number 10; return the error."""
    model, optimizer = small()
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(mode="data", mesh={"dp": 2}), check_batches=every)
    stray = dist.get_rank() == 1
    return said_by(step, (gpt.batch_of(number + 50 * (stray and number == 10)) for number in range(12)))


@pytest.mark.slow
def test_after_the_first_eight_every_nth_batch_is_compared(ranks):
    for kind, _, number in ranks(2).run(late, 5):
        assert (kind, number) == ("DisagreementError", 10)
    for every in (4, 0):
        assert ranks(2).run(late, every) == [("", "", -1)] * 2


def misshapen(_group):
    """Give only rank 1 half a batch; return the error."""
    model, optimizer = small()
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(mode="data", mesh={"dp": 2}))
    rows = 8 if dist.get_rank() else 16
    return said_by(step, [gpt.batch_of(0), tuple(tensor[:rows] for tensor in gpt.batch_of(1))])


def test_what_one_rank_alone_finds_wrong_with_its_batch_the_others_are_told(ranks):
    first, second = ranks(2).run(misshapen)
    assert second[0] == "ValueError"
    assert first[0] == "DisagreementError"
    assert first[1] == f"rank 1: {second[1]}"
    assert "argument 0 of the batch is [8, 16]" in second[1]


@pytest.mark.parametrize("every", [-1, 1.5, True])
@on_ranks(2)
def test_a_number_of_batches_that_is_none_is_refused_by_name(_group, every):
    model, optimizer = small()
    with pytest.raises(StrategyOptionError, match=f"check_batches={every!r}: give a whole number"):
        train_step(model, gpt.batch_of(0), optimizer, Strategy(mode="data", mesh={"dp": 2}), check_batches=every)


def test_the_data_rank_is_the_place_along_the_data_dimension():
    strategy = Strategy(mesh={"tp": 2, "dp": 3}, pipeline=PipelineOptions(degree=2, micro_batches=2))
    assert [strategy.data_rank(rank) for rank in range(12)] == [0, 1, 2, 0, 1, 2] * 2
    assert Strategy(mode="auto", mesh={"tp": 2}, data_dim=None).data_rank(1) == 0
    with pytest.raises(ValueError, match="rank=12: the strategy is for 12 ranks"):
        strategy.data_rank(12)
