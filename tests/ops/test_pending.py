"""Collectives that have started are waited for, whatever step beside them fails, and each in its turn."""

from contextlib import suppress

import pytest
import torch

from ascend_parallel.ops.pending import FinishingWork, Pending


class Started:
    """A collective of no group, which notes what happens to it."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        log.append(f"start {name}")

    def is_completed(self):
        return False

    def wait(self):
        self.log.append(f"wait {self.name}")


def starts(log, count=3):
    return [lambda name=name: Started(log, name) for name in range(count)]


def step(log, name):
    return lambda: log.append(name)


def test_steps_run_around_their_own_collective():
    log, pending = [], Pending(torch.ones(1), "a test", None, 2)
    pending.launch_each(starts(log, 2), [(step(log, "a"), step(log, "b")), ()], [(step(log, "c"),), ()])
    assert log == ["a", "b", "start 0", "c", "start 1"]
    log.clear()
    assert pending.wait_each([(), (step(log, "d"), step(log, "e"))]) is pending.tensor
    assert log == ["wait 0", "wait 1", "d", "e"]


def failing():
    raise MemoryError("planted")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("before", ["start 0", "wait 0"]),
        ("start", ["start 0", "wait 0"]),
        ("behind", ["start 0", "start 1", "wait 0", "wait 1"]),
        ("then", ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]),
    ],
)
def test_what_has_started_is_waited_for_where_something_fails(where, expected):
    log, pending = [], Pending(torch.ones(1), "a test", None, 3)
    fails, steps = [(), (failing,), ()], {}
    if where in ("before", "behind"):
        steps = {where: fails}
    begun = starts(log)
    if where == "start":
        begun[1] = failing
    with pytest.raises(MemoryError, match="planted"):
        pending.launch_each(begun, **steps)
        pending.wait_each(fails)
    assert log == expected
    pending.wait()  # nothing is left
    assert log == expected


def test_a_step_behind_works_runs_once_when_they_are_there():
    log = []
    pending = Pending(torch.ones(1), "a test", None, 2)
    for name in range(2):
        work = Started(log, name)
        pending.launch(FinishingWork, [work], step(log, f"finish {name}"), None, torch.ones(1))
    log.clear()
    pending.wait_for(1)
    assert log == ["wait 1", "finish 1"]
    pending.wait()
    pending.wait()
    assert log == ["wait 1", "finish 1", "wait 0", "finish 0"]


class Parted:
    """A work that may be waited for once: gloo's block when they are waited for again."""

    def __init__(self, fails=False):
        self.fails, self.waited = fails, 0

    def wait(self):
        self.waited += 1
        if self.fails:
            raise RuntimeError("planted")


def test_a_work_that_was_waited_for_is_not_waited_for_again():
    first, second = Parted(), Parted(fails=True)
    pending = Pending(torch.ones(1), "a test", None, 1)
    pending.launch(FinishingWork, [first, second], lambda: None, None, torch.ones(1))
    for _ in range(2):
        with suppress(Exception):  # an error would name the ranks of a group, and there is none
            pending.wait()
    assert (first.waited, second.waited) == (1, 2)


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_that_has_failed_runs_again(alone):
    """A reader who asks again must not take rows without their sum for finished ones."""
    log = []

    def finish():
        log.append("finish")
        if len(log) == 1:
            raise MemoryError("planted")

    waiting = FinishingWork([] if alone else [Parted()], finish, None, torch.ones(1))
    if not alone:
        work, waiting = waiting, Pending(torch.ones(1), "a test", None, 1)
        waiting.launch(lambda: work)
    with pytest.raises(MemoryError, match="planted"):
        waiting.wait()
    waiting.wait()
    waiting.wait()
    assert log == ["finish", "finish"]
