"""auto on a device: whole steps run in turn, all ranks take the same turns, and what wins stays everywhere.

Ranks on gloo run what ranks on HCCL would; a clock of the test's own says how long a step takes in each way.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from backends import as_backend
from counted_functions import functions_of, in_words
from layers import Layers
from logged import logged
from marks import promise
from planted_clocks import auto_cuts_in_two, one_chunk_wins, planted
from planted_steps import DEVICE_BOUND, HOST_BOUND, MOST_STEPS, Clock, PlantedMark, optimize
from pool import on_ranks
from torch.utils.checkpoint import checkpoint

import ascend_parallel
from ascend_parallel.tuning.measured import decider, step_contest
from ascend_parallel.tuning.measured.step_contest import ALONE, ROUNDS, WHOLE, decide, turns_of


class Model(torch.nn.Module):
    """Column, row, column, row; or rows alone, whose backward has no collective."""

    def __init__(self, layers, rows_alone, sequence_parallel):
        super().__init__()
        config = {"sequence_parallel": sequence_parallel}
        kinds = ["RowParallelLinear"] * 2 if rows_alone else ["ColumnParallelLinear", "RowParallelLinear"] * 2
        self.parts = torch.nn.ModuleList(layers.make(kind, (64, 64), config=config) for kind in kinds)
        self.rows_alone, self.layers = rows_alone, layers

    def forward(self, x):
        for layer in self.parts:
            x = layer(x[..., :32] if self.rows_alone else x)[0]
        return x


def way_of(model):
    megatron = type(model.parts[0]).forward.ascend_parallel
    return megatron.decider.groups[megatron.group_of(model.parts[0])].way


def undecided(model):
    return type(model.parts[0]).forward.ascend_parallel.decider.undecided


def micro_batch(model, number, sequence_parallel):
    rows = 128 if sequence_parallel else 256
    seed = 1000 * number + (torch.distributed.get_rank() if sequence_parallel else 0)
    x = torch.randn(rows, 1, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return x, model(x * 1.0)


def results(model, x, y):
    """Run the backward, if there is one; return everything that a step computes, and leave no gradient."""
    if y.requires_grad:
        y.square().sum().backward()
    found = [
        y.detach(),
        *([] if x.grad is None else [x.grad]),
        *(weight.grad for weight in model.parameters() if weight.grad is not None),
    ]
    model.zero_grad()
    return found


def train(model, costs, steps=MOST_STEPS, run=micro_batch, batches=1, sequence_parallel=False):
    """Train, in the way that auto is in; return the way of each step and its results, and what was logged."""
    ways, found = [], []
    with mock.patch.object(step_contest, "Mark", PlantedMark), logged() as said:
        for number in range(steps):
            waiting = [run(model, batches * number + index, sequence_parallel) for index in range(batches)]
            ways.append(way_of(model))
            found += [results(model, *each) for each in waiting]
            Clock.now += costs[ways[-1]]
            optimize()
    return ways, found, [line for line in said if "whole steps" in line]


@contextlib.contextmanager
def models(group, clock=auto_cuts_in_two, rows_alone=False, sequence_parallel=False, run=micro_batch, steps=MOST_STEPS):
    """A model under auto whose ranks are as those of NPUs, and what the plain one computes in each micro-batch."""
    Clock.now, Clock.starves = 0.0, False
    with as_backend("hccl", group), Layers(group.size()) as layers, clock():
        ascend_parallel.configure(num_chunks=1)
        plain = Model(layers, rows_alone, sequence_parallel)
        truth = [results(plain, *run(plain, number, sequence_parallel)) for number in range(steps)]
        ascend_parallel.configure(auto=True)
        yield Model(layers, rows_alone, sequence_parallel), truth


def same(found, truth):
    pairs = zip(found, truth, strict=False)
    return all(torch.equal(a, b) for step, plain in pairs for a, b in zip(step, plain, strict=True))


def whole():
    """A clock of single passes by which every cut loses."""
    return planted(one_chunk_wins)


@promise("auto-steps")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_the_fastest_way_of_whole_steps_stays(group, sequence_parallel):
    for clock, costs, way in (
        (auto_cuts_in_two, DEVICE_BOUND, 4),
        (auto_cuts_in_two, HOST_BOUND, WHOLE),
        (auto_cuts_in_two, {**DEVICE_BOUND, ALONE: 0.8}, ALONE),
        (whole, DEVICE_BOUND, 4),
        (whole, HOST_BOUND, WHOLE),
    ):
        with models(group, clock, sequence_parallel=sequence_parallel) as (model, truth):
            ways, found, said = train(model, costs, sequence_parallel=sequence_parallel)
            assert same(found, truth)
            assert ways[-1] == way and set(ways) == {ALONE, WHOLE, 2, 4}, ways
            assert len(said) == (group.rank() == 0), said
            ascend_parallel.ops.COUNTS.clear()
            micro_batch(model, 0, sequence_parallel)
            assert bool(ascend_parallel.ops.COUNTS.as_dict()) == (way != WHOLE)


@on_ranks(2)
def test_where_only_the_host_is_in_the_way_the_log_names_the_remedy(group):
    for starves in (False, True):
        with models(group) as (model, _):
            Clock.starves = starves
            ways, _, said = train(model, HOST_BOUND)
            assert ways[-1] == WHOLE
            assert [("the device waits for the host" in line, "NPUGraph" in line) for line in said] == [
                (starves, starves)
            ] * (group.rank() == 0)


@on_ranks(2)
def test_the_slowest_rank_decides_for_all(group):
    """Four chunks are fast on rank 0 alone."""
    with models(group) as (model, truth):
        ways, found, _ = train(model, {**DEVICE_BOUND, 4: 0.8 + 0.4 * group.rank()})
        assert ways[-1] == 2 and same(found, truth)


@on_ranks(2)
def test_a_winner_has_to_win_once_more(group):
    with models(group) as (model, truth):
        first = dict.fromkeys(range(4 + 4 * (ROUNDS + 2)), DEVICE_BOUND)
        costs = [first.get(number, HOST_BOUND) for number in range(MOST_STEPS)]

        class Later(dict):
            steps = iter(costs)

            def __getitem__(self, way):
                return next(self.steps)[way]

        ways, found, _ = train(model, Later())
        assert ways[-1] == WHOLE and same(found, truth)


FIRST_HEAT = 4 + 4 * (ROUNDS + 2)  # its steps, with those that show what a step is


class Unsteady(dict):
    """Four chunks gain 10 %, but lose some rounds of each final."""

    def __init__(self, lost):
        super().__init__(DEVICE_BOUND)
        self.lost, self.finals, self.turns = lost, False, 0

    def __getitem__(self, way):
        if way != 4 or not self.finals:
            return super().__getitem__(way)
        turn, self.turns = self.turns % (ROUNDS + 2), self.turns + 1
        return 1.2 if 0 < turn <= self.lost else super().__getitem__(way)


@pytest.mark.parametrize(("lost", "way"), [(2, 4), (3, WHOLE)])
@on_ranks(2)
def test_rounds_that_contradict_each_other_are_run_again(group, lost, way):
    """A way that loses two of seven rounds, six of 21, wins by more than luck; one that loses three does not."""
    steps = MOST_STEPS + 4 * (ROUNDS + 2)
    with models(group, steps=steps) as (model, truth):
        costs = Unsteady(lost)

        def run(*given):
            costs.finals = given[1] >= FIRST_HEAT
            return micro_batch(*given)

        ways, found, said = train(model, costs, steps, run)
        assert ways[-1] == way and same(found, truth), said


@on_ranks(2)
def test_ways_change_where_no_forward_waits_for_its_backward(group):
    """Three forwards, then three backwards, as a pipeline's micro-batches."""
    steps = MOST_STEPS + 6
    with models(group, steps=3 * steps) as (model, truth):
        ways, found, _ = train(model, DEVICE_BOUND, steps, batches=3)
        assert ways[-1] == 4 and set(ways) == {ALONE, WHOLE, 2, 4} and same(found, truth)


