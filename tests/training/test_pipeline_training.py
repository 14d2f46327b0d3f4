"""A pipeline trains as the whole model on one rank does: schedules, tensor-parallel stages, shared parameters."""

import functools
import importlib.util
from datetime import timedelta
from pathlib import Path

import pytest
import small_models
import torch
from allocations import peak_bytes
from crossing_model import STAGES, Crossing, crossing_batch, lines
from pool import RankPool, on_ranks
from sharded_models import made, planned, tokens_of

from ascend_parallel import Settings
from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.runtime.local_parameters import local_slice
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.training.pipeline.pipeline import Pipeline, PipelineError
from ascend_parallel.training.pipeline.split_plan import shared_parameters
from ascend_parallel.training.recompute import Recompute
from ascend_parallel.tuning.step_time.schedule import order
from ascend_parallel.tuning.step_time.timing import simulate

STEPS = 4
ROWS = 2  # of a micro-batch
# Schedule, groups of ranks, stages on each, micro-batches.
CASES = {
    "gpipe": ("gpipe", 2, 1, 4),
    "1f1b": ("1f1b", 2, 1, 4),
    "1f1b of 4": ("1f1b", 4, 1, 4),
    "interleaved": ("interleaved_1f1b", 2, 2, 4),
    "zero bubble": ("zero_bubble", 2, 2, 4),
    "zbv": ("zbv", 2, 2, 4),
}


def gpt():
    """Return a GPT whose first and last stage share the embedding."""
    return made(small_models.GPT, layers=4, width=16, vocabulary=32, length=8)


def stages_of(count):
    """Return four layers in `count` stages, the embeddings in the first, the norm and the head in the last."""
    layers = {f"layers.{layer}": layer * count // 4 for layer in range(4)}
    return {"tokens": 0, "places": 0, "norm": count - 1, **layers}


def train(group, case, overlap):
    """Train some steps beside the whole model; return both's losses."""
    schedule, groups, several, count = CASES[case]
    whole = gpt()
    draw = functools.partial(tokens_of, length=8, vocabulary=32)
    generator = torch.Generator().manual_seed(7)
    graph = trace(whole, (draw(ROWS, generator), draw(ROWS, generator)))
    meshes = lines(group.size(), groups)
    pipeline = Pipeline(
        whole,
        planned("GPT", graph, meshes[0]),
        stages_of(groups * several),
        meshes,
        schedule=schedule,
        micro_batches=count,
        overlap=overlap,
        settings=Settings(num_chunks=2),
        local_inputs=False,
    )
    ours = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    batch = draw(ROWS * count, generator), draw(ROWS * count, generator)
    losses = []
    for _ in range(STEPS):
        found = pipeline.step(*batch)
        pipeline.reduce_gradients()
        expected = whole(*batch)
        expected.backward()
        check_gradients(pipeline, whole)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append((found.item(), expected.item()))
    at = [mesh.coordinate(group.rank()) is not None for mesh in meshes].index(True)
    assert [slot.action for slot in pipeline.executed] == list(order(schedule, groups, groups * several, count)[at])
    fused = sum(bool(fusion.operator) for module in pipeline.modules for fusion in module.fused)
    return losses, fused, shared_copies(pipeline)


def shared_copies(pipeline):
    """Return this rank's shards of parameters that several stages hold, by name and place in the mesh."""
    names = list(shared_parameters(pipeline.parts))
    return [
        (name, module.coordinate, module.get_parameter(name).detach())
        for module in pipeline.modules
        for name in names
        if name in module.held
    ]


def check_gradients(pipeline, whole):
    for module in pipeline.modules:
        found = module.full_gradients()
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-11)


def check(results):
    for losses, _, _ in results:
        assert len(losses) == STEPS
        assert [ours for ours, _ in losses] == pytest.approx([theirs for _, theirs in losses], rel=1e-9)
        assert losses[-1][1] < losses[0][1]
    copies = [copy for _, _, found in results for copy in found]
    assert len(copies) == 2 * len({place for _, place, _ in copies})
    shards = {}
    for key, place, tensor in copies:
        assert torch.equal(shards.setdefault((key, place), tensor), tensor)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_each_schedule_with_one_rank_per_stage(ranks, case):
    check(ranks(CASES[case][1]).run(train, case, False))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b", "zbv"])
def test_tensor_parallel_stages(ranks, case):
    overlap = case != "zbv"
    results = ranks(4).run(train, case, overlap)
    check(results)
    assert all(fused > 0 for _, fused, _ in results) == overlap


def crossing_plan():
    """Return the crossing model, its plan for micro-batches of 4, three stages of a rank each, and a batch."""
    whole, generator, meshes = made(Crossing), torch.Generator().manual_seed(3), lines(3, 3)
    graph = trace(whole, crossing_batch(4, generator))
    return whole, propagate(graph, meshes[0], objective="redistribution"), meshes, crossing_batch(16, generator)


