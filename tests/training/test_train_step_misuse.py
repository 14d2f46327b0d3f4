"""train_step misused: tied tensors in pipelines, ranks with different arguments, batches that fail."""

import gpt
import pytest
import torch
from test_train_step import STEPS, check, farthest, model_and_optimizer, trained_whole
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import (
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    Strategy,
    train_step,
)


class Tied(gpt.GPT):
    """A GPT whose head is a module tied to the embedding: a tensor with two names."""

    def __init__(self):
        super().__init__(layers=2, width=16, heads=2)
        self.head = nn.Linear(16, gpt.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tied(_group, schedule, virtual, zero_stage):
    """Train with a clipped norm that counts the tied tensor once; return as `trained` does."""
    pipeline = PipelineOptions(degree=2, micro_batches=2, schedule=schedule, virtual_stages=virtual)
    strategy = Strategy(
        mode="data",
        pipeline=pipeline,
        overlap=OverlapOptions(operators=False),
        sharding=ShardingOptions(zero_stage=zero_stage),
        max_norm=0.1,
    )
    found, whole = [], []
    torch.manual_seed(0)
    model = Tied().double()
    step = train_step(model, gpt.batch_of(0), torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for number in range(STEPS):
        found.append(step(*gpt.batch_of(number)).item())
        loss = model(*gpt.batch_of(number))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        whole.append(loss.item())
    state = model.state_dict()
    worst = max(farthest(shard, state[name]) for name, shard in step.tensor_shards().items())
    step.close()
    return found, whole, worst


@pytest.mark.parametrize(("schedule", "virtual", "zero_stage"), [("1f1b", 1, 2), ("zbv", 2, 1)])
def test_a_tied_head_counts_once_in_the_norm_also_with_both_stages_on_one_rank(ranks, schedule, virtual, zero_stage):
    check(ranks(2).run(tied, schedule, virtual, zero_stage))


def disagreeing(group, what):
    """Give rank 1 a different argument; return the error."""
    rank, options, more = group.rank(), {"mode": "data", "mesh": {"dp": 2}}, {}
    if rank and what == "gradient_merge":
        options["gradient_merge"] = GradientMerge(steps=2)
    if rank and what == "mesh":
        options["mesh"] = {"dp": 4}
    if rank and what == "static":
        more = {"static": False}
    model, optimizer = model_and_optimizer()
    try:
        step = train_step(model, gpt.batch_of(0), optimizer, Strategy(**options), **more)
    except RuntimeError as error:
        return str(error)
    try:
        step(*gpt.batch_of(rank if what == "argument 0" else 0))
    except RuntimeError as error:
        return str(error)
    finally:
        step.close()
    return ""


@pytest.mark.parametrize("what", ["gradient_merge", "mesh", "static", "argument 0"])
def test_ranks_that_come_with_something_else_are_told_so_on_all(ranks, what):
    assert all(f"differently: {what}" in message for message in ranks(2).run(disagreeing, what))


def interrupted(_group, merge):
    """Fail in the second micro-batch of the second batch, then continue; return the losses, or the error."""
    model, optimizer = model_and_optimizer()
    options = {"pipeline": PipelineOptions(micro_batches=2), "gradient_merge": GradientMerge(steps=merge)}
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(mode="data", mesh={"dp": 2}, **options))
    losses, calls = [step(*gpt.batch_of(0)).item()], []
    (module,) = step.modules
    forward = module.forward

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ArithmeticError
        return forward(*args)

    module.forward = failing
    with pytest.raises(ArithmeticError):
        step(*gpt.batch_of(1))
    module.forward = forward
    try:
        losses += [step(*gpt.batch_of(number)).item() for number in range(1, 4)]
    except RuntimeError as error:
        return str(error)
    finally:
        step.close()
    return losses, trained_whole(options, 4)[0]


def test_what_a_failed_batch_left_is_not_trained_on(ranks):
    for found, expected in ranks(2).run(interrupted, 1):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert all("batch 1 failed before" in message for message in ranks(2).run(interrupted, 2))


def misused(_group):
    """Misuse the step so that it would train something else; return the errors."""
    model, optimizer = model_and_optimizer()
    strategy, messages = Strategy(mode="data", mesh={"dp": 2}), []
    dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    of_dropping = torch.optim.SGD(dropping.parameters(), lr=0.1)
    for made, its, batch in (
        (dropping, of_dropping, (torch.ones(4, 4),)),
        (model, optimizer, {"tokens": gpt.batch_of(0)[0]}),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            train_step(made, batch, its, strategy, loss=lambda model, *batch: model(*batch).mean())
        messages.append(str(error.value))
    step = train_step(model, gpt.batch_of(0), optimizer, strategy)
    with pytest.raises(ValueError, match="argument 0") as error:
        step(*(tensor[:8] for tensor in gpt.batch_of(0)))
    messages.append(str(error.value))
    scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda number: 1 / (number + 1))
    step(*gpt.batch_of(0))
    scheduler.step()  # over the step's own optimizer: allowed
    step(*gpt.batch_of(1))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError) as error:
        step(*gpt.batch_of(2))
    messages.append(str(error.value))
    step.close()
    model, _ = model_and_optimizer()
    of_model = torch.optim.Adagrad(model.parameters())  # Adagrad has a state from the start
    step = train_step(model, gpt.batch_of(0), of_model, strategy)
    step(*gpt.batch_of(0))
    model(*gpt.batch_of(0)).backward()
    of_model.step()
    with pytest.raises(RuntimeError) as error:
        step(*gpt.batch_of(1))
    messages.append(str(error.value))
    step.close()
    return messages


def test_what_would_train_otherwise_than_it_looks_is_refused(ranks):
    for messages in ranks(2).run(misused):
        assert "is in evaluation mode: aten.dropout.default would be trained without dropout" in messages[0]
        assert "batch is a dict: give the loss's arguments as a tuple" in messages[1]
        assert "argument 0 of the batch is [8, 16]; the step was made with [16, 16]" in messages[2]
        assert "changed (lr from 0.01 to 0.5) since, which trains nothing" in messages[3]
        assert "was stepped since, which trains nothing" in messages[4]


def with_an_argument_less(_group):
    model, optimizer = model_and_optimizer()
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(mode="data", mesh={"dp": 2}))
    try:
        with pytest.raises(ValueError, match=r"1 arguments were given; .* has 2"):
            step(*gpt.batch_of(0)[:1])
        return step(*gpt.batch_of(0)).item()
    finally:
        step.close()


def test_another_number_of_arguments_is_refused_and_the_next_batch_trains(ranks):
    first, second = ranks(2).run(with_an_argument_less)
    assert first == second
