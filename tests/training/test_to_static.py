"""One marked model in both modes: eager on DTensors and by to_static, against one card in float64."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marks import promise
from one_card import losses_of
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ascend_parallel.sharding import (
    ProcessMesh,
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    StrategyError,
    dtensor_from_local,
    explain,
    propagate,
    reshard,
    shard_dataloader,
    shard_layer,
    shard_optimizer,
    shard_tensor,
    trace,
    unshard,
)
from ascend_parallel.sharding.redistribute.collectives import recorded
from ascend_parallel.training import AmpOptions, PipelineOptions, Strategy, StrategyOptionError, to_static
from ascend_parallel.training.to_static import StaticModel, StaticPredictor

STEPS, ROWS = 4, 8
NAMES = ["dp", "mp"]


class MLP(nn.Module):
    """Two linear layers; with a mesh the hidden tensor has a mark too."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down, self.mesh = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8), mesh

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.up(x)))
        if self.mesh is not None:
            hidden = reshard(hidden, self.mesh, [Shard(0), Shard(1)])
        return self.down(hidden)


def cut(path, module, mesh):
    """Cut the first layer's outputs and the second layer's inputs along mp."""
    if isinstance(module, nn.Linear):
        placement = Shard(0) if path == "up" else Shard(1)
        module.weight = shard_tensor(module.weight, mesh, [Replicate(), placement])
    if path == "up":
        module.bias = shard_tensor(module.bias, mesh, [Replicate(), Shard(0)])


def data():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(STEPS * ROWS, 24, generator=generator, dtype=torch.float64)
    return TensorDataset(rows[:, :16], rows[:, 16:])


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained():
    """The truth: losses and parameters of one card."""
    model = MLP().double()
    losses = losses_of(model, optimizer_of(model), DataLoader(data(), batch_size=ROWS), mean_square)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def mean_square(model, x, target):
    return F.mse_loss(model(x), target)


STAGES = {0: None, 1: ShardingStage1, 2: ShardingStage2, 3: ShardingStage3}


def marked(shape, stage, split=False, dtype=torch.float64):
    """Return the marked model, its optimizer, and the loader."""
    mesh = ProcessMesh(torch.arange(dist.get_world_size()).view(shape).tolist(), dim_names=NAMES)
    model = shard_layer(MLP(mesh).to(dtype), mesh, cut)
    optimizer = optimizer_of(model)
    if stage is not None:
        shard_optimizer(optimizer, STAGES[stage]("dp") if stage else None)
    batches = [tuple(tensor.to(dtype) for tensor in batch) for batch in DataLoader(data(), batch_size=ROWS)]
    if split:
        place = mesh.coordinate(dist.get_rank())[0]
        batches = [tuple(tensor.chunk(shape[0])[place] for tensor in batch) for batch in batches]
    return model, optimizer, shard_dataloader(batches, mesh, "dp", is_dataset_splitted=split)


def state_of(model):
    return {name: unshard(parameter.detach()) for name, parameter in model.named_parameters()}


def eager(_group, shape, stage, micro_batches):
    """Train the marked model as it is; the gradients of some micro-batches add up."""
    model, optimizer, loader = marked(shape, stage)
    losses = []
    for x, target in loader:
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro_batches):
            loss = unshard(nn.functional.mse_loss(model(x), target)) / micro_batches
            loss.backward()
            total += loss.item()
        if stage >= 2:
            placements = model.norm.weight.grad.placements
            assert placements[0] == Shard(0)
            assert model.norm.weight.placements[0] == (Shard(0) if stage == 3 else Replicate())
        optimizer.step()
        losses.append(total)
    return losses, state_of(model)


def static(_group, shape, stage, split):
    """Train the marked model by the graph; afterwards it is as marked, with the trained values."""
    model, optimizer, loader = marked(shape, stage, split)
    before = {name: parameter.placements for name, parameter in model.named_parameters()}
    training = to_static(model, loader, nn.MSELoss(), optimizer)
    if stage != 3:
        held = training.step.planned.plan.layouts
        layouts = {value.node: tuple(each.placement for each in layout) for value, layout in held.items()}
        assert {layouts[f"p_{name.replace('.', '_')}"] == before[name] for name in before} == {True}
    assert training.step.strategy.sharding.zero_stage == stage
    losses = [training(*batch).item() for batch in loader]
    assert not optimizer.state
    training.write_back()
    training.close()
    assert before == {name: parameter.placements for name, parameter in model.named_parameters()}
    return losses, state_of(model)


