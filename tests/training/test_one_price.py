"""One price of a step: of `predict`, which has it described; of plan-training's evaluation of the same degrees of a
traced model; and of `strategy`, for the strategy that stands for them.

What a described model cannot know, and the layouts here leave out:

- A plan may cut a stage inside a layer; a described stage has whole layers. Beside few layers a stage that costs up to
  half a layer, such as 9 % of a stage of 8 layers beside the logits of a large vocabulary.
- A plan of tensor-parallel ranks may choose other layouts than Megatron-core's, whole weights or gathered ones where
  that is faster: 8 % at Llama 2 7B on 4 ranks. Where it chooses Megatron-core's, as for GPT-3, the steps agree.
- A preset's vocabulary is padded to a multiple of 128 in the traced model.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ascend_parallel.settings import Settings
from ascend_parallel.training import Strategy, plan_training
from ascend_parallel.training.degrees.evaluation import Evaluation
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.presets import built_preset, traced_preset
from ascend_parallel.training.degrees.rescaling import GraphFamily
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.training.explain import Explanation
from ascend_parallel.training.optimizer import predicted_memory
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import MEGATRON
from ascend_parallel.tuning.cost_model.memory import step_memory
from ascend_parallel.tuning.cost_model.models import Batch, find_model
from ascend_parallel.tuning.cost_model.step import Layout, operators_of, step_time
from ascend_parallel.tuning.step_time.replicas import ReplicatedState, Weights
from ascend_parallel.tuning.step_time.runtimes import MEGATRON as MEGATRON_CORE
from ascend_parallel.tuning.step_time.runtimes import PLANNED

WITHIN = 0.03
HARDWARE = find_hardware("910b")
PIPELINE = {"pp": 2, "schedule": "1f1b"}
LAYOUTS = {
    "dense": ("llama2-7b", 4096, {"dp": 8, "micro_batches": 8}),
    "ZeRO 1": ("llama3-8b", 8192, {"dp": 8, "micro_batches": 8, "zero_stage": 1}),
    "ZeRO 2": ("llama2-7b", 4096, {"dp": 16, "micro_batches": 4, "zero_stage": 2}),
    "ZeRO 3": ("llama2-7b", 4096, {"dp": 16, "micro_batches": 4, "zero_stage": 3}),
    "pipeline": ("llama2-7b", 4096, {"dp": 32, "micro_batches": 32, "zero_stage": 1, **PIPELINE}),
    "virtual stages": (
        "llama2-7b",
        4096,
        {"dp": 2, "pp": 4, "micro_batches": 16, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    ),
    "recompute": (
        "llama2-7b",
        4096,
        {"dp": 4, "micro_batches": 16, "recompute": "layers+collectives", "zero_stage": 1, **PIPELINE},
    ),
    "experts": ("mixtral-8x7b", 4096, {"dp": 2, "ep": 8, "rows": 8, "micro_batches": 8}),
    "experts in a pipeline": (
        "mixtral-8x7b",
        4096,
        {"dp": 2, "ep": 8, "rows": 8, "micro_batches": 8, "zero_stage": 1, **PIPELINE},
    ),
    "context parallel": (
        "llama2-7b",
        32768,
        {"dp": 2, "cp": 8, "micro_batches": 4, "cp_exchange": "heads", "cp_groups": 1},
    ),
    "exchanged in groups": (
        "llama2-7b",
        32768,
        {"dp": 2, "cp": 8, "micro_batches": 4, "cp_exchange": "heads", "cp_groups": 4},
    ),
    "gathered in groups": (
        "llama3-8b",
        32768,
        {"dp": 2, "cp": 8, "micro_batches": 4, "cp_exchange": "gather", "cp_groups": 4},
    ),
    "tensor parallel": (
        "gpt3-175b",
        2048,
        {"dp": 2, "tp": 8, "pp": 8, "micro_batches": 32, "schedule": "1f1b"},
    ),
}


@cache
def planned(name, length, degrees):
    """Return the seconds and the bytes that plan-training evaluates, once for both tests."""
    traced = traced_preset(find_model(name), length, degrees.dp * degrees.rows * degrees.micro_batches, "bfloat16")
    ranks = degrees.dp * degrees.replica * degrees.pp
    planner = Planner(cache(GraphFamily(traced.trace).at), HARDWARE, Settings(), ranks=ranks)
    evaluation = Evaluation(HARDWARE, planner, masters=traced.masters)
    return evaluation.breakdown(degrees).total, evaluation.memory(degrees)


def described(name, length, degrees, runtime=PLANNED):
    """Return the seconds and the bytes that `predict` says."""
    batch = Batch(
        sequence=length,
        micro_batch=degrees.rows // degrees.ep,
        tp=degrees.tp,
        cp=degrees.cp,
        cp_exchange=degrees.cp_exchange,
        cp_groups=degrees.cp_groups or 1,
        ep=degrees.ep,
        activation=operators_of(runtime),
        rotary=operators_of(runtime),
    )
    layout = Layout(
        dp=degrees.dp * degrees.ep,
        pp=degrees.pp,
        micro_batches=degrees.micro_batches,
        recompute="none" if degrees.recompute == "none" else "full",
        virtual_stages=degrees.virtual_stages,
        zero=degrees.zero_stage,
        runtime=runtime,
    )
    model = find_model(name)
    return step_time(CostModel(HARDWARE), model, batch, layout, MEGATRON).total, step_memory(model, batch, layout)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predict_and_plan_training_say_the_same_of_a_step(layout):
    name, length, given = LAYOUTS[layout]
    degrees = Degrees(**({"dp": 1, "tp": 1, "pp": 1, "rows": 1} | given))
    (seconds, memory), (expected, bytes_expected) = planned(name, length, degrees), described(name, length, degrees)
    assert seconds == pytest.approx(expected, rel=WITHIN)
    assert memory.total == pytest.approx(bytes_expected.total, rel=WITHIN)


def stress(layout):
    return pytest.param(layout, marks=pytest.mark.stress)


# One of each kind, whose whole plan is made; all of them are compared above.
TOLD = ("ZeRO 2", "ZeRO 3", "pipeline", "virtual stages", "recompute", "experts", "context parallel")


@pytest.mark.sample("ZeRO 2", "recompute")
@pytest.mark.parametrize("layout", [layout if layout in TOLD else stress(layout) for layout in LAYOUTS])
def test_strategy_says_of_a_step_what_plan_training_said(layout):
    name, length, given = LAYOUTS[layout]
    degrees = Degrees(**({"dp": 1, "tp": 1, "pp": 1, "rows": 1} | given))
    seconds, memory = planned(name, length, degrees)
    rows = degrees.dp * degrees.rows * degrees.micro_batches
    strategy = Strategy.from_dict(degrees.tables(["layers.*"], "910b", "bfloat16"))
    explained = Explanation(plan_training(strategy, *built_preset(find_model(name), length, rows)))
    step = explained.as_dict()["step"]
    assert step["seconds"] == pytest.approx(seconds, rel=0.015)
    held = sum((vars(memory) | {"buffers": 0.0}).values())  # `strategy` leaves buffers out
    assert explained.fullest.total == pytest.approx(held, rel=WITHIN)
    cards = degrees.dp * degrees.replica * degrees.pp
    assert step["tokens_per_second_per_card"] == pytest.approx(rows * length / step["seconds"] / cards)
    macs = rows * length * find_model(name).macs_per_token(length)
    needed = 3 * macs / step["seconds"] / cards / CostModel(HARDWARE).peak(2)
    assert step["mfu"] == pytest.approx(needed, rel=0.01)  # the traced vocabulary is padded


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("masters", [False, True])
def test_a_rank_of_a_strategy_holds_what_the_step_model_says(zero_stage, micro_batches, masters):
    """predicted_memory has real slices, and the same bytes of each element."""
    weights = Weights(
        elements=np.array([4096.0]), own=np.array([1024.0]), itemsize=2, replicas=4, collective=lambda kind, nbytes: 0.0
    )
    state = ReplicatedState(
        weights=[weights],
        ranks_of_stages=(0,),
        layers=(1,),
        micro_batches=micro_batches,
        zero_stage=zero_stage,
        under_backward=True,
        masters=masters,
        runtime=PLANNED,
        stream=lambda nbytes: 0.0,
    )
    held = predicted_memory(
        [(64, 64)],
        zero_stage=zero_stage,
        ranks=4,
        itemsize=2,
        master_itemsize=4 if masters else None,
        wide_gradients=micro_batches > 1,
    )
    assert [float(of_ranks[0]) for of_ranks in state.held] == [held.parameters, held.gradients, held.optimizer]


def test_fused_operators_are_what_a_plan_does_not_have():
    """Megatron-core's step is faster and smaller: its norms, rotary embedding and activation are a kernel each."""
    degrees = Degrees(dp=8, tp=1, pp=1, rows=1, micro_batches=8)
    (seconds, memory), (fused, fused_memory) = (
        described("llama2-7b", 4096, degrees, runtime)
        for runtime in (PLANNED, replace(MEGATRON_CORE, sums_under_backward=True))
    )
    assert 1.02 < seconds / fused < 1.15
    assert memory.activations > 1.4 * fused_memory.activations
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(memory, kind) == getattr(fused_memory, kind)
