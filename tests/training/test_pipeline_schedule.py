"""Schedules: each rank's actions and their order, times and drawing."""

import itertools
import re
from pathlib import Path

import pytest

from ascend_parallel.training.pipeline.picture import svg, text
from ascend_parallel.training.pipeline.schedule import (
    SCHEDULES,
    Action,
    Times,
    closed_bubble,
    order,
    simulate,
    stages_of,
)

DRAWN = Path(__file__).parents[2] / "docs" / "images" / "pipeline.svg"
SIZES = [
    (name, ranks, ranks * several, count)
    for name, several in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3))
    for ranks in (1, 2, 3, 4, 8)
    for count in (ranks, 2 * ranks, 4 * ranks)
] + [
    (name, ranks, ranks * several, count)
    for name, several in (("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2))
    for ranks in (2, 3, 4)
    for count in (ranks, 2 * ranks, 4 * ranks)
]


@pytest.mark.parametrize(("name", "ranks", "stages", "count"), SIZES)
def test_every_action_runs_once_after_what_it_needs(name, ranks, stages, count):
    at = stages_of(name, ranks, stages)
    found = simulate(name, ranks, stages, count, Times(forward=1.0, backward=2.0, send=0.25))
    stop, start = {}, {}
    for rank, slots in enumerate(found.slots):
        assert [slot.action for slot in slots] == list(order(name, ranks, stages, count)[rank])
        assert all(at[slot.action.stage] == rank for slot in slots)
        assert all(first.stop <= second.start for first, second in itertools.pairwise(slots))
        for slot in slots:
            assert slot.action not in stop
            start[slot.action], stop[slot.action] = slot.start, slot.stop
    for stage in range(stages):
        for number in range(count):
            forward = Action("F", stage, number)
            backward = Action("B", stage, number) if Action("B", stage, number) in stop else Action("I", stage, number)
            assert start[backward] >= stop[forward]
            if backward.kind == "I":
                assert start[Action("W", stage, number)] >= stop[backward]
            if stage:
                send = 0.25 if at[stage] != at[stage - 1] else 0
                assert start[forward] >= stop[Action("F", stage - 1, number)] + send
                before = next(action for kind in "BI" if (action := Action(kind, stage - 1, number)) in stop)
                assert start[before] >= stop[backward] + send
    assert len(stop) == sum(len(actions) for actions in order(name, ranks, stages, count))


@pytest.mark.parametrize(("name", "ranks", "stages", "count"), SIZES)
def test_bubbles_are_those_of_the_published_formula(name, ranks, stages, count):
    closed, found = closed_bubble(name, ranks, stages, count), simulate(name, ranks, stages, count)
    if closed is not None:
        assert found.bubble == pytest.approx(closed, abs=1e-12)
    elif ranks > 1:
        assert found.bubble < simulate("1f1b", ranks, ranks, count).bubble
    busy = [sum(slot.stop - slot.start for slot in slots) for slots in found.slots]
    assert busy == pytest.approx([3.0 * count] * ranks)


def test_the_formula_has_the_known_values():
    assert closed_bubble("gpipe", 4, 4, 8) == closed_bubble("1f1b", 4, 4, 8) == 3 / 11
    assert closed_bubble("interleaved_1f1b", 4, 8, 8) == 3 / 19
    assert closed_bubble("interleaved_1f1b", 4, 8, 3) is None  # for multiples of the ranks alone
    assert closed_bubble("zbv", 4, 8, 8) is None


def test_live_micro_batches():
    assert simulate("gpipe", 4, 4, 8).live == (8, 8, 8, 8)
    assert simulate("1f1b", 4, 4, 8).live == (4, 3, 2, 1)
    assert max(simulate("zbv", 4, 8, 8).live) == 4


def test_stages_of_their_own_times():
    """The slower of two stages is busy from its first forward to its last backward."""
    seconds = {("F", 0): 1.0, ("B", 0): 1.0, ("F", 1): 2.0, ("B", 1): 2.0}
    found = simulate("1f1b", 2, 2, 4, Times(measured=seconds))
    slow = found.slots[1]
    assert slow[-1].stop - slow[0].start == 16
    assert found.seconds == 18


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("pipedream", 2, 2, 4), "give one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, zbv"),
        (("gpipe", 2, 4, 4), "4 stages on 2 meshes: this schedule has one stage on each mesh"),
        (("interleaved_1f1b", 2, 3, 4), "give a multiple of that many stages"),
        (("zbv", 2, 6, 4), "give twice as many stages"),
        (("1f1b", 4, 4, 3), "'1f1b' needs at least as many as stages, 4"),
        (("interleaved_1f1b", 4, 8, 9), "give a multiple of 4, or one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12"),
        (("gpipe", 2, 2, 0), "micro_batches=0: give a whole number from 1"),
        (("gpipe", 2, 2, True), "micro_batches=True"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        order(*given)


def test_text():
    lines = text(simulate("1f1b", 2, 2, 3)).splitlines()
    assert lines == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches; bubbles 25.0%, by the formula 25.0%",
        "ranks hold the activations of at most 2, 1 micro-batches",
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
    ]
    several = text(simulate("zbv", 2, 4, 4))
    assert "F0a" in several and "W3b" in several
    *_, long, last = text(simulate("1f1b", 2, 2, 64)).splitlines()
    assert [len(long), len(last)] == [240, 240]
    assert last.startswith("rank 1  .   F0- B0----- F1- B1-----") and long.endswith(" ...")


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture(name):
    found = simulate(name, 4, {"interleaved_1f1b": 8, "zbv": 8}.get(name, 4), 8)
    drawn = svg(found)
    slots = re.findall(r'<g class="slot [FBIW](?: later)?"><rect x="[\d.]+" y="\d+" width="[\d.]+" height="30"', drawn)
    assert len(slots) == sum(map(len, found.slots))
    shaded = re.findall(r'class="shade" x="70" y="\d+" width="([\d.]+)"', drawn)
    assert len(shaded) == 4 and len(set(shaded)) == 1  # under every rank, for the whole step


def test_the_picture_of_the_docs_is_current():
    stages = {"gpipe": 4, "1f1b": 4, "interleaved_1f1b": 8, "zero_bubble": 4, "zbv": 8}
    assert DRAWN.read_text() == svg(*(simulate(name, 4, count, 8) for name, count in stages.items()))