def crossing(group, schedule):
    """Several tensors between stages, a skipped stage, a mask, parameters in all stages; whole and local inputs."""
    whole, plan, meshes, batch = crossing_plan()
    losses = []
    for local in (False, True):
        pipeline = Pipeline(
            whole, plan, STAGES, meshes, schedule=schedule, micro_batches=4, overlap=False, local_inputs=local
        )
        given = (
            [own_part(pipeline, name, tensor) for name, tensor in zip(INPUTS, batch, strict=True)] if local else batch
        )
        whole.zero_grad()
        for _ in range(2):  # gradients of two steps add up
            losses.append((pipeline.step(*given).item(), whole(*batch).item()))
            whole(*batch).backward()
        for module in pipeline.modules:  # gradients are not summed yet
            with pytest.raises(AssertionError):
                torch.testing.assert_close(module.get_parameter("scale").grad, whole.scale.grad, rtol=1e-3, atol=1e-5)
        pipeline.reduce_gradients()
        check_gradients(pipeline, whole)
        assert all(module.get_parameter(name).grad is None for module in pipeline.modules for name in frozen(module))
        with pytest.raises(RuntimeError, match="the gradients are summed over ranks"):
            pipeline.step(*given)
        pipeline.zero_grad()
        losses.append((pipeline.step(*given).item(), whole(*batch).item()))
    assert [ours for ours, _ in losses] == pytest.approx([theirs for _, theirs in losses], rel=1e-12)
    return [set(module.state_dict()) for module in pipeline.modules]


INPUTS = ("x", "present", "targets")


def frozen(module):
    return [name for name in module.held if name == "frozen"]


