"""A recording from start to end: its content, its ranks, the variable, and no effect when off."""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from launch import forked_python
from timelines import operators, step
from torch.distributed import distributed_c10d as c10d

import ascend_parallel
from ascend_parallel import Settings, ops, timeline
from ascend_parallel.diagnostics.timeline.files import TimelineError, read_run
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.environment import read_settings
from ascend_parallel.ops.clocks import DeviceClock
from ascend_parallel.ops.record import RECORDING
from ascend_parallel.settings import current_settings


def many(group, folder):
    with timeline.record(folder, passes=5):
        for _ in range(8):
            ops.matmul_all_reduce(torch.randn(64, 8), torch.randn(8, 8), group, num_chunks=2)


def test_the_last_passes_are_kept_and_the_cut_is_told(ranks, tmp_path):
    ranks(2).run(many, tmp_path)
    files, notes = read_run(tmp_path)
    assert [len(file.passes) for file in files] == [5, 5]
    assert notes == [f"rank {rank} kept its last 5 of 8 passes (timeline_passes)" for rank in (0, 1)]


def twice(group, folder):
    for second in range(2):  # runs are told apart by the second in which they began
        with mock.patch.object(time, "strftime", return_value=f"20260101-00000{second}"):
            operators(group, folder)


def test_two_runs_in_one_folder_are_kept_apart(ranks, tmp_path):
    ranks(2).run(twice, tmp_path)
    assert len(list(tmp_path.glob("*.jsonl"))) == 4
    files, notes = read_run(tmp_path)
    older = notes[0].split()[-2]
    assert files[0].header["run"] == files[1].header["run"] > older
    assert read_run(tmp_path, older)[0][0].header["run"] == older
    with pytest.raises(TimelineError, match="has no run 'x'"):
        read_run(tmp_path, "x")


def one_sided(group, folder):
    """Rank 1 does not record; the store's limit is made short for the test."""
    store = c10d._get_process_group_store(group)
    limit = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        if group.rank() == 0:
            with pytest.raises(
                timeline.ClockError, match=r"rank 1 of group .* has not come to the comparison of clocks .* within 1 s"
            ):
                operators(group, folder)
        return RECORDING.recorder is None
    finally:
        store.set_timeout(limit)


def test_a_rank_that_does_not_record_is_named(ranks, tmp_path):
    pool = ranks(2)
    assert pool.run(one_sided, tmp_path) == [True, True]
    pool.close()  # its ranks have counted differently


def silent(group):
    """Without recording nothing is kept: no recorder, no thread, no hook."""
    step(group, Settings(num_chunks=3), True)
    threads = [thread.name for thread in threading.enumerate() if "timeline" in thread.name]
    hooks = torch.nn.modules.module
    return RECORDING.recorder, threads, len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)


