"""How COC_REGION=auto decides: a pure function of the seconds of its turns."""

import pytest

from ascend_parallel.patches.region_choice import TURNS, WARM_UP, decide


def seconds(pairs, warm=(9.0, 9.0)):
    """Return the turns' seconds in the order of TURNS; `pairs`: (layers, regions) of neighbouring turns."""
    found = list(warm)
    for (layers, regions), first in zip(pairs, TURNS[WARM_UP::2], strict=True):
        found += [regions, layers] if first else [layers, regions]
    return found


@pytest.mark.parametrize(
    ("pairs", "region"),
    [
        ([(1.0, 0.9)] * 4, True),
        (
            [(1.0, 0.5)] * 2 + [(1.0, 1.1)] * 2,
            False,
        ),  # neighbouring turns are the rounds of a contest
    ],
)
def test_the_decision_is_a_pure_function_of_the_turns(pairs, region):
    decision = decide(seconds(pairs))
    assert decision.region is region
    assert decision == decide(seconds(pairs, warm=(0.1, 99.0)))  # the warm-up does not count
    assert f"{1e3 * decision.layers:.2f} ms in layers and {1e3 * decision.regions:.2f} ms in regions" in str(decision)


def test_what_returns_every_second_or_fourth_turn_falls_on_both_ways():
    timed = TURNS[WARM_UP:]
    for period in (1, 2, 4):
        for first in range(period):
            ways = timed[first::period]
            assert 2 * sum(ways) == len(ways)
    assert set(TURNS[:WARM_UP]) == {False, True}


@pytest.mark.parametrize(("busy", "said"), [(0.95, True), (0.5, False)])
def test_python_that_costs_more_than_it_hides_is_the_reason_that_is_said(busy, said):
    turns = seconds([(1.0, 3.0)] * 4)
    decision = decide(turns, [busy * turn for turn in turns])
    assert not decision.region
    reason = "regions lose 200.0 %"
    host = f"; the host is busy with them for {3e3 * busy:.2f} ms: their Python costs more than they hide"
    assert decision.why == (reason + host if said else reason)


def test_what_the_host_takes_decides_nothing():
    turns = seconds([(1.0, 0.5)] * 4)
    assert decide(turns, turns) == decide(turns)