def check(found):
    losses, state = trained()
    for rank_losses, rank_state in found:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(rank_state, state, rtol=1e-9, atol=1e-11)


# Each stage of ZeRO on 2 x 2 ranks; each other mesh in one of the modes, those of 8 ranks in both.
ON_A_SQUARE = [((2, 2), stage) for stage in range(4)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "stage"), [*ON_A_SQUARE, ((2, 1), 1), ((4, 2), 2)], ids=str)
def test_a_marked_model_runs_eagerly_as_one_card(ranks, shape, stage):
    check(ranks(shape[0] * shape[1]).run(eager, shape, stage, 2 if stage == 2 else 1))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "stage"), [*ON_A_SQUARE, ((1, 2), 3), ((4, 2), 0)], ids=str)
def test_the_same_marks_train_by_the_graph(ranks, shape, stage):
    check(ranks(shape[0] * shape[1]).run(static, shape, stage, False))


def test_a_loader_of_parts(ranks):
    check(ranks(4).run(static, (2, 2), 1, True))


@on_ranks(4)
def test_a_plan_keeps_the_marks(_group):
    """The placements of a traced model are those of its plan; a mark in the forward is an operator's strategy."""
    model, _, loader = marked((2, 2), None)
    mesh = model.mesh
    (x, _), *_ = loader
    graph = trace(model, (x,))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    plan = propagate(graph, mesh, objective="time", data_dim="dp")
    assert "parameter down.weight               R S(1)   [configured: shard_tensor(down.weight)]" in explain(plan)
    configured = set(plan.configured.values())
    assert {"shard_tensor(up.weight)", "shard_tensor(norm.bias)", "shard(_resharded)"} <= configured
    other = ProcessMesh([0, 1, 2, 3], dim_names=["mp"])
    with pytest.raises(StrategyError, match=r"up\.weight is placed on a mesh of {'dp': 2, 'mp': 2}"):
        propagate(graph, other, objective="redistribution")


def scaled_steps(model, optimizer, batches):
    """Train with torch's GradScaler; in the second batch the gradients of one row overflow."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for number, (x, target) in enumerate(batches):
        optimizer.zero_grad()
        factors = torch.ones(ROWS, 1, dtype=torch.float64)
        factors[0] = float("inf") if number == 1 else 1
        loss = (F.mse_loss(model(x), target, reduction="none") * factors).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((unshard(loss.detach()) if isinstance(loss, DTensor) else loss.detach(), scaler.get_scale()))
    return [(loss.item(), scale) for loss, scale in found]


def scaled(_group, stage):
    model, optimizer, loader = marked((2, 2), stage)
    return scaled_steps(model, optimizer, loader)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_is_skipped_on_all_ranks_if_one_ranks_gradients_overflow(ranks, stage):
    model = MLP().double()
    expected = scaled_steps(model, optimizer_of(model), DataLoader(data(), batch_size=ROWS))
    assert [scale for _, scale in expected] == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
    for found in ranks(4).run(scaled, stage):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def in_bf16(_group):
    """The marks with mixed precision and micro-batches."""
    model, optimizer, loader = marked((2, 2), 1, dtype=torch.float32)
    amp = AmpOptions(dtype="bfloat16", level="O1")
    strategy = Strategy(amp=amp, pipeline=PipelineOptions(micro_batches=2), max_norm=1e9)
    training = to_static(model, loader, nn.MSELoss(), optimizer, strategy)
    found = [training.evaluate(*next(iter(loader))).item(), *(training(*batch).item() for batch in loader)]
    training.close()
    return found


def test_the_other_options_of_a_strategy(ranks):
    losses, _ = trained()
    for evaluated, *found in ranks(4).run(in_bf16):
        torch.testing.assert_close(found, losses, rtol=0.02, atol=0)
        assert evaluated == pytest.approx(found[0], rel=1e-3)


class Tied(nn.Module):
    """An embedding, and a head that shares its weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.mid, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(torch.tanh(self.mid(self.emb(tokens)))), targets)


