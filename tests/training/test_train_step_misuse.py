"""train_step misused: tied tensors in pipelines, ranks with different arguments, batches that fail."""

import copy

import gpt
import pytest
import torch
import torch.distributed as dist
from marks import promise
from one_card import farthest, losses_of
from pool import on_ranks
from test_train_step import STEPS, check, model_and_optimizer, trained_whole
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import (
    AmpOptions,
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    Strategy,
    StrategyOptionError,
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
    torch.manual_seed(0)
    model = Tied().double()
    step = train_step(model, gpt.batch_of(0), torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), strategy)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batches = [gpt.batch_of(number) for number in range(STEPS)]
    found = [step(*batch).item() for batch in batches]
    whole = losses_of(model, optimizer, batches, max_norm=0.1)
    worst = farthest(step.tensor_shards(), model.state_dict())
    step.close()
    return found, whole, worst


@pytest.mark.sample(1)
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


@on_ranks(2)
def test_what_would_train_otherwise_than_it_looks_is_refused(_group):
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
    assert "is in evaluation mode: aten.dropout.default would be trained without dropout" in messages[0]
    assert "batch is a dict: give the loss's arguments as a tuple" in messages[1]
    assert "argument 0 of the batch is [8, 16]; the step was made with [16, 16]" in messages[2]
    assert "changed (lr from 0.01 to 0.5) since, which trains nothing" in messages[3]
    assert "was stepped since, which trains nothing" in messages[4]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def squares(model, x):
    return (model(x) ** 2).mean()


X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)


WEIGHTS = "(0.bias, 0.weight, 2.bias, 2.weight)"
# What a user changes, and what the next step says of it.
CHANGES = {
    "load_state_dict": (lambda model, _: model.load_state_dict(net().state_dict()), f"has changed since {WEIGHTS}"),
    "assigned": (
        lambda model, _: model.load_state_dict(net().state_dict(), assign=True),
        f"model that train_step was given has changed since {WEIGHTS}",
    ),
    "frozen": (lambda model, _: model[0].requires_grad_(False), "has changed since (0.bias, 0.weight)"),
    "written": (lambda model, _: nn.init.zeros_(model[2].bias), "has changed since (2.bias)"),
    "replaced": (lambda model, _: model.append(nn.Linear(4, 4).double()), "has changed since (3.bias, 3.weight)"),
    "gradient hook": (
        lambda model, _: model[0].weight.register_hook(lambda gradient: gradient * 2),
        "has changed since (0.weight)",
    ),
    "forward hook": (
        lambda model, _: model[2].register_forward_hook(lambda *_: None),
        "has changed since (hooks of 2)",
    ),
    "add_param_group": (
        lambda _, optimizer: optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
        "was given other parameters since",
    ),
    "tensor lr": (
        lambda _, optimizer: optimizer.param_groups[0]["lr"].fill_(0.5),
        "was given other settings since",
    ),
    "step hook": (
        lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None),
        "was given a hook since",
    ),
    "own step": (lambda _, optimizer: setattr(optimizer, "step", lambda *_: None), "was given another step since"),
}


def changed_later(_group):
    """Change the model or the optimizer after train_step, and before it; return the errors."""
    strategy, later, before = Strategy(mode="data", mesh={"dp": 2}), {}, {}
    for name, (change, _) in CHANGES.items():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        step = train_step(model, (X,), optimizer, strategy, loss=squares)
        step(X)
        change(model, optimizer)
        with pytest.raises(RuntimeError) as error:
            step(X)
        later[name] = str(error.value)
        step.close()
    for name in ("step hook", "own step"):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        CHANGES[name][0](model, optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1) if name == "step hook" else None
        with pytest.raises(ValueError, match="which an optimizer rebuilt over shards would not run") as error:
            train_step(model, (X,), optimizer, strategy, loss=squares)
        before[name] = str(error.value)
    return later, before


@promise("later-changes")
def test_what_changes_the_given_model_or_optimizer_is_refused(ranks):
    for later, before in ranks(2).run(changed_later):
        wrong = {name: message for name, message in later.items() if CHANGES[name][1] not in message}
        assert wrong == {}
        assert all("which trains nothing" in message for message in later.values())
        assert "this AdamW has a hook of step" in before["step hook"]
        assert "this AdamW has a step of its own" in before["own step"]


