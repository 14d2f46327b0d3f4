"""COC_REGION=auto in a real GPT of megatron-core: the first passes decide, alike on all ranks; the bits stay."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpt_training import REGION, megatron, pipeline_step
from logged import logged
from marks import promise
from megatron_cpu import finalize_gradients, megatron_on_cpu, next_token_loss, small_gpt
from pairwise import base_choice
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.region_choice import TURNS, Instant

AUTO = {**REGION, "region": "auto"}


class FakeClock:
    """Gives a way's forward and backward a length of its own: a region's `share` of the layers'."""

    def __init__(self, share):
        self.share, self.time = share, 0.0

    def __call__(self, like):
        from megatron.core.tensor_parallel.layers import RowParallelLinear

        on = RowParallelLinear.forward.ascend_parallel.region_choice.on
        self.time += self.share if on else 1.0
        return Instant(self.time, self.time)


def nothing(model, step):
    """Change nothing."""


def frozen_embedding(model, step):
    for parameter in model.embedding.parameters():
        parameter.requires_grad_(False)


def evaluated(model, step):
    """Evaluate before every third step."""
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            next_token_loss(model, torch.ones(4, 65, dtype=torch.long))
        model.train()


def forgotten(model, step):
    """Run a forward whose backward never comes, before the first step."""
    if step == 0:
        next_token_loss(model, torch.ones(4, 65, dtype=torch.long))


def trained(settings, options, steps, before=nothing, micro_batches=1):
    """Return the losses and last gradients, whether regions ran in each step, and the status.

    before: called with the model and the step's number before each step.
    """
    ascend_parallel.configure(**settings)
    model = small_gpt(seq=64, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, ways = [], []
    for step in range(steps):
        before(model, step)
        ascend_parallel.ops.COUNTS.clear()
        torch.manual_seed(step)
        optimizer.zero_grad()
        total = sum(next_token_loss(model, torch.randint(256, (4, 65))) for _ in range(micro_batches))
        total.backward()
        finalize_gradients(model)
        optimizer.step()
        losses.append(total.item().hex())
        ways.append(any("region" in name for name in ascend_parallel.ops.COUNTS.as_dict()))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return losses, gradients, ways, ascend_parallel.status()


@contextlib.contextmanager
def observed(clock=None):
    """Replace the clock, if one is given; give the lines that are logged about the choice."""
    from ascend_parallel.patches import region_choice

    with logged() as said, mock.patch.object(region_choice, "now", clock or region_choice.now):
        yield said


def decided(group, shares, options, more=None):
    """Train plain and with auto; `shares`: each rank's clock. Return what was seen, and what was logged."""
    from ascend_parallel.diagnostics.doctor import examine_request
    from ascend_parallel.patch_control import CONTROL

    more = {"settings": AUTO, "steps": len(TURNS) + 2, **(more or {})}
    with megatron(group.size()):
        plain = trained(**{**more, "settings": {"num_chunks": 1}}, options=options)
        with observed(None if shares is None else FakeClock(shares[group.rank()])) as said:
            auto = trained(**more, options=options)
        examined = [finding.found for finding in examine_request(CONTROL) if finding.name == "regions"]
    return {
        "same": plain[0] == auto[0] and all(map(torch.equal, plain[1], auto[1])),
        "ways": auto[2],
        "status": auto[3].region,
        "doctor": examined,
        "said": [line for line in said if line.startswith("COC_REGION=auto")],
    }


OPTIONS = {
    "gpt": {},
    "sequence parallel": {"sequence_parallel": True},
    "full recompute": {"recompute": True},
    "dropout of hidden states": {"hidden_dropout": 0.1},
}


@promise("region-choice")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("options", "share"), base_choice(OPTIONS, [0.5, 2.0], ("gpt", 0.5)))
def test_the_faster_way_stays_and_the_bits_too(ranks, options, share):
    ours, theirs = ranks(2).run(decided, [share, share], OPTIONS[options])
    assert ours["same"]
    assert theirs["same"]
    assert ours["ways"] == theirs["ways"] == [*TURNS, share < 1, share < 1]
    assert ours["status"] == theirs["status"]
    assert ours["said"] == [ours["status"]]
    assert theirs["said"] == []
    # A forward and a backward, each between two readings of the clock.
    assert f"2000.00 ms in layers and {2000 * share:.2f} ms in regions" in ours["status"]


@promise("region-choice")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("shares", "region"), [([0.5, 0.6], True), ([0.5, 3.0], False), ([3.0, 0.5], False)])
def test_ranks_with_unlike_clocks_decide_alike_by_the_slowest(ranks, shares, region):
    ours, theirs = ranks(2).run(decided, shares, {})
    assert ours["ways"] == theirs["ways"] == [*TURNS, region, region]
    assert ours["status"] == theirs["status"]
    assert f"{2000 * max(shares):.2f} ms in regions" in ours["status"]


