"""The virtual clock: times of the table add up, streams and ranks meet, what programs decide by stays real."""

import json
import math
import subprocess
import sys
import time

import pytest
import torch
from emulated_ascend.devices import DEVICES, device_of
from emulated_ascend.probe import host_factor
from emulated_ascend.ranks import Ranks
from emulated_ascend.records import Record, Step, covered, said, summary, verdict
from emulated_ascend.wheel import Unusable

DEVICE = DEVICES["910B1"]


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(
        2,
        {
            "EMULATED_ASCEND_CLOCK": "1",
            "EMULATED_ASCEND_FIGURES": DEVICE.text(1.0),
            "EMULATED_ASCEND_DELAY_US": None,
            "TASK_QUEUE_ENABLE": "0",
        },
    )
    yield pool
    pool.close()


def figure(name):
    return DEVICE.figures[name][0]


def product_ms(m, n, k):
    """Return the time of a product whose tiles of 256 x 128 fill the cores."""
    waves = math.ceil(m / 256 * n / 128 / figure("cores"))
    per_core = figure("tflops") * 1e12 * figure("utilisation") / figure("cores")
    return waves * 2 * 256 * 128 * (k + 64) / per_core * 1e3


def all_reduce_ms(mib, ranks):
    """Return the time of an all-reduce of more than the table's last piece but one begins with."""
    _, c0, c1, _ = figure("all_reduce")[-1]
    return (c0 + c1 * mib * figure("fitted_ranks") / ranks) / 1e3


def events(count):
    return [torch.npu.Event(enable_timing=True) for _ in range(count)]


def products():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu")
    torch.npu.synchronize()
    first, second, third = events(3)
    for _ in range(4):  # the first kernels hide the launches of the next
        x @ x
    first.record()
    x @ x
    second.record()
    x @ x
    x @ x
    third.record()
    before = time.perf_counter()
    torch.npu.synchronize()
    waited = time.perf_counter() - before
    return first.elapsed_time(second), second.elapsed_time(third), waited


def test_products_take_what_the_table_says_and_the_host_waits_for_them(ranks):
    one = product_ms(4096, 4096, 4096)
    for single, double, waited in ranks.run(products):
        assert single == pytest.approx(one, rel=1e-3) and double == pytest.approx(2 * one, rel=1e-3)
        assert 0 < waited * 1e3 < 7 * one


def streams():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu")
    other = torch.npu.Stream()
    torch.npu.synchronize()
    begin, own, beside, after = events(4)
    for _ in range(3):
        x @ x
    begin.record()
    other.wait_event(begin)
    for _ in range(4):
        x @ x
    own.record()
    with torch.npu.stream(other):
        x @ x
        beside.record()
    torch.npu.current_stream().wait_event(beside)
    x @ x
    after.record()
    torch.npu.synchronize()
    return begin.elapsed_time(own), begin.elapsed_time(beside), begin.elapsed_time(after)


def test_streams_run_beside_each_other_and_an_event_orders_them(ranks):
    one = product_ms(4096, 4096, 4096)
    for own, beside, after in ranks.run(streams):
        assert own == pytest.approx(4 * one, rel=1e-3)
        assert beside < own and after == pytest.approx(5 * one, rel=1e-3)


def late_rank():
    import torch.distributed as dist

    rank = dist.get_rank()
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    dist.barrier()
    torch.npu.synchronize()
    begin, end = events(2)
    begin.record()
    for _ in range(10 * rank):
        x @ x
    dist.all_reduce(x)
    end.record()
    torch.npu.synchronize()
    return begin.elapsed_time(end)


def test_a_collective_begins_when_the_last_rank_is_ready(ranks):
    early, late = ranks.run(late_rank)
    most = 10 * product_ms(4096, 4096, 4096) + all_reduce_ms(32, 2)
    assert late == pytest.approx(most, rel=0.05)
    assert early > all_reduce_ms(32, 2) + 9 * product_ms(4096, 4096, 4096)


def values():
    import torch.distributed as dist

    rank = dist.get_rank()
    small = torch.arange(6.0, device="npu") + rank
    dist.all_reduce(small)
    tokens = torch.arange(100_000, device="npu") + rank
    dist.all_reduce(tokens)
    large = torch.full((1024, 1024), 3.0, device="npu")
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    return small.tolist(), int(tokens.sum()), large.isnan().any().item(), large.sum().item(), found


def test_what_a_program_decides_by_is_computed_and_the_rest_is_zero_where_it_is_small(ranks):
    for small, tokens, is_nan, total, found in ranks.run(values):
        assert small == [2.0 * i + 1 for i in range(6)]
        assert tokens == 2 * sum(range(100_000)) + 100_000
        assert is_nan is False and total == 0.0
        assert found == [{"rank": 0}, {"rank": 1}]