def recomputed(reentrant, frozen=False):
    """Run the model in a checkpoint; frozen: what is before it, so that its input has no gradient."""

    def run(model, number, sequence_parallel):
        x, _ = micro_batch(lambda x: x, number, sequence_parallel)
        return x, checkpoint(model, x.detach() if frozen else x * 1.0, use_reentrant=reentrant)

    return run


def evaluated(model, number, sequence_parallel):
    """Evaluate at each third step before it: those calls belong to no step."""
    if number % 3 == 0:
        model.eval()
        with torch.no_grad():
            micro_batch(model, number, sequence_parallel)
        model.train()
    return micro_batch(model, number, sequence_parallel)


ODD_FORWARDS = {
    "reentrant": recomputed(True),
    "not reentrant": recomputed(False),
    "behind what is frozen": recomputed(False, frozen=True),
    "evaluated": evaluated,
}


@pytest.mark.parametrize("how", list(ODD_FORWARDS))
@on_ranks(2)
def test_recomputed_forwards_and_evaluations_belong_to_no_other_step(group, how):
    run = ODD_FORWARDS[how]
    with models(group, run=run) as (model, truth):
        ways, found, _ = train(model, DEVICE_BOUND, run=run)
        assert ways[-1] == 4 and same(found, truth)


@on_ranks(2)
def test_steps_that_are_not_regular_keep_what_was_decided_alone(group):
    """Each step has one micro-batch more than the last."""
    with models(group, steps=80) as (model, truth), mock.patch.object(step_contest, "LAST", 64):
        found, ways = [], []

        def run(model, _, sequence_parallel):
            return micro_batch(model, next(numbers), sequence_parallel)

        numbers = itertools.count()
        for size in range(1, 13):
            some, more, _ = train(model, DEVICE_BOUND, 1, run, size)
            found, ways = found + more, ways + some
        assert set(ways) == {ALONE} and same(found, truth)