def test_a_real_run_ends_with_a_decision(ranks):
    ours, theirs = ranks(2).run(decided, None, {})
    assert ours["same"]
    assert theirs["same"]
    assert ours["ways"] == theirs["ways"]
    assert ours["ways"][: len(TURNS)] == list(TURNS)
    assert ours["status"] == theirs["status"]
    assert "not decided" not in ours["status"]
    assert len(ours["said"]) == 1
    assert ours["doctor"] == theirs["doctor"] == [ours["status"]]


@pytest.mark.slow
def test_micro_batches_whose_backward_comes_later_run_in_one_way(ranks):
    for found in ranks(2).run(decided, [0.5, 0.5], {}, {"micro_batches": 3}):
        assert found["same"]
        assert found["ways"] == [*TURNS, True, True]


@pytest.mark.sample("frozen_embedding")
@pytest.mark.parametrize("before", [frozen_embedding, evaluated])
def test_a_pass_is_timed_in_training_wherever_its_gradient_ends(ranks, before):
    for found in ranks(2).run(decided, [0.5, 0.5], {}, {"before": before}):
        assert found["same"]
        assert found["ways"] == [*TURNS, True, True]


def forgetful(group):
    from ascend_parallel.patches import region_choice

    region_choice.MOST_WAITING, usual = 5, region_choice.MOST_WAITING
    try:
        return decided(group, [0.5, 0.5], {}, {"before": forgotten, "steps": len(TURNS) + 6})
    finally:
        region_choice.MOST_WAITING = usual


def test_a_backward_that_never_comes_is_waited_for_so_long(ranks):
    for found in ranks(2).run(forgetful):
        assert found["same"]
        # The forgotten pass, and the five behind it, are one turn.
        assert found["ways"] == [*[False] * 5, *TURNS[1:], True, True]


NO_REGION = {
    "few rows": {"settings": {**AUTO, "region_rows": 200}},
    "a fused kernel": {"settings": {**AUTO, "fused": True}},
    "COC_STRICT": {"settings": {**AUTO, "strict": True, "region_rows": 200}},  # auto requests no region
}


@pytest.mark.sample("few rows")
@pytest.mark.parametrize("more", NO_REGION.values(), ids=NO_REGION)
def test_where_no_layer_leaves_rows_the_layers_stay(ranks, more):
    for found in ranks(2).run(decided, None, {}, {"steps": 4, **more}):
        assert found["same"]
        assert found["ways"] == [False] * 4
        assert found["status"] == "COC_REGION=auto: layers one by one: no layer leaves rows unfinished"


@pytest.mark.slow
def test_checked_passes_are_not_timed(ranks):
    for found in ranks(2).run(decided, None, {}, {"steps": 4, "settings": {**AUTO, "verify_every": 1}}):
        assert found["ways"] == [False] * 4
        why = "nothing is measured: COC_VERIFY takes time of its own"
        assert found["status"] == f"COC_REGION=auto: layers one by one: {why}"


def excluded(group):
    """Return what was decided for a configuration that excludes regions."""
    from ascend_parallel.patches.region_choice import RegionChoice

    choice, x = RegionChoice("auto"), torch.ones(1)
    before = str(choice)
    assert choice.call(torch.nn.Identity(), x, lambda: x, "CUDA graphs") is x
    return before, str(choice), choice.on


def test_a_configuration_without_regions_is_not_timed(ranks):
    before, after, on = ranks(2).run(excluded)[0]
    assert before == "COC_REGION=auto: not decided yet, 0 of 10 turns of the first passes are done"
    assert after == "COC_REGION=auto: layers one by one: nothing is measured: CUDA graphs"
    assert not on


@promise("region-choice")
@pytest.mark.slow
@on_ranks(4)
def test_each_pipeline_stage_decides_on_its_own_at_a_step_of_its_schedule(group):
    """Two pipeline stages of two tensor-parallel ranks, whose regions seem slow on the second."""
    runs = []
    with megatron(2, pipeline_parallel=2), megatron_on_cpu(schedules=True):
        last = dist.get_rank() >= 2
        for settings in ({"num_chunks": 1}, AUTO):
            ascend_parallel.configure(**settings)
            model = small_gpt(num_layers=4, tied=False)
            generator = torch.Generator().manual_seed(3)
            batches = iter([torch.randint(256, (4, 65), generator=generator) for _ in range(36)])
            ways, losses = [], []
            with observed(FakeClock(2.0 if last else 0.5)):
                for _ in range(12):
                    ascend_parallel.ops.COUNTS.clear()
                    losses += pipeline_step(model, batches)
                    ways.append(ascend_parallel.ops.COUNTS.as_dict().get("region", {"calls": 0})["calls"])
            runs.append([*losses, *(parameter.grad for parameter in model.parameters())])
        same = all(map(torch.equal, *runs))
        assert same
        assert len(ways) == 12
        # The first stage holds two forwards at once; the last ends every micro-batch before the next.
        if not last:
            assert ways == [12 * region for region in (*TURNS, True, True)]
        else:
            assert ways[4:] == [0] * 8
            assert sum(ways) == 4 * sum(TURNS)
