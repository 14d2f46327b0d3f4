"""auto on a device: whole steps of tp_plans and of torch's styles run in turn, as those of Megatron-core do.

Ranks on gloo run what ranks on HCCL would; a clock of the test's own says how long a step takes in each way.
"""

import contextlib
import functools
import itertools
from unittest import mock

import hugging_face
import pytest
import torch
import torch_parallel
from backends import as_backend
from counted_functions import functions_of
from logged import logged
from marks import promise
from planted_clocks import auto_cuts_in_two
from planted_steps import DEVICE_BOUND, HOST_BOUND, MOST_STEPS, Clock, PlantedMark, optimize
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ascend_parallel
from ascend_parallel.patches.torch_native.styles import ACTIVE_PATCH as STYLES
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH as TRANSFORMERS
from ascend_parallel.tuning.measured import step_contest
from ascend_parallel.tuning.measured.step_contest import ALONE, WHOLE


@contextlib.contextmanager
def under_auto(group):
    """Have auto find ranks as those of NPUs, and cuts that are faster alone."""
    Clock.now, Clock.starves = 0.0, False
    with as_backend("hccl", group), auto_cuts_in_two():
        yield
    ascend_parallel.configure(num_chunks=1)


def styled(group, plan):
    """Return a small decoder, parallelised by torch."""
    ascend_parallel.configure(num_chunks=4)  # the forwards are installed while the model is parallelised
    model = torch_parallel.decoder(hidden=64, inner=128, heads=4, layers=1)
    return torch_parallel.parallel(model, init_device_mesh("cpu", (group.size(),)), plan)


def decider_of(active_patch):
    return active_patch.framework.decider


def train(model, costs, step, active_patch=STYLES, steps=MOST_STEPS):
    """Train; return the way of each step, what differs from the plain run, and what was logged.

    step: returns results by name, of steps that are all alike.
    """
    ascend_parallel.configure(num_chunks=1)
    truth = step(model, 0)
    ascend_parallel.configure(auto=True)
    ways, unlike = [], []
    with mock.patch.object(step_contest, "Mark", PlantedMark), logged() as said:
        for number in range(steps):
            found = step(model, number)
            (way,) = [each.way for each in decider_of(active_patch).groups.values()]
            ways.append(way)
            assert found.keys() == truth.keys()
            unlike += [(number, way, name) for name in truth if not torch.equal(found[name], truth[name])]
            Clock.now += costs[way]
            optimize()
    return ways, unlike, [line for line in said if "whole steps" in line]


def alike(model, _):
    return torch_parallel.step(model)


def checkpointed(model, reentrant):
    for block in model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)


def evaluated(model, number):
    """Evaluate before some steps, many rows and few: those calls belong to no step."""
    if number % 8 == 5:
        model.eval()
        with torch.no_grad():
            for rows in (96, 8):
                model(torch.zeros(2, rows, dtype=torch.int64))
        model.train()
    return torch_parallel.step(model)


def in_the_order_of_a_pipeline(model, _):
    """Run three forwards, then their backwards."""
    model.zero_grad()
    ids = [torch.full((2, 96), number) for number in range(3)]
    losses = [hugging_face.full_tensor(model(each)).square().mean() for each in ids]
    for loss in losses:
        loss.backward()
    return {name: hugging_face.full_tensor(each.grad).clone() for name, each in model.named_parameters()}


def with_a_forward_on_top(model):
    """Put forwards on top of the layers', on rank 0 alone."""
    if torch.distributed.get_rank() == 0:
        for name, layer in model.layers[0].named_modules():
            if type(layer) is torch.nn.Linear and name.split(".")[1] in ("wq", "w2"):
                layer.forward = functools.partial(lambda own, x: own(x), layer.forward)
        row = model.layers[0].attention.wo
        row.forward = lambda x: torch.nn.functional.linear(x, row.weight)


HOW = {
    "as it is": (lambda model: None, alike),
    "recomputed": (functools.partial(checkpointed, reentrant=False), alike),
    "recomputed, reentrant": (functools.partial(checkpointed, reentrant=True), alike),
    "evaluated": (lambda model: None, evaluated),
    "in the order of a pipeline": (lambda model: None, in_the_order_of_a_pipeline),
    "a forward on top": (with_a_forward_on_top, alike),
}
CASES = [("plain", "recomputed"), ("sequence", "recomputed"), ("layers", "in the order of a pipeline")]
CASES += [("plain", "evaluated"), ("plain", "a forward on top")]
MORE = [pair for pair in itertools.product(["plain", "sequence", "layers"], HOW) if pair not in CASES]


