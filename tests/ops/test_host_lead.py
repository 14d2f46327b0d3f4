"""Rows come later where the host runs ahead of the device; else a result is waited for at once."""

from types import SimpleNamespace

import pytest
import torch

from ascend_parallel.ops import host_lead, unfinished
from ascend_parallel.ops.host_lead import LEAD, STEADY, Leads
from ascend_parallel.ops.unfinished import Captures


class Group:
    """Stands for a process group."""

    def __init__(self, blocks_host=False):
        self.blocks_host = blocks_host


class Device:
    """Stands for a device: how many marks were launched, how many it has passed, how often it was asked."""

    def __init__(self):
        self.launched = self.passed = self.asked = 0
        self.streams = []


class Mark:
    """An event of the device."""

    def __init__(self, device):
        self.device, self.number = device, 0

    def record(self, stream):
        self.device.streams.append(stream)
        self.device.launched += 1
        self.number = self.device.launched

    def query(self):
        self.device.asked += 1
        return self.number <= self.device.passed


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(host_lead, "runs_ahead", lambda _: True)
    monkeypatch.setattr(host_lead, "backend_of", lambda group, _: SimpleNamespace(blocks_host=group.blocks_host))
    monkeypatch.setattr(torch, "Event", lambda _: Mark(made))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"the stream of {device}")
    return made


CPU = torch.device("cpu")


def test_the_host_is_ahead_by_results_of_a_group(device):
    leads, group, other = Leads(), Group(), Group()
    needed = LEAD + STEADY
    asked = [leads.host_is_ahead(group, CPU) for _ in range(needed + 1)]
    assert asked == [False] * (needed - 1) + [True] * 2
    assert not leads.host_is_ahead(other, CPU)  # of which there was none
    device.passed = device.launched
    assert [leads.host_is_ahead(group, CPU) for _ in range(needed)] == [False] * (needed - 1) + [True]


def test_a_lead_that_breaks_has_to_last_again(device):
    """As where a loss keeps the device at work for a while, and the host is the bound all the same."""
    leads, group = Leads(), Group()
    assert not any(leads.host_is_ahead(group, CPU) for _ in range(LEAD + STEADY - 1))
    for _ in range(3):
        device.passed = device.launched - LEAD + 1  # it has come to the oldest mark
        assert not any(leads.host_is_ahead(group, CPU) for _ in range(STEADY))
    assert leads.host_is_ahead(group, CPU)


def test_a_pass_without_rows_to_leave_asks_and_leaves_no_mark(device):
    leads, group = Leads(), Group()
    for _ in range(2):
        assert [leads.host_is_ahead(group, CPU, notes=False) for _ in range(LEAD + STEADY)] == [False] * (LEAD + STEADY)
    assert device.launched == 0
    for _ in range(LEAD + STEADY):
        leads.host_is_ahead(group, CPU)
    assert leads.host_is_ahead(group, CPU, notes=False) and device.launched == LEAD + STEADY


def test_a_group_keeps_no_more_marks_than_it_asks(device, monkeypatch):
    made = []
    monkeypatch.setattr(torch, "Event", lambda _: made.append(Mark(device)) or made[-1])
    leads, group = Leads(), Group()
    for _ in range(5 * LEAD):
        leads.host_is_ahead(group, CPU)
    assert len(made) == LEAD and device.launched == 5 * LEAD


def test_where_waits_stop_the_host_rows_come_later_and_nothing_is_asked(device):
    leads, group = Leads(), Group(blocks_host=True)
    assert all(leads.host_is_ahead(group, CPU) for _ in range(2 * LEAD))
    assert device.launched == device.asked == 0


def test_a_mark_lies_in_the_stream_of_the_results_device(device, monkeypatch):
    leads, group = Leads(), Group()
    for number in (1, 0, 1):
        leads.host_is_ahead(group, torch.device(f"cuda:{number}"))
    assert device.streams == [f"the stream of cuda:{number}" for number in (1, 0, 1)]


class Graph:
    """Stands for a graph; notes how many captures there are when its own begins and ends."""

    def __init__(self):
        self.seen = []

    def capture_begin(self, fails=False):
        self.seen.append(Captures.running)
        if fails:
            raise RuntimeError("planted")

    def capture_end(self):
        self.seen.append(Captures.running)


BEGIN = unfinished._settling(Graph.capture_begin, ends=False)
END = unfinished._settling(Graph.capture_end, ends=True)


def test_nothing_is_asked_while_a_graph_is_captured(device):
    leads, group, graph = Leads(), Group(), Graph()
    for _ in range(LEAD):
        leads.host_is_ahead(group, CPU)
    before = device.launched
    BEGIN(graph)
    assert leads.host_is_ahead(group, CPU) and (device.launched, device.asked) == (before, 0)
    END(graph)
    leads.host_is_ahead(group, CPU)
    assert (device.launched, device.asked) == (before + 1, 1)


def test_a_capture_counts_while_it_runs_also_if_it_fails():
    graph = Graph()
    BEGIN(graph)
    assert Captures.running == 1
    END(graph)
    assert Captures.running == 0
    with pytest.raises(RuntimeError, match="planted"):
        BEGIN(graph, fails=True)
    assert Captures.running == 0 and graph.seen == [1, 1, 1]


def test_a_capture_before_which_rows_cannot_be_finished_does_not_begin(monkeypatch):
    """Where `capture_begin` raises, no context manager ends what has begun."""

    def fails():
        raise RuntimeError("planted")

    graph = Graph()
    monkeypatch.setattr(unfinished, "settle", fails)
    with pytest.raises(RuntimeError, match="planted"):
        BEGIN(graph)
    assert not graph.seen and Captures.running == 0
    with pytest.raises(RuntimeError, match="planted"):
        END(graph)
    assert graph.seen == [0]
