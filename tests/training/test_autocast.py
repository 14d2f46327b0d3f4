"""amp.level "O1" and amp.keep_fp32: casts by operator, on one rank as torch.autocast, on several as the whole model."""

from unittest.mock import patch

import gpt
import pytest
import torch
import torch.distributed as dist
from mesh_stages import MEGATRON, SQUARE
from one_card import farthest
from torch import nn
from torch.nn import functional as F

from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.planner.operator_strategy import operator_name
from ascend_parallel.training import (
    AmpOptions,
    PipelineOptions,
    Recompute,
    ShardingOptions,
    Strategy,
    StrategyOptionError,
    options,
    train_step,
)
from ascend_parallel.training.autocast import autocast, is_cast
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.training.training_plan import plan_training

STEPS = 4
O1 = AmpOptions(dtype="bfloat16", level="O1")
TP = {"mode": "semi_auto", "mesh": SQUARE, "operators": MEGATRON}


class MLP(nn.Module):
    """Linear layers and pointwise operators; on a CPU torch.autocast casts them as the lists here do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, target):
        hidden = F.gelu(self.up(x))
        return F.mse_loss(self.down(hidden) + 0.5 * hidden[:, :8], target)


def mlp_batch(number):
    rows = torch.randn(12, 24, generator=torch.Generator().manual_seed(number))
    return rows[:, :16], rows[:, 16:]


def autocast_whole(dtype=torch.bfloat16):
    """Train the MLP on one card by torch.autocast."""
    model = MLP()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for number in range(STEPS):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(*mlp_batch(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_mlp(_group, given):
    model = MLP()
    step = train_step(model, mlp_batch(0), torch.optim.SGD(model.parameters(), lr=0.5), Strategy(**given))
    batches = [mlp_batch(number) for number in range(STEPS)]
    if given.get("mode") == "hybrid":
        batches = [tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch) for batch in batches]
    losses = [step(*batch).item() for batch in batches]
    found = {name: (shard.local.detach().clone(), shard.offsets) for name, shard in step.tensor_shards().items()}
    step.close()
    return losses, found


def test_one_rank_is_torch_autocast_bit_for_bit(ranks):
    ((losses, found),) = ranks(1).run(train_mlp, {"mode": "data", "amp": O1})
    expected, state = autocast_whole()
    assert losses == expected
    for name, (local, _) in found.items():
        assert local.dtype == torch.float32
        assert torch.equal(local, state[name]), name


@pytest.mark.slow
def test_two_replicas_of_a_model_with_its_own_collectives_are_torch_autocast(ranks):
    expected, state = autocast_whole()
    for losses, found in ranks(2).run(train_mlp, {"mode": "hybrid", "mesh": {"dp": 2}, "amp": O1}):
        torch.testing.assert_close(losses, expected, rtol=2**-8, atol=0)
        for name, (local, _) in found.items():
            torch.testing.assert_close(local, state[name], rtol=0, atol=2e-3)


def test_float16_is_scaled(ranks):
    amp = AmpOptions(dtype="float16", level="O1")
    expected, _ = autocast_whole(torch.float16)
    for losses, _ in ranks(2).run(train_mlp, {"mode": "data", "mesh": {"dp": 2}, "amp": amp}):
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)


@patch.object(options, "DTYPES", ("bfloat16", "float64"))
def narrowed(_group, given, dtype, **amp):
    """Train the GPT whose weights are fp32 with casts to `dtype`; return its losses and its farthest state from fp64.

    With "float64" as the lower precision all casts and layouts are those of a training in bf16, and their results are
    exact to fp32, which shows errors of the layouts.
    """
    torch.manual_seed(0)
    model = gpt.GPT()
    truth = gpt.GPT().double()
    truth.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exact = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    strategy = Strategy(**given, amp=AmpOptions(dtype=dtype, level="O1", **amp))
    step = train_step(model, gpt.batch_of(0), optimizer, strategy)
    casts = sum(map(is_cast, step.planned.plan.graph.nodes.values()))
    errors = []
    for number in range(STEPS):
        loss = truth(*gpt.batch_of(number))
        exact.zero_grad()
        loss.backward()
        exact.step()
        errors.append(abs(step(*gpt.batch_of(number)).item() / loss.item() - 1))
    worst = farthest(step.tensor_shards(), truth.state_dict())
    dtypes = {shard.local.dtype for shard in step.tensor_shards().values() if shard.local.is_floating_point()}
    step.close()
    assert dtypes == {torch.float32}
    assert casts > 20
    return max(errors), worst


LAYERS = Recompute(modules=["layers.*"])
STAGED = {"mode": "data", "mesh": {"dp": 2}, "pipeline": PipelineOptions(degree=2, micro_batches=2)}
CASES = {
    "data": (2, {"mode": "data", "mesh": {"dp": 2}}),
    "auto": (2, {"mode": "auto", "mesh": {"dp": 1, "tp": 2}, "hardware": "cpu-gloo"}),
    "zero 2": (2, {"mode": "data", "mesh": {"dp": 2}, "sharding": ShardingOptions(zero_stage=2)}),
    "semi_auto, recompute": (4, {**TP, "recompute": LAYERS, "max_norm": 1e9}),
    "zero 1": (4, {**TP, "sharding": ShardingOptions(zero_stage=1)}),
    "zero 3": (4, {**TP, "sharding": ShardingOptions(zero_stage=3)}),
    "fused": (4, {**TP, "fused_passes": ("matmul_add",), "pipeline": PipelineOptions(micro_batches=2)}),
    "stages": (4, {**STAGED, "recompute": LAYERS}),
    "all together": (8, {**TP, "pipeline": PipelineOptions(degree=2, micro_batches=2), "recompute": LAYERS}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_casts_keep_the_layouts_right(ranks, name):
    count, given = CASES[name]
    for error, worst in ranks(count).run(narrowed, given, "float64"):
        assert error < 1e-5
        assert worst < 1e-5


def test_bf16_is_near_the_truth_and_not_exact(ranks):
    for error, worst in ranks(4).run(narrowed, TP, "bfloat16"):
        assert 1e-6 < error < 2**-7
        assert 1e-6 < worst < 0.05


def planned(**amp):
    torch.manual_seed(0)
    given = {**TP, "amp": AmpOptions(dtype="bfloat16", **amp), "recompute": Recompute(modules=["layers.*"])}
    return plan_training(Strategy(**given), gpt.GPT(), gpt.batch_of(0))


def dtypes_of(plan, operator):
    """Return the dtypes in which the calls of an operator read their floating-point tensors."""
    calls = [node.call for node in plan.graph.nodes.values() if node.call and operator_name(node) == operator]
    assert calls
    return {meta.dtype for call in calls for meta in call.inputs if meta.dtype.is_floating_point}


def test_the_lists_and_what_the_user_adds_to_them():
    plan = planned(level="O1").plan
    assert dtypes_of(plan, "linear") == dtypes_of(plan, "scaled_dot_product_attention") == {torch.bfloat16}
    assert dtypes_of(plan, "layer_norm") == dtypes_of(plan, "cross_entropy_loss") == {torch.float32}
    lists = {"keep_fp32": ("layers.1:linear",), "low_precision": ("gelu", "layers.*:layer_norm")}
    plan = planned(level="O1", **lists).plan
    assert dtypes_of(plan, "gelu") == {torch.bfloat16}
    norms = {
        node.module.split(".")[0]: node.call.inputs[0].dtype
        for node in plan.graph.nodes.values()
        if node.call and operator_name(node) == "layer_norm"
    }
    assert norms.pop("layers") == torch.bfloat16
    assert set(norms.values()) == {torch.float32}
    linears = {
        node.module: node.call.inputs[0].dtype
        for node in plan.graph.nodes.values()
        if node.call and operator_name(node) == "linear"
    }
    assert {dtype for path, dtype in linears.items() if path.startswith("layers.1")} == {torch.float32}
    assert {dtype for path, dtype in linears.items() if path.startswith("layers.0")} == {torch.bfloat16}


def test_the_collectives_next_to_matmuls_send_the_lower_dtype_and_still_overlap():
    found = {}
    for level in ("O1", "O2"):
        training = planned(level=level)
        fused = training.plan.fused(Settings()).fused
        found[level] = sorted(fusion.operator for fusion in fused)
    assert found["O1"] == found["O2"]
    assert "matmul_all_reduce" in found["O1"]
    plan = planned(level="O1").plan
    sums = [each for each in plan.conversions if each.communicates and each.value.node.startswith("linear")]
    assert sums
    assert {plan.graph.meta(each.value).dtype for each in sums} == {torch.bfloat16}


def test_o2_keeps_what_is_named_in_fp32(ranks):
    plan = planned(level="O2", keep_fp32=("*norm",)).plan
    assert dtypes_of(plan, "layer_norm") == {torch.float32}
    assert dtypes_of(plan, "linear") == {torch.bfloat16}
    amp = AmpOptions(dtype="bfloat16", keep_fp32=("mse_loss",))
    for losses, found in ranks(2).run(train_mlp, {"mode": "data", "mesh": {"dp": 2}, "amp": amp}):
        torch.testing.assert_close(losses, autocast_whole()[0], rtol=0.03, atol=0)
        assert {local.dtype for local, _ in found.values()} == {torch.bfloat16}


def evaluated(_group, given):
    model = MLP()
    step = train_step(model, mlp_batch(0), torch.optim.SGD(model.parameters(), lr=0.5), Strategy(**given))
    loss = step.evaluate(*mlp_batch(1)).item()
    step.close()
    return loss


def test_evaluation_casts_too(ranks):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = MLP().eval()(*mlp_batch(1)).item()
    assert ranks(1).run(evaluated, {"mode": "data", "amp": O1}) == [expected]


def own_code(_group):
    model, strategy = MLP(), Strategy(mode="data", mesh={"dp": 2}, amp=O1)
    with pytest.raises(StrategyOptionError, match=r"amp\.level='O1' with static=False"):
        train_step(model, mlp_batch(0), torch.optim.SGD(model.parameters(), lr=0.5), strategy, static=False)


def test_what_is_refused(ranks):
    ranks(2).run(own_code)
    for given, message in (
        ({"level": "O1"}, "without amp.dtype"),
        ({"level": "O3", "dtype": "bfloat16"}, "amp.level='O3': give one of O1, O2"),
        ({"low_precision": ("gelu",), "dtype": "bfloat16"}, "whose whole model is cast"),
        ({"keep_fp32": ("gelu",)}, "amp.keep_fp32 without amp.dtype"),
        ({"keep_fp32": "gelu", "dtype": "bfloat16"}, "give a list"),
        ({"master_grad": 1}, "amp.master_grad=1: give true or false"),
    ):
        with pytest.raises(StrategyOptionError, match=message):
            AmpOptions(**given)
    with pytest.raises(StrategyOptionError, match="did you mean gelu"):
        planned(level="O1", keep_fp32=("gelo",))
    with pytest.raises(StrategyOptionError, match=r'mode="hybrid" with amp\.low_precision'):
        Strategy(mode="hybrid", amp=AmpOptions(dtype="bfloat16", level="O1", low_precision=("gelu",)))


def test_float64_is_left_alone():
    graph = trace_with_loss(MLP().double(), mean_loss, tuple(tensor.double() for tensor in mlp_batch(0)))
    cast, casts = autocast(graph, O1)
    assert casts == ()
    assert {cast.meta(Value(name)).dtype for name in cast.nodes} == {torch.float64}