def tied(_group, marked_names, is_static):
    """Train with these names of the tied weight marked; return the losses and the number of parameters."""
    mesh = ProcessMesh([[0, 1]], dim_names=NAMES)

    def cut(path, module, mesh):
        if path in marked_names:
            module.weight = shard_tensor(module.weight, mesh, [Replicate(), Shard(0)])

    model = shard_layer(Tied().double(), mesh, cut)
    assert model.head.weight is model.emb.weight
    assert model.emb.weight.placements[1] == Shard(0)
    optimizer, loader = optimizer_of(model), shard_dataloader(TOKENS, mesh, "dp")
    training, losses = to_static(model, loader, optimizer=optimizer) if is_static else None, []
    for batch in loader:
        loss = unshard(model(*batch)) if training is None else training(*batch)
        if training is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    if training is not None:
        training.close()
    return losses


TOKENS = [tuple(batch) for batch in torch.randint(0, 32, (STEPS, 2, 8), generator=torch.Generator().manual_seed(1))]


@promise("tied-weights")
@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("marked_names", [("emb",), ("head",), ("emb", "head")], ids=str)
def test_a_tied_weight_stays_tied_whichever_name_is_marked(ranks, marked_names, is_static):
    model = Tied().double()
    expected = losses_of(model, optimizer_of(model), TOKENS)
    for losses in ranks(2).run(tied, marked_names, is_static):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


@on_ranks(4)
def test_batches_may_be_nested(_group):
    """Batches of nested tuples; the plan may cut further what no one reads, and the target of two."""
    model, optimizer, loader = marked((2, 2), 0)
    batches = [((x, x), {"target": target}) for x, target in loader.loader]
    loader = shard_dataloader(batches, model.mesh, "dp")
    training = to_static(model, loader, lambda model, x, y: F.mse_loss(model(x[0]), y["target"]), optimizer)
    found = [training(*batch).item() for batch in loader]
    training.close()
    torch.testing.assert_close(found, trained()[0], rtol=1e-12, atol=0)


class Dropping(MLP):
    """Returns a dict, with what dropout would drop in training."""

    def forward(self, x):
        return {"y": F.dropout(super().forward(x), 0.5, self.training), "x": x}


def predicted(_group):
    """Predict, with a loss and without; the loader is not read where input_spec is given."""
    _, _, loader = marked((2, 2), None)
    mesh = loader.mesh
    model = shard_layer(Dropping(mesh).double(), mesh, cut)
    spec = [torch.empty(ROWS, 16, dtype=torch.float64, device="meta")]
    predictor = to_static(model, shard_dataloader(iter(()), mesh, "dp"), input_spec=spec)
    outputs = [predictor(x) for x, _ in loader]
    assert not outputs[0]["y"].requires_grad
    by_loss = to_static(model, loader, lambda model, x, target: F.mse_loss(model(x)["y"], target))
    losses = [by_loss(*batch).item() for batch in loader]
    assert model.training
    nn.init.zeros_(model.norm.bias)
    with pytest.raises(RuntimeError, match=r"changed since to_static \(norm.bias\): call to_static again"):
        predictor(next(iter(loader))[0])
    return outputs, losses


def test_without_an_optimizer_a_marked_model_predicts(ranks):
    model = Dropping().double().eval()
    with torch.no_grad():
        batches = list(DataLoader(data(), batch_size=ROWS))
        expected = [model(x) for x, _ in batches]
        losses = [F.mse_loss(output["y"], target).item() for output, (_, target) in zip(expected, batches, strict=True)]
    for found, by_loss in ranks(4).run(predicted):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_loss, losses, rtol=1e-12, atol=0)