def test_off_means_nothing(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ranks(3).run(silent) == [(None, [], 0, 0)] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_passes_is_checked(tmp_path):
    for passes in (0, -1, 2.5, True, 1_000_001):
        with pytest.raises(ValueError, match=f"passes={passes!r} is not allowed: give a whole number from 1"):
            timeline.Session(tmp_path, passes)
    assert RECORDING.recorder is None


SCRIPT = """
import sys, torch, torch.distributed as dist, ascend_parallel
dist.init_process_group("gloo")
if "idle" not in sys.argv:
    for _ in range(3):
        ascend_parallel.ops.matmul_all_reduce(torch.randn(64, 8), torch.randn(8, 8), num_chunks=2)
dist.barrier()
dist.destroy_process_group()
"""


def start(tmp_path, *arguments):
    """Run a script on two ranks with COC_TIMELINE set, as torchrun would start it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **store, "COC_TIMELINE": str(tmp_path / "new" / "folder"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [forked_python(), str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(ascend_parallel.__file__).parents[1],
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return [[line for line in text.splitlines() if line.startswith("ascend_parallel timeline")] for text in said]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_the_variable_alone_writes_at_exit_and_rank_0_says_so(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert start(tmp_path) == [
        [f"ascend_parallel timeline: 3 passes of layers on each of 2 ranks; see: ascend-parallel timeline {folder}"],
        [],
    ]
    merged = merge(folder)
    (row,) = merged.rows()
    assert (row.layer, row.passes) == ("matmul_all_reduce [64, 8, 8]", 3)
    assert [shift.offset for shift in merged.shifts] == [0, 0]
    assert "one host, one clock" in merged.shifts[1].how
    assert not list(folder.glob(".*"))  # nothing half written
    for file in merged.files:
        header = json.loads(file.path.read_text().splitlines()[0])
        assert header["clocks"][0]["error"] < 1e9


@pytest.mark.slow
def test_a_run_without_layers_says_that_nothing_was_recorded(tmp_path):
    said, others = start(tmp_path, "idle")
    assert len(said) == 1
    assert "nothing was recorded" in said[0]
    assert others == []
    assert not (tmp_path / "new").exists()


class FakeDevice:
    """Streams and events as torch.cuda and torch.npu have them, on a clock that is set by hand."""

    def __init__(self):
        self.now, self.current, self.log = 0.0, "main", []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time, self.stream = device.now, device.current

            def synchronize(self):
                device.log.append("synchronize")

            def elapsed_time(self, later):
                return later.time - self.time

        self.Event = Event

    def Stream(self):
        return "side"

    def synchronize(self):
        pass

    @contextlib.contextmanager
    def stream(self, name):
        self.current, kept = name, self.current
        yield
        self.current = kept


def test_on_a_device_a_collective_is_waited_for_in_a_stream_of_its_own():
    device = FakeDevice()
    clock = DeviceClock(device)
    waited, ended = [], []

    class Collective:
        def wait(self):
            waited.append(device.current)
            device.now = 7.5

    work = Collective()
    device.now = 2.0
    begin = clock.mark()
    assert clock.watch(ended.append, [work]) == [work]  # which the computing stream still waits for
    assert (waited, begin.stream, ended[0].stream, device.current) == (["side"], "main", "side", "main")
    assert device.log == []  # nothing waits for the device before times are asked for
    assert clock.ns(ended[0]) - clock.ns(begin) == 5_500_000


def test_configure_starts_and_ends_a_recording(tmp_path, monkeypatch):
    for name in [name for name in os.environ if "COC" in name]:
        monkeypatch.delenv(name)
    try:
        assert ascend_parallel.configure(timeline=str(tmp_path)).timeline == str(tmp_path)
        first = RECORDING.recorder
        assert first is not None
        ascend_parallel.configure(timeline=str(tmp_path))
        assert RECORDING.recorder is first  # the same again: it goes on
        with pytest.raises(ascend_parallel.SettingsError, match=r"timeline='' is not allowed: give a folder"):
            ascend_parallel.configure(timeline="")
        with pytest.raises(ascend_parallel.SettingsError, match="COC_TIMELINE=' ' is not allowed: give the folder"):
            read_settings({"COC_TIMELINE": " "})
        assert RECORDING.recorder is first  # what was in force stays in force
        with pytest.raises(ascend_parallel.SettingsError, match="timeline_passes=0 is not allowed"):
            ascend_parallel.configure(timeline=str(tmp_path), timeline_passes=0)
    finally:
        ascend_parallel.configure()
    assert RECORDING.recorder is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_found_when_it_is_configured(tmp_path):
    """The error comes before any change: settings and recording stay as before."""
    import ascend_parallel
    from ascend_parallel import SettingsError

    (tmp_path / "file").write_text("")
    before = current_settings()
    for folder in (
        tmp_path / "file",
        tmp_path / "file" / "inside",
        "/proc/nowhere",
        tmp_path / ("x" * 300) / "y",
        "a\0b",
    ):
        with pytest.raises(
            SettingsError, match=r"^COC_TIMELINE='.*' cannot be written to \(.*\): give a writable folder"
        ):
            ascend_parallel.configure(timeline=str(folder), num_chunks=2)
        assert current_settings() is before
        with (
            pytest.raises(SettingsError, match=r"^folder='.*' cannot be written to"),
            ascend_parallel.timeline.record(folder),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    try:
        ascend_parallel.configure(timeline=str(tmp_path / "new" / "folder"))
        assert not (tmp_path / "new").exists()  # made when there is something to write
    finally:
        ascend_parallel.configure(timeline=None)