def without_backward(model, number, _):
    """Run a forward whose backward only the other rank runs, once: rows alone have no collective there."""
    x, y = micro_batch(model, number, False)
    if number == 20 and torch.distributed.get_rank() == 0:
        HELD.append(y)
        return x, (y.detach() * x).sum(-1)
    return x, y


HELD = []


@on_ranks(2)
def test_a_rank_whose_backward_does_not_come_ends_the_contest_on_all_ranks(group):
    with models(group, rows_alone=True) as (model, _):
        ways, _, said = train(model, DEVICE_BOUND, run=without_backward)
        assert set(ways[:20]) > {ALONE, 4} and set(ways[21:]) == {ALONE}
        assert ["waits for its backward" in line for line in said] == [True] * (group.rank() == 0)


@on_ranks(2)
def test_a_backend_that_blocks_the_host_has_no_contest(group):
    with Layers(group.size()) as layers, auto_cuts_in_two():
        ascend_parallel.configure(auto=True)
        model = Model(layers, False, False)
        ways, _, said = train(model, DEVICE_BOUND, 8)
        assert set(ways) == {ALONE} and not said


@pytest.mark.parametrize(
    ("times", "way"),
    [
        ({WHOLE: [1.0] * 7, 2: [0.99] * 7}, WHOLE),
        ({WHOLE: [1.0] * 7, 2: [0.97] * 7, 4: [0.96] * 7}, 4),
        ({WHOLE: [1.0] * 7, 2: [0.97] * 7, 4: [0.9] * 5 + [1.1] * 2}, WHOLE),
        ({WHOLE: [1.0] * 7, ALONE: [0.9] * 7, 2: [1.1] * 7}, ALONE),
    ],
)
def test_the_fastest_way_wins_by_the_rule_of_all_contests(times, way):
    assert decide(times, {}).way == way


