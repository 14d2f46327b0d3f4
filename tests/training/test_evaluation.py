"""TrainStep.evaluate: the loss in evaluation mode; training stays unchanged."""

import copy

import gpt
import pytest
import torch
from one_card import farthest
from pool import on_ranks
from test_train_step import LAYERS, TP, model_and_optimizer
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace
from ascend_parallel.sharding.runtime.evaluation_graph import check_evaluation, in_evaluation
from ascend_parallel.training import (
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    Strategy,
    StrategyOptionError,
    train_step,
)

DATA = {"mode": "data", "mesh": {"dp": 2}}


class Noisy(nn.Module):
    """A model with dropout by a module and by a function, in attention, and with batch norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(8, 1)

    def forward(self, x, y):
        x = self.first(self.drop(self.norm(x)))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(0, 1) for part in x.split(8, -1)[:3])
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        x = F.dropout(x.transpose(0, 1).flatten(1), 0.5, self.training)
        return F.mse_loss(self.last(x), y)


def noisy():
    torch.manual_seed(0)
    model = Noisy().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def of_noise(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, generator=generator).double(), torch.randn(8, 1, generator=generator).double()


def noisy_run(_group, options, looking):
    """Train three batches, evaluating a fourth in between or not; return the losses."""
    model, optimizer = noisy()
    step, other = train_step(model, of_noise(0), optimizer, Strategy(**options)), copy.deepcopy(model).eval()
    torch.manual_seed(1)
    losses, looks = [], []
    for number in range(3):
        losses.append(step(*of_noise(number)).item())
        if looking:
            looks.append(step.evaluate(*of_noise(9)).item())
            with torch.no_grad():
                looks.append(whole_of(step, other)(*of_noise(9)).item())
    assert model.training
    assert all(module.training for module in step.modules)
    step.close()
    return losses, looks


def whole_of(step, model):
    """Return the model with this rank's state, which must be whole."""
    shards = {name: shard.local for name, shard in step.tensor_shards().items()}
    model.load_state_dict(shards)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [DATA, {**DATA, "sharding": ShardingOptions(zero_stage=1)}, {**DATA, "pipeline": PipelineOptions(degree=1)}],
)
def test_without_dropout_by_running_statistics_and_training_goes_on_as_if_nobody_had_looked(ranks, options):
    looking, alone = ranks(2).run(noisy_run, options, True), ranks(2).run(noisy_run, options, False)
    for (losses, looks), (others, _) in zip(looking, alone, strict=True):
        assert losses == others
        torch.testing.assert_close(looks[::2], looks[1::2], rtol=1e-12, atol=0)
        assert len(set(looks)) > 2


def pipeline(schedule, virtual=1):
    options = PipelineOptions(degree=2, micro_batches=4, schedule=schedule, virtual_stages=virtual)
    return {"mode": "data", "pipeline": options, "overlap": OverlapOptions(operators=False)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options", "more"),
    [
        pytest.param(2, pipeline("gpipe"), {}, marks=pytest.mark.stress),
        (2, {**pipeline("1f1b"), "recompute": LAYERS}, {}),
        (2, pipeline("interleaved_1f1b", 2), {}),
        pytest.param(2, pipeline("zero_bubble", 2), {}, marks=pytest.mark.stress),
        (2, pipeline("zbv", 2), {}),
        (4, {**TP, "sharding": ShardingOptions(zero_stage=3), "recompute": LAYERS}, {}),
        (4, {**TP, "pipeline": PipelineOptions(micro_batches=2)}, {}),
        (2, DATA, {"static": False}),
        (2, {"mode": "hybrid", "mesh": {"dp": 2}}, {}),
    ],
    ids=["gpipe", "1f1b", "interleaved", "zero bubble", "zbv", "zero 3", "micro-batches", "eager", "hybrid"],
)
@on_ranks()
def test_every_way_to_run_evaluates_as_one_process_and_trains_on(_group, options, more):
    model, optimizer = model_and_optimizer()
    step = train_step(model, gpt.batch_of(0), optimizer, Strategy(**options), **more)
    whole, of_whole = model_and_optimizer()
    found, expected = [], []
    for number in range(2):
        found.append(step.evaluate(*gpt.batch_of(5)).item())
        expected.append(whole(*gpt.batch_of(5)).item())
        found.append(step(*gpt.batch_of(number)).item())
        loss = whole(*gpt.batch_of(number))
        loss.backward()
        of_whole.step()
        of_whole.zero_grad()
        expected.append(loss.item())
    worst = farthest(step.tensor_shards(), whole.state_dict())
    step.close()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert worst < 1e-9


