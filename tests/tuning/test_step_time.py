"""The step model against event simulations that share no code with it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Task, length, pipeline_tasks, simulate

from ascend_parallel.tuning.cost_model.hardware import expected_maximum, find_hardware
from ascend_parallel.tuning.cost_model.step import spread
from ascend_parallel.tuning.step_time.lanes import lanes, page
from ascend_parallel.tuning.step_time.step import StepWork, exposed, gathered_pass, time_step

SECONDS = st.floats(min_value=0, max_value=1, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(SECONDS, st.integers(1, 9), SECONDS)
def test_sums_that_backward_hides_are_what_the_simulation_leaves(sums, buckets, backward):
    tasks = [Task(f"backward {i}", "compute", backward / buckets) for i in range(buckets)]
    tasks += [Task(f"sum {i}", "link", sums / buckets, (f"backward {i}",)) for i in range(buckets)]
    left = length(simulate(tasks)) - backward
    assert exposed(sums, buckets, backward) == pytest.approx(left, rel=1e-9, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 7), SECONDS, SECONDS, st.one_of(st.just(0.0), SECONDS))
def test_gathers_one_layer_ahead_are_what_the_simulation_finds(layers, compute, gather, scatter):
    """The host issues gather 0, then for each layer: the next gather, the layer, its scatter."""
    tasks = [Task("gather 0", "link", gather)]
    for i in range(layers):
        before = (f"layer {i - 1}",) if i else ()
        if i + 1 < layers:
            # The next gather starts with the layer: when the layer's own gather and the layer before have ended.
            tasks.append(Task(f"gather {i + 1}", "link", gather, (f"gather {i}", *before)))
        tasks.append(Task(f"layer {i}", "compute", compute, (f"gather {i}", *before)))
        if scatter:
            tasks.append(Task(f"scatter {i}", "link", scatter, (f"layer {i}",)))
    found = length(simulate(tasks))
    assert gathered_pass(layers, compute, gather, scatter) == pytest.approx(found, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=5), st.integers(0, 6), SECONDS, SECONDS)
def test_a_pipeline_with_sums_and_updates_is_what_the_simulation_finds(stages, more, sums, update):
    """1F1B, then on each rank its sums as soon as its own backwards end, then updates that wait for all sums."""
    count, micro_batches = len(stages), len(stages) + more
    tasks = pipeline_tasks(stages, micro_batches)
    tasks += [Task(f"sum {i}", f"link {i}", sums, (f"B{i}.{micro_batches - 1}",)) for i in range(count)]
    tasks += [Task(f"update {i}", str(i), update, tuple(f"sum {j}" for j in range(count))) for i in range(count)]
    work = StepWork(
        micro_batches=micro_batches,
        forward=[forward for forward, _ in stages],
        backward=[backward for _, backward in stages],
        sums=[sums] * count,
        buckets=[1] * count,
        gathers=[0.0] * count,
        optimizer=[update] * count,
    )
    assert time_step(work).total == pytest.approx(length(simulate(tasks)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [(4, 1, 8), (4, 2, 8), (8, 4, 32), (16, 5, 64)])
def test_interleaving_divides_the_bubble(ranks, virtual, micro_batches):
    """arXiv:2104.04473, section 2.2: the bubble is (p - 1) / v of a stage's passes, if stages are equal."""
    forward, backward = [1.0 / virtual] * (ranks * virtual), [2.0 / virtual] * (ranks * virtual)
    empty = [0.0] * ranks
    work = StepWork(
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        micro_batches=micro_batches,
        forward=forward,
        backward=backward,
        sums=empty,
        buckets=[1] * ranks,
        gathers=empty,
        optimizer=empty,
    )
    assert time_step(work).total == pytest.approx(3.0 * (micro_batches + (ranks - 1) / virtual), rel=1e-9)


def test_stages_of_the_ends_alone():
    """Llama 3 405B: 126 layers on 128 stages, the first and the last without a layer (arXiv:2407.21783, 3.3.2)."""
    assert spread(126, 128) == [0] + [1] * 126 + [0]


@pytest.mark.parametrize("under_backward", [False, True])
@pytest.mark.parametrize(("schedule", "ranks", "virtual"), [("1f1b", 1, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 4, 2)])
def test_lanes_end_with_the_step_and_do_not_overlap(schedule, ranks, virtual, under_backward):
    work = StepWork(
        schedule=schedule,
        micro_batches=8,
        forward=[1.0 + stage / 10 for stage in range(ranks * virtual)],
        backward=[2.0 + stage / 10 for stage in range(ranks * virtual)],
        send=0.1,
        sums=[3.0] * ranks,
        buckets=[4] * ranks,
        under_backward=under_backward,
        gathers=[0.5] * ranks,
        optimizer=[0.25] * ranks,
    )
    rows = lanes(work)
    assert len(rows) == 2 * ranks
    assert max(span.stop for row in rows for span in row.spans) == pytest.approx(time_step(work).total, rel=1e-12)
    for row in rows:
        for first, second in pairwise(row.spans):
            assert first.stop <= second.start + 1e-12
    html = page(work, "a step", ["a note"])
    assert html.count('<rect class="F"') == 8 * ranks * virtual + 1 and "a note" in html


@pytest.mark.parametrize("count", [1, 2, 8, 64, 1024, 7968])
def test_the_slowest_of_many_is_what_draws_give(count):
    draws = np.random.default_rng(count).standard_normal((4_000_000 // count, count)).max(axis=1)
    error = draws.std() / len(draws) ** 0.5
    assert expected_maximum(count) == pytest.approx(draws.mean(), abs=0.03 + 4 * error)


def test_a_step_of_cards_of_drawn_speeds_takes_that_of_the_slowest():
    """Replicas of 4 stages x 8 cards: a stage waits for its slowest card, the step for its slowest replica."""
    replicas, stages, cards, micro_batches = 8, 4, 8, 32
    unit = find_hardware("910b").matmul
    slowest = unit.frequency / find_hardware("910b").of_slowest(replicas * stages * cards).matmul.frequency
    assert slowest == pytest.approx(1 + unit.variation * expected_maximum(256))

    def step(of_stages):
        return length(simulate(pipeline_tasks([(time, 2 * time) for time in of_stages], micro_batches)))

    drawn = np.random.default_rng(0)
    even, steps = step([1.0] * stages), []
    for _ in range(20):
        speeds = 1 + unit.variation * drawn.standard_normal((replicas, stages, cards))
        steps.append(max(step(of_stages) for of_stages in speeds.max(axis=2)) / even)
    assert np.mean(steps) == pytest.approx(slowest, abs=0.006)  # stages that are faster shorten the fill
    assert np.mean(steps) > 1 + 0.7 * (slowest - 1)