def scheduled(_group):
    """A scheduler over the optimizer that was given would change nothing; over the step's it does."""
    model, optimizer, loader = marked((2, 2), 0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    training = to_static(model, loader, nn.MSELoss(), optimizer)
    after = torch.optim.lr_scheduler.StepLR(training.step.optimizer, 1, 0.5)
    found = []
    for batch in loader:
        found.append(training(*batch).item())
        after.step()
    before.step()
    with pytest.raises(RuntimeError, match=r"changed \(lr from 0.05 to 0.025\) since, which trains nothing"):
        training(*batch)
    optimizer.param_groups[0]["lr"] = 0.05
    training.write_back()
    training(*batch)  # its own write is no change
    with torch.no_grad():
        model.norm.bias.zero_()
    with pytest.raises(RuntimeError, match=r"has changed since \(norm.bias\), which trains nothing"):
        training(*batch)
    training.close()
    return found


def test_a_scheduler_is_made_over_the_optimizer_of_the_step(ranks):
    model = MLP().double()
    optimizer, expected = optimizer_of(model), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in DataLoader(data(), batch_size=ROWS):
        expected += losses_of(model, optimizer, [batch], mean_square)
        scheduler.step()
    for found in ranks(4).run(scheduled):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@on_ranks(2)
def test_what_is_refused(_group):
    model, optimizer, loader = marked((2, 1), 1)
    strategy = Strategy(mode="data", mesh={"dp": 2})
    with pytest.raises(StrategyOptionError, match="mode='data' with to_static: the marks decide"):
        to_static(model, loader, nn.MSELoss(), optimizer, strategy)
    with pytest.raises(StrategyOptionError, match=r"the model is marked on {'dp': 2, 'mp': 1}"):
        to_static(model, loader, nn.MSELoss(), optimizer, Strategy(mesh={"dp": 1, "mp": 2}))
    staged = Strategy(pipeline=PipelineOptions(micro_batches=2))
    with pytest.raises(StrategyOptionError, match=r"pipeline=.* without an optimizer: leave it out"):
        to_static(model, loader, nn.MSELoss(), strategy=staged)
    with pytest.raises(ValueError, match="yields no batch"):
        to_static(model, shard_dataloader([], model.mesh, "dp"), nn.MSELoss(), optimizer)
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is no DTensor: call shard_layer"):
        to_static(plain, loader, nn.MSELoss(), torch.optim.SGD(plain.parameters()))
    with pytest.raises(ValueError, match="a batch of 3 rows on 2 ranks along dp"):
        next(iter(shard_dataloader([(torch.ones(3, 2),)], model.mesh, "dp")))
    with pytest.raises(ValueError, match="'pp' is no dimension"):
        shard_dataloader(loader, model.mesh, "pp")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0: give a number of backwards"):
        shard_optimizer(optimizer, None, gradient_accumulation_steps=0)
    assert ShardingStage1("dp", ProcessMesh([1, 0], ["dp"]))(model.up.weight) is None  # a parameter on another mesh
    (x, target), *_ = loader
    nn.functional.mse_loss(model(x), target).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="the optimizer has stepped"):
        to_static(model, loader, nn.MSELoss(), optimizer)


