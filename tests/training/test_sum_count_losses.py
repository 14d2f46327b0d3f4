"""Losses that return a sum and a count: the exact mean over all counted targets, for any mask, against float64."""

import gpt
import pytest
import torch
import torch.distributed as dist
from logged import logged
from marks import promise
from one_card import farthest, losses_of
from pool import on_ranks
from test_train_step import TP
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import (
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    Strategy,
    WeightedLoss,
    train_step,
)

STEPS, IGNORED = 5, -100


class Counted(gpt.GPT):
    """Returns the logits."""

    def __init__(self):
        super().__init__(layers=2, width=16, heads=2)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


def summed(model, tokens, targets):
    count = (targets != IGNORED).sum()  # before the model: of a pipeline the first stage makes it
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), count


def mean(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def masked_batch(number):
    """Return a batch of 16 rows; row r counts r + 1 targets, so the counts of all parts differ."""
    tokens, targets = gpt.batch_of(number)
    ignored = torch.arange(gpt.LENGTH) > torch.arange(gpt.BATCH)[:, None]
    return tokens, targets.masked_fill(ignored, IGNORED)


def made():
    torch.manual_seed(0)
    model = Counted().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


MICRO = {**TP, "pipeline": PipelineOptions(micro_batches=4)}


def staged(schedule, virtual=1):
    pipeline = PipelineOptions(degree=2, micro_batches=4, schedule=schedule, virtual_stages=virtual)
    return {"mode": "data", "mesh": {"dp": 2}, "pipeline": pipeline, "overlap": OverlapOptions(operators=False)}


@promise("masked-mean")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "more"),
    [
        (MICRO, {}),
        ({**MICRO, "max_norm": 0.3, "sharding": ShardingOptions(zero_stage=3)}, {}),
        (MICRO, {"static": False}),
        ({**MICRO, "gradient_merge": GradientMerge(steps=3)}, {"local_batches": True}),
        ({"mode": "auto", "mesh": {"dp": 2, "tp": 2}, "hardware": "cpu-gloo"}, {}),
        ({**staged("1f1b"), "max_norm": 0.3, "sharding": ShardingOptions(zero_stage=1)}, {}),
        (staged("zbv", 2), {}),
        ({"mode": "hybrid", "mesh": {"dp": 4}, "sharding": ShardingOptions(zero_stage=1), "max_norm": 0.3}, {}),
    ],
)
@on_ranks(4)
def test_unequal_masks_train_as_one_process(_group, options, more):
    strategy, (model, optimizer) = Strategy(**options), made()
    merge, replicas = strategy.gradient_merge.steps, strategy.mesh["dp"]
    own = slice(None)
    if strategy.mode == "hybrid" or more.get("local_batches"):
        place, rows = strategy.data_rank(dist.get_rank()), gpt.BATCH // replicas
        own = slice(place * rows, (place + 1) * rows)
    given = [tuple(tensor[own] for tensor in masked_batch(number)) for number in range(STEPS * merge)]
    like = given[0] if strategy.mode == "hybrid" else masked_batch(0)
    step = train_step(model, like, optimizer, strategy, loss=summed, **more)
    losses = [step(*batch).item() for batch in given]
    whole, optimizer = made()
    expected = []
    for number in range(STEPS):
        batches = [masked_batch(merge * number + index) for index in range(merge)]
        expected += [mean(whole, *batch).item() for batch in batches]
        mean(whole, *(torch.cat(some) for some in zip(*batches, strict=True))).backward()
        if strategy.max_norm is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), strategy.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    worst = farthest(step.tensor_shards(), whole.state_dict())
    evaluated = step.evaluate(*given[0]).item(), mean(whole, *masked_batch(0)).item()
    step.close()
    losses, expected = [*losses, evaluated[0]], [*expected, evaluated[1]]
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    assert worst < 1e-9


def wrong(_group, what):
    """Return the errors for counts that cannot be divisors."""
    model, optimizer = made()
    tokens, targets = masked_batch(0)
    merge = GradientMerge(steps=2, average=False) if what == "sum of means" else GradientMerge()
    losses = {
        "three": lambda model, *batch: (*summed(model, *batch), 1),
        "vector": lambda model, x, _: (x.sum(), x),
        "metric": lambda model, tokens, targets: (mean(model, tokens, targets), model(tokens).detach().std()),
        "learned weight": lambda model, *batch: WeightedLoss(mean(model, *batch), model.places.weight.sum()),
    }
    what, _, mode = what.partition(", ")
    strategy = Strategy(mode=mode or "data", mesh={"dp": 2}, gradient_merge=merge)
    try:
        step = train_step(model, (tokens, targets), optimizer, strategy, loss=losses.get(what, summed))
    except ValueError as error:
        return str(error)
    try:
        step(tokens, torch.full_like(targets, IGNORED) if what == "nothing" else targets)
    except ValueError as error:
        return str(error)
    finally:
        step.close()
    return ""