def changed_in_force(_group, options, more, change):
    """Change the given model between steps, where the model itself is trained."""
    model, strategy, losses = net(), Strategy(**options), []
    rows = X.chunk(2)[dist.get_rank()] if strategy.mode == "hybrid" else X
    step = train_step(model, (rows,), torch.optim.AdamW(model.parameters(), lr=0.1), strategy, loss=squares, **more)
    for number in range(4):
        if number == 2:
            CHANGES[change][0](model, None)
        losses.append(step(rows).item())
    step.close()
    return losses


@promise("later-changes")
@pytest.mark.parametrize(
    ("options", "more", "change"),
    [
        ({"mode": "hybrid"}, {}, "load_state_dict"),
        ({"mode": "hybrid"}, {}, "frozen"),
        ({"mode": "data", "sharding": ShardingOptions(zero_stage=1)}, {"static": False}, "frozen"),
    ],
)
def test_what_changes_a_model_that_is_trained_itself_is_in_force(ranks, options, more, change):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = losses_of(model, optimizer, [(X,)] * 2, squares)
    optimizer.zero_grad()  # what is frozen now keeps no gradient
    CHANGES[change][0](model, None)
    expected += losses_of(model, optimizer, [(X,)] * 2, squares)
    for losses in ranks(2).run(changed_in_force, {**options, "mesh": {"dp": 2}}, more, change):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


class Complex(nn.Module):
    """A linear layer, and a product with complex numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.w = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, x):
        return torch.view_as_real(self.linear(x).to(torch.complex128) @ self.w)


def complex_parameters(_group, options):
    model, strategy = Complex(), Strategy(max_norm=0.1, mesh={"dp": 2}, **options)
    rows = X.chunk(2)[dist.get_rank()] if strategy.mode == "hybrid" else X
    step = train_step(model, (rows,), torch.optim.AdamW(model.parameters(), lr=0.1), strategy, loss=squares)
    losses = [step(rows).item() for _ in range(3)]
    step.close()
    model, in_16_bits = Complex(), Strategy(mode="data", mesh={"dp": 2}, amp=AmpOptions(dtype="bfloat16"))
    with pytest.raises(StrategyOptionError, match=r"amp.dtype=.bfloat16. with complex parameters \(w\)"):
        train_step(model, (X,), torch.optim.AdamW(model.parameters()), in_16_bits, loss=squares)
    return losses


@pytest.mark.parametrize("options", [{"mode": "hybrid"}, {"mode": "data", "sharding": ShardingOptions(zero_stage=1)}])
def test_complex_parameters_are_clipped_as_by_torch(ranks, options):
    model = Complex()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = losses_of(model, optimizer, [(X,)] * 3, squares, max_norm=0.1)
    for losses in ranks(2).run(complex_parameters, options):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


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


def grouped(order):
    """Return a net and its optimizer, whose groups have hyperparameters of their own, in an order."""
    model = net()
    groups = [
        {"params": [model[0].weight], "lr": 0.1, "weight_decay": 0.3},
        {"params": [model[0].bias, model[2].bias], "lr": 0.01},
        {"params": [model[2].weight], "lr": 0.03, "betas": (0.5, 0.9)},
    ]
    return model, torch.optim.AdamW([groups[place] for place in order])


def continued(_group, folder, order):
    """Train two batches, save, load with the groups in another order, train two more."""
    strategy = Strategy(mode="data", mesh={"dp": 2}, sharding=ShardingOptions(zero_stage=1))
    first, second = (train_step(*_with_batch(grouped(each)), strategy, loss=squares) for each in ([0, 1, 2], order))
    losses = [first(X).item() for _ in range(2)]
    first.optimizer.param_groups[0]["lr"] = 0.02
    first.save(folder)
    first.close()
    second.load(folder)
    losses += [second(X).item() for _ in range(2)]
    with pytest.raises(ValueError, match="of these in another order"):
        second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.close()
    model = net()
    joined = train_step(model, (X,), torch.optim.AdamW(model.parameters()), strategy, loss=squares)
    with pytest.raises(ValueError, match=r"joins parameters that were saved with different lr"):
        joined.load(folder)
    joined.close()
    return losses


def _with_batch(made):
    model, optimizer = made
    return model, (X,), optimizer


def test_a_checkpoint_is_loaded_by_names_whatever_the_order_of_groups(ranks, tmp_path):
    model, optimizer = grouped([0, 1, 2])
    expected = losses_of(model, optimizer, [(X,)] * 2, squares)
    optimizer.param_groups[0]["lr"] = 0.02
    expected += losses_of(model, optimizer, [(X,)] * 2, squares)
    for losses in ranks(2).run(continued, tmp_path, [2, 0, 1]):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
