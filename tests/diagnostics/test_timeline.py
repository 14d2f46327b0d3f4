"""Recording on real gloo ranks; it must change nothing else."""

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from timelines import OPERATORS, operators, step

from ascend_parallel import Settings, ops, timeline
from ascend_parallel.diagnostics.intervals import length, within
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.table import busy, communicating, exposed, table
from ascend_parallel.ops.record import RECORDING


def recorded(group, folder, settings, sequence_parallel):
    """Bits with and without recording, and the counts of what ran while it was on."""
    before = step(group, settings, sequence_parallel)
    ops.COUNTS.clear()
    with timeline.record(folder):
        during = step(group, settings, sequence_parallel)
    counts = ops.COUNTS.as_dict()
    after = step(group, settings, sequence_parallel)
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, during, after, strict=True))
    return same, counts, RECORDING.recorder is None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("settings", [Settings(num_chunks=3), Settings(mode=1), Settings(num_chunks=2, fused=True)])
def test_recording_changes_no_bit_and_every_span_is_there(ranks, tmp_path, settings, sequence_parallel):
    results = ranks(2).run(recorded, tmp_path, settings, sequence_parallel)
    assert [(same, off) for same, _, off in results] == [(True, True)] * 2
    files, notes = read_run(tmp_path)
    assert [file.rank for file in files] == [0, 1]
    assert notes == []
    for file, (_, counts, _) in zip(files, results, strict=True):
        assert [layer_pass.key for layer_pass in file.passes] == [
            ("first", "forward"),
            ("second", "forward"),
            ("second", "backward"),
            ("first", "backward"),
        ]
        check_counts(file.passes, counts, sequence_parallel)
        for layer_pass in file.passes:
            check_spans(layer_pass)


def check_counts(passes, counts, sequence_parallel):
    """Return the recorded calls, chunks and collectives like COUNTS, which omits the gather of a column backward."""
    calls = [call for layer_pass in passes for call in layer_pass.calls]
    found = {}
    for call in calls:
        count = found.setdefault(call["operator"], {"calls": 0, "chunks": 0})
        count["calls"] += 1
        count["chunks"] += call["chunks"]
    assert found == {name: {part: count[part] for part in ("calls", "chunks")} for name, count in counts.items()}
    spans = [span for layer_pass in passes for span in layer_pass.spans]
    fused = [call["operator"] for call in calls if call["kernel"] == "shm"]
    assert sum(span.kind == "fused" for span in spans) == len(fused)
    for name, count in counts.items():
        unfused = sum(span.kind == "comm" and span.name == name for span in spans)
        assert unfused + fused.count(name) == count["collectives"]
    assert any(span.name == "all_gather" for span in spans) == sequence_parallel


def check_spans(layer_pass):
    """Check spans: complete, inside their pass, computations in turn, and each wait ends after its collective."""
    assert layer_pass.finished
    assert all(layer_pass.begin <= span.queued <= span.begin <= span.end <= layer_pass.end for span in layer_pass.spans)
    computed = sorted((s.begin, s.end) for s in layer_pass.spans if s.kind in ("matmul", "beside", "fused"))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(computed))
    assert sum(span.kind == "wait" for span in layer_pass.spans) >= sum(
        span.kind == "comm" for span in layer_pass.spans
    )
    for span in layer_pass.spans:
        if span.kind == "comm":
            assert span.end <= max(s.end for s in layer_pass.spans if s.kind == "wait" and s.index == span.index)
            assert span.queued < span.end


def test_collectives_begin_before_the_next_chunks_matmul_ends(ranks, tmp_path):
    ranks(2).run(operators, tmp_path)
    for file in read_run(tmp_path)[0]:
        assert [layer_pass.kind for layer_pass in file.passes] == list(OPERATORS)
        for layer_pass in file.passes:
            check_spans(layer_pass)
        reduce, scatter, gather = file.passes
        for layer_pass in (reduce, scatter):
            matmuls = {span.index: span for span in layer_pass.spans if span.kind == "matmul"}
            collectives = {span.index: span for span in layer_pass.spans if span.kind == "comm"}
            assert sorted(matmuls) == sorted(collectives) == [0, 1, 2]
            for index, collective in collectives.items():
                assert matmuls[index].end <= collective.queued
                assert index == 2 or collective.queued <= matmuls[index + 1].begin
        first, *others = [span for span in gather.spans if span.kind == "matmul"]
        assert first.name == "own rows"
        for index, matmul in enumerate(others):  # each after its own rows have come
            assert next(s for s in gather.spans if s.kind == "comm" and s.index == index).end <= matmul.begin