def test_each_round_has_each_way_once_and_every_rank_the_same_order():
    ways = [WHOLE, ALONE, 2, 4]
    turns = turns_of(ways)
    assert turns == turns_of(ways) and len(turns) == len(ways) * (ROUNDS + 2)
    assert all(sorted(turns[at : at + 4]) == sorted(ways) for at in range(0, len(turns), 4))


@on_ranks(2)
def test_a_model_of_many_layers_has_its_contest(group):
    """Its first pass has more calls than `MOST_LENGTHS` passes of one."""
    with models(group, steps=0) as (model, _):
        model.parts.extend(list(model.parts) * step_contest.MOST_LENGTHS)
        ways, _, said = train(model, DEVICE_BOUND)
        assert ways[-1] == 4, said


class Columns(torch.nn.Module):
    """Two column layers on a group, whose collectives are those of their backward."""

    def __init__(self, layers):
        super().__init__()
        self.parts = torch.nn.ModuleList(layers.make("ColumnParallelLinear", (64, 128)) for _ in range(2))

    def forward(self, x):
        return self.parts[1](self.parts[0](x)[0])[0]


@on_ranks(2)
def test_layers_without_a_collective_in_forward_have_no_contest(group):
    """One rank may run more forwards than the other: none of their calls could begin a pass."""
    with models(group, steps=0) as (other, _):
        model = Columns(other.layers)
        ways, _, said = train(model, DEVICE_BOUND, 12)
        assert set(ways) == {ALONE} and not said and not undecided(model)
        with torch.no_grad():
            for number in range(3 * group.rank()):
                micro_batch(model, number, False)
        x, _ = micro_batch(model, 0, False)
        _, called = functions_of(lambda: model.parts[0](x))
        assert not [name for name in called if "enter" in name], called


@pytest.mark.parametrize("columns_first", [False, True])
@on_ranks(2)
def test_layers_of_another_group_without_a_collective_in_forward_do_not_keep_a_contest_from_its_end(
    group, columns_first
):
    other = torch.distributed.new_group([0, 1])
    with models(group) as (model, truth):
        columns = Columns(model.layers)
        for layer in columns.parts:
            layer.tp_group = other

        def run(model, number, sequence_parallel):
            if columns_first or number > 8:
                results(columns, *micro_batch(columns, number, sequence_parallel))
            return micro_batch(model, number, sequence_parallel)

        ways, found, _ = train(model, DEVICE_BOUND, run=run)
        assert ways[-1] == 4 and same(found, truth) and not undecided(model)
        x = torch.randn(256, 1, 32)
        model.parts[1](x)
        _, called = functions_of(lambda: model.parts[1](x))
        assert not [name for name in called if "enter" in name], called


def accumulated(batches, optimizer):
    """Run each micro-batch and its backward; the optimizer's time follows the last one of a step."""

    def run(model, number, sequence_parallel):
        for index in range(batches):
            given = micro_batch(model, batches * number + index, sequence_parallel)
            Clock.now += optimizer * (index == batches - 1)
            if index < batches - 1:
                results(model, *given)
                Clock.now += DEVICE_BOUND[way_of(model)]
        return given

    return run


@pytest.mark.parametrize("batches", [2, 8])
@on_ranks(2)
def test_micro_batches_whose_gradients_are_accumulated_are_one_step(group, batches):
    """The optimizer takes as long as a micro-batch: what it would add to one in turn with others would decide."""
    with models(group, steps=0) as (model, _):
        ways, _, said = train(model, DEVICE_BOUND, run=accumulated(batches, 1.0))
        assert ways[-1] == 4 and {WHOLE, 2} < set(ways), said


