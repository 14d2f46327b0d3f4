"""Ranks started for a measurement: their results, and the errors of ranks that fail, hang or are foreign."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ascend_parallel.tuning.launch.link import parse_rate
from ascend_parallel.tuning.launch.ranks import RankError, call_on_ranks, report


def add(group, a, b):
    total = torch.tensor([group.rank()])
    dist.all_reduce(total)
    return [int(total), a + b, os.environ.get("COC_PARALLEL_NUM")]


def raises_on_one(group):
    if group.rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def hangs_on_one(group):
    if group.rank() == 1:
        time.sleep(600)


def reports(group):
    for step in range(3):
        report(f"step {step}")
        time.sleep(0.6)


@pytest.fixture(autouse=True)
def found_by_the_ranks(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
def test_results_of_rank_0(monkeypatch):
    monkeypatch.setenv("COC_PARALLEL_NUM", "4")  # a user's, and none of the measurement's
    assert call_on_ranks("test_launch_ranks:add", 3, limit=60, a=4, b=5) == [3, 9, None]


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_what_it_printed():
    with pytest.raises(RankError, match=r"rank 1 ended with status 1(.|\n)*rank 1 printed(.|\n)*ValueError: planted"):
        call_on_ranks("test_launch_ranks:raises_on_one", 2, limit=60)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended():
    before = time.monotonic()
    with pytest.raises(RankError, match="rank 0, 1 not done within 12 s"):
        call_on_ranks("test_launch_ranks:hangs_on_one", 2, limit=12)
    assert time.monotonic() - before < 60


@pytest.mark.slow
def test_progress_is_shown():
    lines = []
    call_on_ranks("test_launch_ranks:reports", 2, limit=60, on_progress=lines.append)
    assert lines
    assert set(lines) <= {"step 0", "step 1", "step 2"}


def test_rates():
    assert [parse_rate(text) for text in ("1gbit", "2.5gbit", " 500mbit ")] == [10**9, 25 * 10**8, 5 * 10**8]
    for text in ("1", "fast", "10kbit", "-1gbit", json.dumps(None)):
        with pytest.raises(ValueError, match="is not allowed: give 1mbit or more"):
            parse_rate(text)