@promise("loss-count")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("nothing", "with a count of 0 in all: give a number above 0"),
        ("sum of means", "gradient_merge.average=False with steps=2 and a loss that returns (sum, count)"),
        ("three", "the loss has to be one number"),
        ("vector", "the loss has to be one number"),
        ("metric", "the second is a torch.float64 and not a count: the step would divide by it"),
        ("metric, hybrid", "the second is a torch.float64 and not a count: the step would divide by it"),
        ("learned weight", "its weight depends on parameters"),
        ("learned weight, hybrid", "its weight depends on parameters"),
    ],
)
def test_what_is_no_sum_and_count_is_refused_on_all_ranks(ranks, what, messages):
    assert all(messages in message for message in ranks(2).run(wrong, what))


def weighted(model, tokens, targets):
    weights = CLASS_WEIGHTS[targets.flatten()]
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return WeightedLoss((losses * weights).sum(), weights.sum())


CLASS_WEIGHTS = torch.linspace(0.1, 2, gpt.VOCABULARY, dtype=torch.float64)


def trained_by_weights(_group, options):
    model, optimizer = made()
    own = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8) if options["mode"] == "hybrid" else slice(None)
    batches = [tuple(tensor[own] for tensor in gpt.batch_of(number)) for number in range(3)]
    step = train_step(model, batches[0], optimizer, Strategy(**options), loss=weighted)
    losses = [step(*batch).item() for batch in batches]
    step.close()
    return losses


@promise("loss-count")
@pytest.mark.sample("graph")
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(micro_batches=4)},
        {"mode": "data", "mesh": {"dp": 1}, "pipeline": PipelineOptions(degree=2, micro_batches=4)},
        {"mode": "hybrid", "mesh": {"dp": 2}},
    ],
    ids=["graph", "stages", "hybrid"],
)
def test_a_weighted_loss_is_divided_by_its_weight(ranks, options):
    def loss(model, tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), weight=CLASS_WEIGHTS)

    expected = losses_of(*made(), map(gpt.batch_of, range(3)), loss)
    for losses in ranks(2).run(trained_by_weights, options):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


def masked_by_hand(model, tokens, targets):
    """Return a masked mean in the usual form, with a mask for shifted labels."""
    mask = (targets != IGNORED).double()
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


LOSSES = {"cross_entropy": mean, "by hand": masked_by_hand, "summed": summed}


def warned(_group, options, more, loss, equal):
    """Return this rank's warnings in two steps."""
    strategy, (model, optimizer) = Strategy(**options), made()
    batch = gpt.batch_of(0) if equal else masked_batch(0)
    if strategy.mode == "hybrid" or more.get("local_batches"):
        local = tuple(tensor.chunk(2)[strategy.data_rank(dist.get_rank())] for tensor in batch)
    else:
        local = batch
    like = local if strategy.mode == "hybrid" else batch
    step = train_step(model, like, optimizer, strategy, loss=LOSSES[loss], **more)
    with logged() as messages:
        for _ in range(2):
            step(*local)
    step.close()
    return [message for message in messages if "the loss is a mean" in message]


DATA = {"mode": "data", "mesh": {"dp": 2}}
SEVERAL = {**DATA, "pipeline": PipelineOptions(micro_batches=4)}
STAGES = {"mode": "data", "mesh": {"dp": 1}, "pipeline": PipelineOptions(degree=2, micro_batches=4)}
COUNTS = "micro-batches count 10, 26, 42, 58: the mean of their means is not the batch's; have the loss return"


@promise("masked-mean")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "more", "loss", "messages"),
    [
        (SEVERAL, {}, "cross_entropy", COUNTS),
        (SEVERAL, {}, "by hand", COUNTS),
        (SEVERAL, {"static": False}, "cross_entropy", COUNTS),
        (SEVERAL, {"local_batches": True}, "cross_entropy", "micro-batches count 3, 7, 11, 15: "),
        (STAGES, {}, "cross_entropy", COUNTS),
        ({**DATA, "mode": "hybrid"}, {}, "cross_entropy", "of which replicas have between 36 and 100: "),
    ],
)
def test_a_mean_over_unequal_counts_is_said_once_on_rank_0(ranks, options, more, loss, messages):
    first, second = ranks(2).run(warned, options, more, loss, False)
    assert len(first) == 1
    assert messages in first[0]
    assert second == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "loss", "equal"),
    [(SEVERAL, "cross_entropy", True), (DATA, "cross_entropy", False), (SEVERAL, "summed", False)]
    + [({**DATA, "mode": "hybrid"}, loss, equal) for loss, equal in (("cross_entropy", True), ("summed", False))],
)
def test_equal_counts_one_micro_batch_and_sums_are_not_warned_of(ranks, options, loss, equal):
    assert ranks(2).run(warned, options, {}, loss, equal) == [[], []]