@promise("auto-steps")
@pytest.mark.parametrize(("plan", "how"), [*CASES, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)])
@on_ranks(2)
def test_the_fastest_way_of_steps_of_torchs_styles_stays(group, plan, how):
    change, step = HOW[how]
    with under_auto(group):
        model = styled(group, plan)
        change(model)
        for costs, best in ((DEVICE_BOUND, 4), (HOST_BOUND, WHOLE)):
            ways, unlike, said = train(model, costs, step, steps=MOST_STEPS + 12 * (step is evaluated))
            assert not unlike
            assert ways[-1] == best and set(ways) == {ALONE, WHOLE, 2, 4}, said
            assert len(said) == (group.rank() == 0), said
            assert not decider_of(STYLES).undecided
            ascend_parallel.ops.COUNTS.clear()
            _, called = functions_of(lambda: model(torch.zeros(2, 96, dtype=torch.int64)))
            assert not [name for name in called if name.endswith(".enter")], called
            assert bool(ascend_parallel.ops.COUNTS.as_dict()) == (best != WHOLE)


@pytest.mark.parametrize("plan", ["plain", "sequence", "layers"])
@on_ranks(2)
def test_a_forward_of_the_frameworks_own_that_waits_for_its_backward_ends_the_contest(group, plan):
    """What the contest watches is behind the layer, whoever runs it."""
    held = []

    def step(model, _):
        held[:] = [hugging_face.full_tensor(model(torch.zeros(2, 96, dtype=torch.int64)))]
        if STYLES.framework is None or WHOLE not in {each.way for each in decider_of(STYLES).groups.values()}:
            held.pop().sum().backward()
        return {}

    with under_auto(group):
        ways, _, said = train(styled(group, plan), DEVICE_BOUND, step)
        assert WHOLE in ways and ways[-1] == ALONE
        assert ["waits for its backward" in line for line in said] == [True] * (group.rank() == 0)


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}


def with_generation(model, number):
    """Generate before some steps: a prompt, and tokens of too few rows to overlap."""
    if number % 8 == 5:
        model.eval()
        model.generate(hugging_face.tokens()[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    return hugging_face.step(model)


def of_a_tp_plan(group, path, how):
    with under_auto(group):
        model = hugging_face.load(group, path)
        if how.startswith("recomputed"):
            model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
        step = with_generation if how == "generating" else lambda model, _: hugging_face.step(model)
        results = []
        for costs in (DEVICE_BOUND, HOST_BOUND):
            steps = MOST_STEPS + 12 * (step is with_generation)
            ways, unlike, said = train(model, costs, step, TRANSFORMERS, steps)
            ascend_parallel.ops.COUNTS.clear()
            model(input_ids=hugging_face.tokens())
            ours = bool(ascend_parallel.ops.COUNTS.as_dict())
            results.append((ways, unlike, len(said), decider_of(TRANSFORMERS).undecided, ours))
    return results


@promise("auto-steps")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("Llama", "recomputed"),
        ("Qwen2", "generating"),
        pytest.param("Llama", "recomputed, reentrant", marks=pytest.mark.slow),
        pytest.param("Llama", "as it is", marks=pytest.mark.slow),
    ],
)
def test_the_fastest_way_of_steps_of_a_tp_plan_stays(ranks, tmp_path, name, how):
    path = hugging_face.write(tmp_path, name, **SMALL, num_key_value_heads=4)
    both = ranks(2).run(of_a_tp_plan, path, how)
    for rank, results in enumerate(both):
        for (ways, unlike, said, undecided, ours), best in zip(results, (4, WHOLE), strict=True):
            assert not unlike and not undecided
            assert ways[-1] == best and set(ways) == {ALONE, WHOLE, 2, 4}
            assert said == (rank == 0) and ours == (best != WHOLE)
    assert [ways for ways, *_ in both[0]] == [ways for ways, *_ in both[1]]