def slowly(group, folder, seconds):
    """A slow link, planted: rank 1 enters each all-reduce late, so that rank 0's runs and waits for it."""
    whole = dist.all_reduce

    def late(*args, **kwargs):
        if group.rank() == 1:
            time.sleep(seconds)
        return whole(*args, **kwargs)

    torch.manual_seed(group.rank())
    x, w = torch.randn(128, 64), torch.randn(64, 64)
    expected = ops.matmul_all_reduce(x, w, group, num_chunks=4)
    dist.all_reduce = late
    try:
        with timeline.record(folder):
            y = ops.matmul_all_reduce(x, w, group, num_chunks=4)
    finally:
        dist.all_reduce = whole
    return torch.equal(y, expected)


def test_a_slow_link_shows_as_exposed_communication(ranks, tmp_path):
    assert ranks(2).run(slowly, tmp_path, 0.03) == [True, True]
    files, _ = read_run(tmp_path)
    (layer_pass,) = files[0].passes
    # 4 chunks of 30 ms each, and nothing to compute meanwhile: a matmul this small takes microseconds.
    assert length(communicating(layer_pass)) >= 100e6
    assert length(exposed(layer_pass)) >= 100e6
    assert length(within(communicating(layer_pass), busy(layer_pass))) <= length(communicating(layer_pass)) / 4
    (row,) = table(files[:1])
    assert row.hidden < 0.25
    assert row.exposed == pytest.approx(length(exposed(layer_pass)) / 1e6)


class Seen:
    """A receive that signals when a thread has waited for it."""

    def __init__(self, work, waited):
        self.work, self.waited = work, waited

    def wait(self):
        self.work.wait()
        self.waited.set()


def exchanged_while_computing(group, folder):
    """The second chunk's matmul continues until the end of the first chunk's exchange is recorded."""
    kept, mm = dist.irecv, torch.mm
    receives, calls = [], []
    x, w = torch.randn(128, 64), torch.randn(64, 64)
    ops.matmul_reduce_scatter(x, w, group, num_chunks=2)  # asks which chunks keep the bits, by matmuls of its own

    def receive(*args, **kwargs):
        receives.append(threading.Event())
        return Seen(kept(*args, **kwargs), receives[-1])

    def multiply(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:  # two matmuls a chunk
            assert receives[0].wait(30), "nobody waits for the exchange while the rank computes"
            time.sleep(0.5)  # for the sends, and to note the end
        return mm(*args, **kwargs)

    dist.irecv, torch.mm = receive, multiply
    try:
        with timeline.record(folder):
            ops.matmul_reduce_scatter(x, w, group, num_chunks=2)
    finally:
        dist.irecv, torch.mm = kept, mm


def test_the_end_of_sends_and_receives_is_seen_while_the_rank_computes(ranks, tmp_path):
    ranks(2).run(exchanged_while_computing, tmp_path)
    for file in read_run(tmp_path)[0]:
        (layer_pass,) = file.passes
        first = next(span for span in layer_pass.spans if span.kind == "comm")
        last_matmul = max(span.end for span in layer_pass.spans if span.kind == "matmul")
        first_wait = min(span.begin for span in layer_pass.spans if span.kind == "wait")
        assert first.end < last_matmul <= first_wait


def failing(group, folder):
    """A call that fails on all ranks: its spans are written, and unfinished spans are marked."""
    kept, calls = torch.mm, []
    x, w = torch.randn(128, 8), torch.randn(8, 8)
    ops.matmul_all_reduce(x, w, group, num_chunks=4)  # asks which chunks keep the bits, by matmuls of its own

    def third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("planted")
        return kept(*args, **kwargs)

    torch.mm = third
    try:
        with pytest.raises(MemoryError), timeline.record(folder):
            ops.matmul_all_reduce(x, w, group, num_chunks=4)
    finally:
        torch.mm = kept
    return RECORDING.recorder is None


def test_what_failed_is_written_and_marked(ranks, tmp_path):
    assert ranks(2).run(failing, tmp_path) == [True, True]
    for file in read_run(tmp_path)[0]:
        assert [layer_pass.finished for layer_pass in file.passes] == [False]
        assert table([file]) == []
