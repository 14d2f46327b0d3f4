"""Accesses to memory that nothing orders are found, whatever the numbers are, and ordered ones are none."""

import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from emulated_ascend import races
from emulated_ascend.environment import RACES
from emulated_ascend.kernels.table import library
from emulated_ascend.ranks import Ranks


@pytest.fixture(scope="module")
def pool():
    made = Ranks(2, RACES)
    yield made
    made.close()


def found(program):
    """Run a function of this file, by its name, on this rank's device; return its races."""
    torch.npu.synchronize()
    library().emulated_forget_races()
    globals()[program]()
    torch.npu.synchronize()
    return races()


def ones(*sizes):
    return torch.ones(*sizes, device="npu")


def reads_another_streams_product():
    x, side = ones(300, 300), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    y = x @ x
    with torch.npu.stream(side):
        return y + 1


def writes_what_another_stream_reads():
    x, side = ones(300, 300), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x @ x
    x.fill_(2)
    torch.npu.current_stream().wait_stream(side)
    return y


def reads_before_the_collective_is_waited_for():
    x = ones(1000)
    work = dist.all_reduce(x, async_op=True)
    y = x * 2
    work.wait()
    return y


def gives_memory_back_while_another_stream_reads_it():
    side = torch.npu.Stream()
    x = ones(1 << 20)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x + 1
    del x
    return ones(1 << 20), y


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (reads_another_streams_product, r"Adds on stream \d+ reads .*Matmul on stream \d+ writes|Matmul .*Adds"),
        (writes_what_another_stream_reads, r"Matmul on stream \d+ reads|InplaceFillScalar|InplaceOne"),
        (reads_before_the_collective_is_waited_for, "HcclAllReduce on stream .* writes"),
        (gives_memory_back_while_another_stream_reads_it, r"Adds on stream \d+ reads"),
    ],
)
def test_an_order_that_is_missing_is_found_with_both_lines(pool, program, said):
    for texts in pool.run(found, program.__name__):
        assert texts and all("the same memory, and nothing orders them" in text for text in texts)
        assert any(re.search(said, text) for text in texts), texts
        assert all(text.count(f"in {program.__name__}") == 2 for text in texts), texts


def waits_by_stream():
    x, side = ones(300, 300), torch.npu.Stream()
    y = x @ x
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y.add_(1)
    torch.npu.current_stream().wait_stream(side)
    return y * 2


def waits_by_event_and_a_third_stream():
    first, second, x = torch.npu.Stream(), torch.npu.Stream(), ones(100, 100)
    first.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        y = x @ x
    event = first.record_event()
    second.wait_event(event)
    torch.npu.current_stream().wait_stream(second)
    return y + 1


def waits_on_the_host():
    side, x = torch.npu.Stream(), ones(100, 100)
    torch.npu.synchronize()
    with torch.npu.stream(side):
        y = x @ x
    event = side.record_event()
    while not event.query():
        pass
    return y.sum().item()


def waits_for_collectives():
    x = ones(64, 8)
    chunks = [dist.all_reduce(part, async_op=True) for part in x.chunk(4)]
    for work in chunks:
        work.wait()
    gathered = ones(128, 8)
    dist.all_gather_into_tensor(gathered, x)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, gathered[:64])
    dist.reduce_scatter_tensor(x, gathered)
    return x + out


def shares_rows_by_columns():
    x, side = ones(64, 64), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x[:, 32:].fill_(3)
    x[:, :32].fill_(2)
    torch.npu.current_stream().wait_stream(side)
    return x


def records_the_stream_that_reads():
    side = torch.npu.Stream()
    x = ones(1 << 20)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
    return ones(1 << 20), y


ORDERED = (
    waits_by_stream, waits_by_event_and_a_third_stream, waits_on_the_host, waits_for_collectives,
    shares_rows_by_columns, records_the_stream_that_reads,
)  # fmt: skip


@pytest.mark.parametrize("program", ORDERED)
def test_what_is_ordered_is_no_race(pool, program):
    assert pool.run(found, program.__name__) == [[], []]


def seen_by_a_watching_thread():
    """A thread that only asks for events, as HCCL's watchdog does, orders nothing."""
    import threading

    x, side = ones(300, 300), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x @ x
    event = side.record_event()

    def watch():
        while not event.query():
            pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    watcher.join()
    return y + 1


def test_a_thread_that_only_watches_orders_nothing(pool):
    for texts in pool.run(found, "seen_by_a_watching_thread"):
        assert any("Add" in text and "Matmul" in text for text in texts), texts


def test_run_ends_with_a_status_of_its_own_after_a_race(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "x, side = torch.ones(100, 100, device='npu'), torch.npu.Stream()\n"
        "torch.npu.synchronize()\n"
        "y = x @ x\n"
        "with torch.npu.stream(side):\n"
        "    z = y + 1\n"
    )
    words = [sys.executable, "-m", "emulated_ascend", "run", "--races", "--ranks", "1", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3, done.stderr
    assert "train.py:6 in <module>" in done.stderr and "train.py:4 in <module>" in done.stderr
    assert "1 race on rank 0" in done.stderr