class Branching(nn.Module):
    """Runs other operators in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, y):
        x = self.linear(x)
        return F.mse_loss(x * 2 if self.training else x, y)


class Partly(nn.Module):
    """A norm and dropout in a submodule in training mode under a root in evaluation mode."""

    def __init__(self, times=1):
        super().__init__()
        self.times = times
        self.body = nn.ModuleDict({"norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5), "linear": nn.Linear(8, 8)})

    def forward(self, x, y):
        for _ in range(self.times):
            x = self.body["drop"](self.body["norm"](self.body["linear"](x)))
        return F.mse_loss(x[:, :1] + torch.rand(8, 1).to(x) * 0, y)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(2)
def test_parts_that_train_under_a_root_that_does_not(_group, times):
    """Evaluate a model, its root in evaluation mode, its submodules training, also a norm that runs twice."""
    torch.manual_seed(0)
    model = Partly(times).double().eval()
    model.body.train()
    step = train_step(model, of_noise(0), torch.optim.SGD(model.parameters(), lr=0.1), Strategy(**DATA))
    step(*of_noise(1))
    before = torch.get_rng_state()
    found = [step.evaluate(*of_noise(2)).item() for _ in range(2)]
    drawn = torch.equal(torch.get_rng_state(), before)
    modes = [module.training for module in model.modules()]
    expected = whole_of(step, copy.deepcopy(model)).eval()(*of_noise(2)).item()
    step.close()
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-12)
    assert drawn
    assert modes == [False, *[True] * 4]


class Merging(nn.Module):
    """Changes its weights with its mode, like adapters merged for evaluation."""

    def __init__(self):
        super().__init__()
        self.linear, self.merged = nn.Linear(8, 1), False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)

    def forward(self, x, y):
        return F.mse_loss(self.linear(x.detach() if self.merged else x), y)


@on_ranks(2)
def test_a_models_own_way_to_change_its_mode_is_taken_back_too(_group):
    model = Merging().double()
    strategy = Strategy(mode="hybrid", mesh={"dp": 2})
    step = train_step(model, of_noise(0), torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    step.evaluate(*of_noise(0))
    step.close()
    assert not model.merged


@on_ranks(2)
def test_attention_with_dropout_is_no_evaluation_either(_group):
    class Attending(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)

    x, model = torch.ones(2, 2, 4, 4), Attending()
    sharded = ShardedModule(
        model, propagate(trace(model, (x,)), ProcessMesh([0, 1], ["dp"]), objective="redistribution")
    )
    with pytest.raises(ValueError, match="was traced in training mode"):
        sharded.eval()


class OtherNumbers(Branching):
    def forward(self, x, y):
        return F.mse_loss(self.linear(x) * torch.tensor([2.0 if self.training else 1.0], dtype=x.dtype), y)


def test_other_constants_in_evaluation_are_seen():
    model = OtherNumbers().double()
    evaluation = in_evaluation(trace(model, of_noise(0)))
    check_evaluation(evaluation, trace(model, of_noise(0)))
    with pytest.raises(ValueError, match=r"with other arguments than in training"):
        check_evaluation(evaluation, trace(model.eval(), of_noise(0)))


def branching(_group):
    model = Branching().double()
    step = train_step(model, of_noise(0), torch.optim.SGD(model.parameters(), lr=0.1), Strategy(**DATA))
    try:
        with pytest.raises(StrategyOptionError, match=r"runs \S+ where it ran aten\.mul\.Tensor"):
            step.evaluate(*of_noise(0))
        with pytest.raises(ValueError, match="1 arguments were given"):
            step.evaluate(of_noise(0)[0])
        return step(*of_noise(0)).item()
    finally:
        step.close()


def test_a_model_that_does_otherwise_in_evaluation_is_refused_and_trains_on(ranks):
    first, second = ranks(2).run(branching)
    assert first == second


def test_the_graph_in_evaluation_is_what_is_traced_there():
    model, _ = noisy()
    training = trace(model, of_noise(0))
    evaluation = in_evaluation(training)
    check_evaluation(evaluation, trace(model.eval(), of_noise(0)))
    assert list(evaluation.nodes) == list(training.nodes)
    assert (len(training.updates), len(evaluation.updates)) == (3, 0)
    with pytest.raises(ValueError, match="changes more of the model"):
        check_evaluation(training, trace(model, of_noise(0)))