@on_ranks(4)
def test_inputs_on_meshes_of_their_own(_group):
    """Inputs on meshes of their own, in tuples and dicts; a dimension by its index."""
    rank = dist.get_rank()
    whole, meshes = (
        ProcessMesh([[0, 1], [2, 3]], dim_names=NAMES),
        [ProcessMesh(half, NAMES) for half in ([[0], [1]], [[2], [3]])],
    )
    batch, found = (torch.arange(8.0).view(4, 2), torch.arange(4)), []
    for loader, keys in (
        (shard_dataloader([batch], meshes, "dp"), (0, 1)),
        (shard_dataloader([{"x": batch[0], "y": batch[1]}], meshes, ["dp", None], input_keys=["x", "y"]), ("x", "y")),
        (shard_dataloader([batch], whole, 0), (0, 1)),
    ):
        (given,) = loader
        found.append([(given[key].placements, given[key].to_local().tolist()) for key in keys])
    rows = batch[0][2 * (rank % 2) :][:2].tolist(), batch[1][2 * (rank % 2) :][:2].tolist()
    cut, replicated, first = (Shard(0), Replicate()), (Replicate(), Replicate()), rank < 2
    for number, placements in ((0, cut), (1, replicated)):
        assert [each[0] for each in found[number]] == [cut, placements]
        assert found[number][0][1] == (rows[0] if first else [])
        assert found[number][1][1] == ([] if first else batch[1].tolist() if number else rows[1])
    assert found[2] == [(cut, tensor[2 * (rank // 2) :][:2].tolist()) for tensor in batch]
    for wrong, message in (
        (lambda: shard_dataloader([batch], meshes, ["dp"]), "with 2 meshes: give one for all, or one for each mesh"),
        (lambda: shard_dataloader([batch], whole, 2), "the mesh has 2 dimensions, dp, mp"),
        (
            lambda: shard_dataloader([batch], meshes, "dp", is_dataset_splitted=True),
            "with 2 meshes and shard_dims='dp'",
        ),
        (lambda: shard_dataloader([batch], meshes, "dp", input_keys=["x"]), "give the key of each mesh's input"),
        (lambda: next(iter(shard_dataloader([{"x": batch[0]}], meshes, "dp"))), "a batch is a dict of 1"),
        (lambda: next(iter(shard_dataloader([batch[:1]], meshes, "dp"))), "has 1 inputs, and 2 meshes are given"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def accumulated(_group, steps):
    """Add up two backwards before a step; return the losses, and the sums over ranks after each backward."""
    model, optimizer, loader = marked((2, 1), None)
    shard_optimizer(optimizer, ShardingStage2("dp", model.mesh), gradient_accumulation_steps=steps)
    losses = []
    for x, target in loader:
        optimizer.zero_grad()
        sums = []
        for _ in range(2):
            loss = unshard(nn.functional.mse_loss(model(x), target)) / 2
            with recorded() as events:
                loss.backward()
            sums.append(sum(event.kind in ("all_reduce", "reduce_scatter") for event in events))
        assert model.norm.weight.grad.placements[0] == Shard(0)
        optimizer.step()
        losses.append(2 * loss.item())
    return losses, sums


def test_gradients_are_cut_after_the_last_backward(ranks):
    expected, _ = trained()
    for steps, first in ((1, True), (2, False)):
        for losses, sums in ranks(2).run(accumulated, steps):
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
            assert (sums[0] > 0) is first
            assert first or sums[1] > 0


@on_ranks(2)
def test_tensors_of_parts(_group):
    """Each rank gives its own part, and the gradient comes back to the part."""
    rank, mesh = dist.get_rank(), ProcessMesh([0, 1], dim_names=["dp"])
    local = torch.full((2, 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
    rows = dtensor_from_local(local, mesh, [Shard(0)])
    assert rows.shape == (4, 3)
    weights = shard_tensor(torch.arange(12.0, dtype=torch.float64).view(4, 3), mesh, [Replicate()])
    unshard((rows * weights).sum()).backward()
    assert torch.equal(local.grad, torch.arange(12.0, dtype=torch.float64).view(4, 3)[2 * rank : 2 * rank + 2])
    terms = dtensor_from_local(torch.full((2,), rank + 1.0), mesh, [Partial("sum")])
    assert unshard(terms).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="give one placement for each mesh dimension"):
        dtensor_from_local(local, mesh, [Shard(0), Replicate()])
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            dtensor_from_local(local, mesh[0], [Shard(0)])
    else:
        dtensor_from_local(local, mesh[0], [Shard(0)])


@pytest.mark.parametrize("kind", [StaticModel, StaticPredictor])
def test_the_words_of_paddles_dist_model_are_answered(kind):
    made = object.__new__(kind)
    for name in ("train", "eval", "predict", "mode", "state_dict", "set_state_dict"):
        with pytest.raises(AttributeError, match=f"{kind.__name__} has no '{name}', which is of Paddle's DistModel: "):
            getattr(made, name)
    with pytest.raises(AttributeError, match=r"has no 'evaluat'$"):
        made.evaluat  # noqa: B018
    page = (Path(__file__).parents[2] / "examples/for_paddle_and_mindspore_users/README.md").read_text(encoding="utf-8")
    for word in (
        "train()",
        "eval()",
        "predict()",
        "mode`",
        "state_dict()",
        "set_state_dict()",
        "stop_gradient=",
        "meshes",
    ):
        assert word in page