def trained():
    import torch.distributed as dist
    from emulated_ascend import clock

    clock.forget()
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        (weight @ weight).sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
    torch.npu.synchronize()
    return clock.steps()


def test_steps_are_what_lies_between_an_optimizers_steps(ranks):
    for steps in ranks.run(trained):
        assert len(steps) == 2
        last = steps[-1]
        assert last.busy >= 3 * product_ms(4096, 4096, 4096)
        assert last.collectives == pytest.approx(all_reduce_ms(32, 2), rel=1e-3)
        assert last.exposed >= last.collectives * 0.999
        assert last.busy + last.starved + last.exposed == pytest.approx(last.step, rel=1e-3)


def fused():
    import torch.distributed as dist
    import torch_npu

    group = dist.group.WORLD._get_backend(torch.device("npu"))
    name = group.get_hccl_comm_name(dist.get_rank())
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu")
    torch_npu.npu_mm_all_reduce_base(x, x, name)
    torch.npu.synchronize()
    begin, end = events(2)
    x @ x
    begin.record()
    torch_npu.npu_mm_all_reduce_base(x, x, name)
    end.record()
    torch.npu.synchronize()
    return begin.elapsed_time(end)


def test_a_fused_operator_takes_less_than_its_two_parts(ranks):
    longer, shorter = all_reduce_ms(32, 2), product_ms(4096, 4096, 4096)
    for took in ranks.run(fused):
        assert longer < took < longer + shorter


TRAIN = """
import os, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["RANK"]))
weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    (weight @ weight).sum().backward()
    optimizer.step()
    torch.npu.synchronize()
"""


def test_run_prints_the_steps_and_writes_lanes(tmp_path):
    script, lanes, figures = tmp_path / "train.py", tmp_path / "lanes.json", tmp_path / "figures.json"
    script.write_text(TRAIN)
    words = ["run", "--clock", "--device", "910b3", "--ranks", "1", "--lanes", lanes, "--summary", figures, script]
    done = subprocess.run(
        [sys.executable, "-m", "emulated_ascend", *map(str, words)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "emulated 910B3, ranks: 1, real torch_npu; times of a table, not of a card" in done.stdout
    result = json.loads(figures.read_text())
    assert result["device"] == "910B3" and result["typical"]["0"]["busy"] > 1
    named = {event["args"]["name"] for event in json.loads(lanes.read_text())["traceEvents"] if event["ph"] == "M"}
    assert "host" in named and any(name.startswith("stream") for name in named)


def test_bad_words_are_a_sentence():
    with pytest.raises(Unusable, match="--device is 910A; allowed are 910B1, 910B2, "):
        device_of("910A")
    with pytest.raises(Unusable, match="--host is fast; allowed are a number above 0, and probe"):
        host_factor("fast")
    assert host_factor("2.5") == 2.5 and 0 < host_factor("probe") < 1000


def test_every_figure_has_a_source_and_what_has_none_is_called_assumed():
    names = set(DEVICE.figures)
    for device in DEVICES.values():
        assert set(device.figures) == names
        assert all(source for _, source in device.figures.values())
        assert "launch" in device.assumed()
    assert device_of("Ascend910B4").memory_mb == 32768


def test_a_record_without_steps_says_how_to_set_one(tmp_path):
    assert said(summary(tmp_path), "910B1")[0].startswith("no steps")
    (tmp_path / "rank-0.json").write_text(json.dumps({"marks": [], "spans": []}))
    assert said(summary(tmp_path), "910B1")[0].startswith("no steps")


def test_spans_that_overlap_count_once_and_the_verdict_names_what_a_step_waits_for():
    spans = [(0, "k", 0, 10, ""), (1, "k", 5, 20, ""), (0, "k", 30, 50, "")]
    assert covered(spans, (2, 40)) == 18 + 10
    step = Step(10.0, 5.0, 4.0, 1.0, 2.0, 9.0, 3).__dict__
    assert verdict(step).startswith("the host is in the way") and "40%" in verdict(step)
    assert verdict({**step, "starved": 0.0}).startswith("communication is in the way")
    assert verdict({**step, "starved": 0.0, "exposed": 0.0}).startswith("the device computes")
    record = Record(
        [(0, 0, 0, 0), (9, 4, 20, 0)],
        [(0, "k", 0, 12, ""), (3, "l", 2, 18, ""), (0, "x", 12, 18, ""), (0, "s", 18, 20, "")],
    )
    (made,) = record.steps()
    assert (made.busy, made.exposed, made.collectives, made.host) == (14e-6, 6e-6, 16e-6, 4e-6)
    assert made.kernels == 1