def without_gradients_between(model, number, sequence_parallel):
    """Run the model without gradients as well, in the mode of training."""
    with torch.no_grad():
        for _ in range(1 + number % 2):
            micro_batch(model, number, sequence_parallel)
    return micro_batch(model, number, sequence_parallel)


def dry_runs_first(model, number, sequence_parallel):
    """Run forwards without a backward before and within the first steps."""
    if number in (0, 2):
        micro_batch(model, number, sequence_parallel)
    return micro_batch(model, number, sequence_parallel)


def behind_what_is_frozen(model, number, sequence_parallel):
    """Give the first layer an input without gradients."""
    x, _ = micro_batch(lambda x: x, number, sequence_parallel)
    return x, model(x.detach())


@pytest.mark.parametrize("run", [without_gradients_between, dry_runs_first, behind_what_is_frozen])
@on_ranks(2)
def test_odd_forwards_do_not_keep_the_contest_from_its_end(group, run):
    alone = run is behind_what_is_frozen  # then the first layer begins the passes
    with models(group, rows_alone=alone, run=run) as (model, truth):
        ways, found, said = train(model, DEVICE_BOUND, MOST_STEPS + 8, run)
        assert ways[-1] == 4 and same(found, truth), said


@on_ranks(2)
def test_a_captured_step_runs_as_decided_alone(group):
    with models(group) as (model, _):
        ways, _, _ = train(model, DEVICE_BOUND, 12)
        with mock.patch.object(decider, "is_capturing", lambda: True):
            captured, _, _ = train(model, DEVICE_BOUND, 8)
        later, _, said = train(model, DEVICE_BOUND)
        assert len(set(ways)) > 1 and set(captured) == {ALONE} and later[-1] == 4, said


OPTIMIZER = 1.0  # as long as a micro-batch


def grown(batches, costs=DEVICE_BOUND, skipped=(), evaluated=(), rows=lambda number: 256):
    """Return what trains a model for a number of steps, and returns the way of each micro-batch and what was logged.

    A step has batches(number) of them, of rows(number) rows. An evaluation takes as long as ten.
    """

    def run(model, steps):
        ways = []
        with mock.patch.object(step_contest, "Mark", PlantedMark), logged() as said:
            for number in range(steps):
                for index in range(batches(number)):
                    seed = torch.Generator().manual_seed(1000 * number + index)
                    x = torch.randn(rows(number), 1, 64, generator=seed).requires_grad_()
                    y = model(x * 1.0)
                    ways.append(way_of(model))
                    results(model, x, y)
                    Clock.now += costs[ways[-1]] * rows(number) / 256
                if number not in skipped:
                    Clock.now += OPTIMIZER
                    optimize()
                if number in evaluated:
                    model.eval()
                    with torch.no_grad():
                        micro_batch(model, number, False)
                    Clock.now += 10.0
                    model.train()
        return ways, [line for line in said if "whole steps" in line]

    return run


