"""Schedules: each rank's actions and their order, times and drawing."""

import random
import re
from pathlib import Path

import pytest

from ascend_parallel.training.pipeline.picture import svg, text
from ascend_parallel.tuning.step_time.schedule import SCHEDULES, Action, closed_bubble, order, stages_of
from ascend_parallel.tuning.step_time.timing import StageTimes, simulate

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
def test_every_action_starts_when_its_rank_is_free_and_its_inputs_are_there(name, ranks, stages, count):
    at, drawn = stages_of(name, ranks, stages), random.Random(count)
    measured = {(kind, stage): drawn.uniform(0.5, 2) for kind in "FBIW" for stage in range(stages)}
    step = simulate(name, ranks, stages, count, StageTimes(send=0.25, measured=measured))
    slots = [slot for slots in step.slots for slot in slots]
    stop = {slot.action: slot.stop for slot in slots}
    assert len(stop) == len(slots) == sum(map(len, order(name, ranks, stages, count)))
    forwards = {Action("F", stage, number) for stage in range(stages) for number in range(count)}
    assert forwards <= stop.keys()

    def arrives(action):
        """Return when the inputs of an action are on its rank."""
        kind, stage, number = action.kind, action.stage, action.micro_batch
        if kind == "W":
            return stop[Action("I", stage, number)]
        source, kinds = (stage - 1, "F") if kind == "F" else (stage + 1, "BI")
        own = 0.0 if kind == "F" else stop[Action("F", stage, number)]
        if not 0 <= source < stages:
            return own
        sent = next(stop[action] for kind in kinds if (action := Action(kind, source, number)) in stop)
        return max(own, sent + (0.25 if at[source] != at[stage] else 0.0))

    for rank, rank_slots in enumerate(step.slots):
        assert [slot.action for slot in rank_slots] == list(order(name, ranks, stages, count)[rank])
        free = 0.0
        for slot in rank_slots:
            assert at[slot.action.stage] == rank
            assert slot.start == max(free, arrives(slot.action))
            assert slot.stop == slot.start + measured[slot.action.kind, slot.action.stage]
            free = slot.stop


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
    found = simulate("1f1b", 2, 2, 4, StageTimes(measured=seconds))
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