def own_part(pipeline, name, whole):
    """Return a rank's parts of all micro-batches, joined."""
    plan, place = pipeline.plan, pipeline.modules[0].coordinate
    layout = plan.layouts[Value(name)]
    return torch.cat([local_slice(tensor, layout, plan.mesh.shape, place) for tensor in whole.chunk(4)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_tensors_that_cross_stages_in_all_ways(ranks, schedule):
    first, second, third = ranks(3).run(crossing, schedule)
    # Each rank holds what its stage reads, and no more.
    assert first == [{"first.weight", "first.bias", "scale", "frozen"}]
    assert second == [{"second.weight", "second.bias", "scale", "frozen"}]
    assert third == [{"third.linear.weight", "third.linear.bias", "scale"}]


class Weighted(torch.nn.Module):
    """Reads weights that are the same for every micro-batch, and a number."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, weights, power):
        return (self.last(torch.tanh(self.first(x)) * weights) ** 2 * power).mean()


@on_ranks(2)
def test_inputs_that_are_not_cut_and_a_factor(group):
    whole, generator = made(Weighted), torch.Generator().manual_seed(3)
    x, weights = torch.randn(8, 4, 4, dtype=torch.float64, generator=generator), torch.linspace(1, 2, 4).double()
    power = torch.tensor(1.5, dtype=torch.float64)
    meshes = lines(2, 2)
    plan = propagate(trace(whole, (x[:2], weights), {"power": power}), meshes[0], objective="redistribution")
    pipeline = Pipeline(whole, plan, 2, meshes, micro_batches=4, broadcast_inputs=["weights"])
    pipeline.factor = 0.5
    expected = whole(x, weights, power)
    (expected * 0.5).backward()
    assert pipeline.step(x, weights, power=power).item() == pytest.approx(expected.item(), rel=1e-12)
    pipeline.reduce_gradients()
    check_gradients(pipeline, whole)
    pipeline.zero_grad()
    with pytest.raises(ValueError, match=r"weights is \[16\] .* in every micro-batch"):
        pipeline.step(x, weights.repeat(4), power=power)


def resnet(group):
    """Batch norm's running statistics are updated micro-batch by micro-batch."""
    return example("resnet_pipeline").train()


def two_meshes(group):
    return example("two_meshes").train()


def example(name):
    path = Path(__file__).parents[2] / "examples" / "strategy" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("function", "count"), [(resnet, 2), (two_meshes, 8)], ids=["resnet", "two_meshes"])
def test_published_examples(ranks, function, count):
    for found, expected in ranks(count).run(function):
        assert found == pytest.approx(expected, rel=1e-9)
        assert len(found) == 10
        assert expected[-1] < expected[0]


def one_rank_a_stage(ranks, rows, micro_batches, **options):
    """Return a pipeline of the GPT, for micro-batches of so many rows, and a batch."""
    whole, meshes = gpt(), lines(ranks, ranks)
    draw = functools.partial(tokens_of, length=8, vocabulary=32, generator=torch.Generator().manual_seed(7))
    plan = planned("GPT", trace(whole, (draw(rows), draw(rows))), meshes[0])
    options = {"micro_batches": micro_batches, "local_inputs": False, **options}
    batch = draw(rows * micro_batches), draw(rows * micro_batches)
    return Pipeline(whole, plan, stages_of(ranks), meshes, **options), batch


def peaks(group, schedule):
    """Return the most bytes of tensors at once in a step of 8 micro-batches."""
    pipeline, batch = one_rank_a_stage(group.size(), 8, 8, schedule=schedule)
    pipeline.step(*batch)
    pipeline.zero_grad()
    return peak_bytes(lambda: pipeline.step(*batch))


@pytest.mark.slow
def test_one_forward_one_backward_holds_fewer_activations(ranks):
    """GPipe holds those of all 8 micro-batches, 1F1B those of 4, 3, 2 and 1; tensors that are sent come on top."""
    gpipe, other = ranks(4).run(peaks, "gpipe"), ranks(4).run(peaks, "1f1b")
    live = simulate("1f1b", 4, 4, 8).live
    for before, after, count in zip(gpipe, other, live, strict=True):
        assert after < before * (count / 8 + 0.2)


@on_ranks(3)
def test_what_cannot_be_is_refused_on_every_rank(group):
    """Every wrong call of a pipeline is refused before anything is sent."""
    whole, plan, meshes, (x, present, targets) = crossing_plan()
    make = functools.partial(Pipeline, whole, plan, STAGES, meshes, overlap=False)
    with pytest.raises(ValueError, match="schedule='zero_bubble', overlap=True: an overlapped matmul computes"):
        make(schedule="zero_bubble", micro_batches=4, overlap=True)
    with pytest.raises(ValueError, match=r"schedule='zero_bubble' with recomputed modules \(second\)"):
        make(schedule="zero_bubble", micro_batches=4, recompute=Recompute(modules=["second"]))
    with pytest.raises(ValueError, match="3 stages on 2 meshes"):
        Pipeline(whole, plan, STAGES, meshes[:2], micro_batches=4)
    with pytest.raises(ValueError, match="rank 0 is in several meshes"):
        Pipeline(whole, plan, STAGES, [*meshes[:2], meshes[0]], micro_batches=4)
    with pytest.raises(ValueError, match="broadcast_inputs: 'mask' is no input; there are x, present, targets"):
        make(micro_batches=4, broadcast_inputs=["mask"])
    with pytest.raises(DisagreementError, match="micro_batches is 4 on rank 0, 4 on rank 1, 5 on rank 2"):
        make(micro_batches=4 + group.rank() // 2)
    with pytest.raises(DisagreementError, match="the model's parameters"):
        with torch.no_grad():
            whole.scale += group.rank()
        make(micro_batches=4)
    whole = made(Crossing)
    pipeline = Pipeline(whole, plan, STAGES, meshes, micro_batches=4, overlap=False)
    with pytest.raises(
        ValueError, match=r"x is \[15, 8\] of torch.float64, which cannot be cut along dimension 0 into"
    ):
        pipeline.step(x[:15], present[:15], targets[:15])
    with pytest.raises(ValueError, match=r"x is \[8, 8\] .* the plan is for micro_batches=4 of \[4, 8\]"):
        pipeline.step(x[:8], present[:8], targets[:8])
    with pytest.raises(ValueError, match="missing a required argument: 'targets'"):
        pipeline.step(x, present)
    with pytest.raises(ValueError, match="x requires a gradient"):
        pipeline.step(x.clone().requires_grad_(), present, targets)
    assert pipeline.step(x, present, targets).item() == pytest.approx(whole(x, present, targets).item(), rel=1e-12)


def late(group):
    """The last rank never starts the step; the others' errors name where they waited."""
    whole, plan, meshes, batch = crossing_plan()
    pipeline = Pipeline(whole, plan, STAGES, meshes, micro_batches=4, overlap=False, timeout=timedelta(seconds=3))
    pipeline.step(*batch)
    pipeline.zero_grad()
    if group.rank() == 2:
        return
    with pytest.raises(PipelineError, match=f"stage {group.rank()} on rank {group.rank()}, schedule 1f1b, failed"):
        pipeline.step(*batch)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit():
    pool = RankPool(3)
    try:
        pool.run(late)
    finally:
        pool.close()


def measure(group):
    pipeline, batch = one_rank_a_stage(group.size(), ROWS, 4)
    return pipeline.measure(*batch)


def test_a_step_is_measured(ranks):
    first, second = ranks(2).run(measure)
    assert first == second
    assert all(0 < busy < seconds for busy, seconds in zip(first.busy, first.seconds, strict=True))
    assert 0 < first.simulated.bubble < 1 and 0 < first.bubble < 1
    assert "bubbles" in str(first)