ODD_STEPS = {
    "a batch that grows": {"batches": lambda number: 1 + min(number // 20, 2)},
    "a batch that grows in the middle of a turn": {"batches": lambda number: 2 + (number >= 13)},
    "skipped optimizers' steps": {"batches": lambda number: 1, "skipped": range(6, 400, 5)},
    "skipped at first, as of a scale that is too large": {"batches": lambda number: 2, "skipped": range(17)},
    "evaluations": {"batches": lambda number: 2, "evaluated": range(6, 400, 4)},
    "longer sequences": {"batches": lambda number: 1, "rows": lambda number: 256 + 256 * (number > 25)},
}


@promise("auto-steps")
@pytest.mark.parametrize("what", list(ODD_STEPS))
@on_ranks(2)
def test_steps_of_another_shape_are_not_compared(group, what):
    with models(group, steps=0) as (model, _):
        compared = []

        def noted(times, starved):
            compared.append(times)
            return decide(times, starved)

        with mock.patch.object(step_contest, "decide", noted):
            ways, said = grown(**ODD_STEPS[what])(model, 130)
        assert ways[-1] == 4 and len(compared) >= 2, said
        for times in compared:  # the steps of a way have one shape, and here one time
            assert all(len({round(seconds, 6) for seconds in spent}) == 1 for spent in times.values()), times
        gathered = [None] * group.size()
        torch.distributed.all_gather_object(gathered, ways)
        assert gathered == [ways] * group.size()


@on_ranks(2)
def test_steps_that_never_have_one_shape_keep_what_was_decided_alone(group):
    with models(group, steps=0) as (model, _), mock.patch.object(step_contest, "LAST", 64):
        ways, said = grown(lambda number: 1, rows=lambda number: 256 + 16 * (number % 11))(model, 80)
        assert set(ways) == {ALONE}, said
        assert ["not regular" in line for line in said] == [True] * (group.rank() == 0)


@on_ranks(2)
def test_evaluations_in_every_step_end_the_contest(group):
    with models(group, steps=0) as (model, _), mock.patch.object(step_contest, "MOST_LOST", 8):
        ways, said = grown(lambda number: 1, evaluated=range(6, 400))(model, 24)
        assert ways[-1] == ALONE and len(set(ways)) > 1 and not undecided(model)
        assert ["evaluate" in line for line in said] == [True] * (group.rank() == 0)


def test_steps_that_follow_each_other_again_and_again_are_one():
    a, b = ((step_contest.Pass(torch.Size([rows]), 1, False),) for rows in (1, 2))

    def found(*steps):
        ended = [step_contest.Boundary(number, passes) for number, passes in enumerate(steps)]
        return [boundary.passes for boundary in step_contest.repeated(ended)]

    assert found(b, a, a) == [a] and found(a, a) == []
    assert found(b, a, b, a, b) == [a, b] and found(a, b, a, b) == []
    assert found(b, a, a, b, a, a, b) == [a, a, b] and found(a, b, b, a, a, b) == []


def adversaries(group, detached):
    """Train a generator and its critic, a step each in turn: the generator's has the longer backward."""
    with models(group, steps=0) as (generator, _), mock.patch.object(step_contest, "Mark", PlantedMark):
        critic, ways = Model(generator.layers, False, False), []
        with logged() as said:
            for number in range(2 * MOST_STEPS):
                x, _ = micro_batch(lambda x: x, number, False)
                for learns, cost in (("critic", 1.0), ("generator", 2.0)):
                    with torch.set_grad_enabled(learns == "generator" or detached):
                        y = generator(x * 1.0)
                    ways.append(way_of(generator))
                    y = y.detach() if learns == "critic" else y
                    critic(y).square().sum().backward()
                    Clock.now += cost * DEVICE_BOUND[ways[-1]]
                    optimize()
        return ways, [line for line in said if "whole steps" in line], undecided(generator)


@pytest.mark.parametrize("detached", [False, True])
@on_ranks(2)
def test_two_models_that_are_trained_in_turn_are_compared_by_the_steps_of_both(group, detached):
    ways, said, still = adversaries(group, detached)
    assert ways[-1] == 4 and not still, said
    assert ["own layers 3000.00" in line for line in said] == [True] * (group.rank() == 0), said


@on_ranks(2)
def test_a_rank_whose_optimizer_stops_ends_the_contest_on_all_ranks(group):
    with models(group, steps=0) as (model, _), mock.patch.object(step_contest, "LAST", 64):
        stops = range(20, 400) if group.rank() else ()
        ways, said = grown(lambda number: 1, skipped=stops)(model, 130)
        assert set(ways[:20]) > {ALONE, 4} and set(ways[24:]) == {ALONE} and not undecided(model)
        assert ["differ between ranks" in line for line in said] == [True] * (group.rank() == 0)


@on_ranks(2)
def test_where_steps_are_no_longer_regular_what_was_decided_alone_runs_again(group):
    """It may be the framework's own layers or four chunks that run when ranks begin to look for steps anew."""
    with models(group, steps=0) as (model, _):
        rows = {number: 256 + 16 * (number % 11) for number in range(20, 60)}
        ways, said = grown(lambda number: 1, rows=lambda number: rows.get(number, 256))(model, 60)
        assert set(ways[:20]) > {ALONE, 4} and set(ways[23:]) == {ALONE} and not said


def pipelined(reentrant):
    """One forward ahead, then one backward after each forward; two chunks of layers, each in a checkpoint."""

    def run(model, number, sequence_parallel):
        waiting, chunks = [], (model.parts[:2], model.parts[2:])

        def forward(chunk, x):
            return checkpoint(lambda x: chunk[1](chunk[0](x)[0])[0], x, use_reentrant=reentrant)

        for index in range(4):
            x, _ = micro_batch(lambda x: x, 4 * number + index, sequence_parallel)
            sent = forward(chunks[0], x * 1.0)
            received = sent.detach().requires_grad_()
            waiting.append((sent, received, forward(chunks[1], received)))
            while len(waiting) > (index < 3):
                sent, received, y = waiting.pop(0)
                y.square().sum().backward()
                sent.backward(received.grad)
        return x, y.detach()

    return run


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_a_pipeline_of_two_chunks_of_layers_in_checkpoints_has_its_contest(group, reentrant):
    run = pipelined(reentrant)
    with models(group, run=run) as (model, truth):
        ways, found, said = train(model, DEVICE_BOUND, run=run)
        assert ways[-1] == 4 and same(found, truth) and not undecided(model), said


@on_ranks(2)
def test_steps_whose_backward_fails_on_every_rank_are_not_compared(group):
    def run(model, number, sequence_parallel):
        x, y = micro_batch(model, number, sequence_parallel)
        if number % 7 == 3:
            y.register_hook(lambda _: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                y.sum().backward()
            return x, y.detach()
        return x, y

    with models(group, run=run, steps=MOST_STEPS + 40) as (model, truth):
        ways, found, said = train(model, DEVICE_BOUND, MOST_STEPS + 40, run)
        assert ways[-1] == 4 and same(found, truth) and not undecided(model), said


@on_ranks(2)
def test_a_model_that_one_rank_has_in_the_mode_of_evaluation_has_its_contest(group):
    """Gradients are what ranks have alike."""
    with models(group) as (model, truth):
        model.train(group.rank() == 0)
        ways, found, said = train(model, DEVICE_BOUND)
        assert ways[-1] == 4 and same(found, truth) and not undecided(model), said


@pytest.mark.parametrize("trains", [False, True])
@on_ranks(2)
def test_a_long_evaluation_does_not_end_the_contest(group, trains):
    """In the mode of training or not; before the first step, and in the middle."""
    with models(group) as (model, truth), mock.patch.object(step_contest, "MOST_CALLS", 64):

        def evaluate():
            model.train(trains)
            with torch.no_grad():
                for number in range(50):
                    micro_batch(model, number, False)
            model.train()

        if not trains:
            evaluate()
        train(model, DEVICE_BOUND, 20)
        assert undecided(model)
        evaluate()
        ways, found, said = train(model, DEVICE_BOUND)
        assert ways[-1] == 4 and same(found, truth) and not undecided(model), said


@on_ranks(2)
def test_a_call_of_an_evaluation_costs_one_function_more_while_whole_steps_are_timed(group):
    with models(group, steps=0) as (model, _):
        model.eval()
        with torch.no_grad():
            micro_batch(model, 0, False)
            assert undecided(model)
            _, waiting = functions_of(lambda: micro_batch(model, 0, False))
            type(model.parts[0]).forward.ascend_parallel.decider.undecided = False
            _, decided = functions_of(lambda: micro_batch(model, 0, False))
        more = waiting - decided
        assert sum(more.values()) == len(model.parts) and not decided - waiting, in_words(more)
