"""COC_TUNE and COC_PARALLEL_NUM=auto: chunk sizes chosen in a run, equal on every rank."""

import json
import logging
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from layers import Layers
from logged import logged
from marks import promise
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import ascend_parallel
from ascend_parallel import Settings, column_linear
from ascend_parallel.ops import choose
from ascend_parallel.ops.clocks import seconds_of
from ascend_parallel.ops.rows import is_one_gather, one_gather
from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.process_groups.backend import NCCL, ROWS
from ascend_parallel.tuning.measured import chunk_plan, pass_times, tuner
from ascend_parallel.tuning.measured.decider import Decider
from ascend_parallel.tuning.measured.pass_parts import PassBreakdown, rates, repeats, seconds
from ascend_parallel.tuning.measured.tuner import MeasuredBreakdowns, TunedPass, decide, predicted, scaled


def test_what_is_timed_of_a_pass_is_cut_or_kept_whole_with_the_reason():
    whole, halves = (64,), (32, 32)
    assert decide({whole: [1.0] * 3, halves: [0.5] * 3}, whole, halves) == TunedPass(halves, 1.0, 0.5)
    lost = decide({whole: [1.0] * 5, halves: [0.5, 0.5, 1.1, 0.5, 1.1]}, whole, halves)
    assert (lost.sizes, lost.serial) == (whole, 1.0)
    assert lost.why == "the best cut, 2 chunks, wins 50.0 % and loses 2 of 5 rounds, which may be noise"
    assert decide({whole: [1.0] * 3}, whole, whole).why == "no cut that was timed is faster"


SHAPE = LayerShape("row", 1024, 64, 64, 2, sequence_parallel=False, dtype=torch.float32, device="cpu")
(OPERATOR,) = SHAPE.operators
PROBLEM = OPERATOR.matmul


def breakdown(matmul, collective, latency):
    """Return a breakdown with consistent times."""
    return PassBreakdown(
        rows=1024,
        count=8,
        matmul=matmul,
        matmul_piece=matmul / 8,
        latency=latency,
        collective=collective,
        pieces=max(collective, 8 * latency),
    )


def test_what_the_model_makes_of_the_parts():
    balanced = predicted(PROBLEM, breakdown(10e-3, 10e-3, 50e-6))
    assert len(balanced.sizes) > 2
    assert balanced.chosen < 0.7 * balanced.serial
    assert predicted(PROBLEM, breakdown(10e-3, 1e-6, 1e-6)).sizes == (1024,)  # nothing to hide
    assert predicted(PROBLEM, breakdown(1e-4, 1e-2, 1e-2)).sizes == (1024,)  # all latency: each piece costs as much
    bound = predicted(PROBLEM, breakdown(10e-3, 30e-3, 50e-6))
    assert bound.sizes[0] < bound.sizes[-1]  # communication-bound: a short first chunk


def test_one_chunk_is_predicted_as_its_parts_in_turn():
    assert seconds(PROBLEM, breakdown(10e-3, 4e-3, 50e-6), (1024,)) == pytest.approx(14e-3)


def test_lanes_that_slow_each_other_down_hide_less():
    free = breakdown(10e-3, 10e-3, 50e-6)
    equal = (256,) * 4
    slowed = replace(free, compute_rate=0.6, collective_rate=0.8)
    in_turn = replace(free, compute_rate=0.5, collective_rate=0.5)
    assert seconds(PROBLEM, free, equal) < seconds(PROBLEM, slowed, equal) < seconds(PROBLEM, in_turn, equal)
    # Lanes at half their speed gain nothing over running in turn.
    assert seconds(PROBLEM, in_turn, equal) >= seconds(PROBLEM, in_turn, (1024,))
    assert predicted(PROBLEM, in_turn).sizes == (1024,)


@pytest.mark.parametrize(("piece", "pieces"), [(1e-3, 20e-3), (1e-3, 1e-4), (5e-3, 5e-3)])
@pytest.mark.parametrize(("compute", "collective"), [(0.5, 0.9), (0.7, 0.4), (1.0, 1.0)])
def test_rates_are_found_from_what_was_timed(piece, pieces, compute, collective):
    """`rates` recovers the rates from the times of two lanes, if the collectives outlast the matmuls."""
    matmuls, collectives = repeats(piece, pieces)
    alone, whole = matmuls * piece, collectives * pieces
    beside = alone / compute
    if beside * collective > whole:
        return  # more collectives than MOST_AT_ONCE would be needed
    until = beside + (whole - beside * collective)
    assert rates(alone, whole, beside, until) == pytest.approx((compute, collective))


def test_the_parts_of_a_pass_follow_from_those_of_a_pass_alike():
    """A matmul has a time per operation, a collective one per byte beside its latency."""
    wide, thin = (replace(PROBLEM, k=k, n=n) for k, n in ((128, 64), (64, 16)))
    known = breakdown(10e-3, 4e-3, 1e-3)
    assert scaled(known, PROBLEM, wide).matmul == pytest.approx(20e-3)
    assert scaled(known, PROBLEM, wide).collective == pytest.approx(4e-3)
    assert scaled(known, PROBLEM, thin).matmul_piece == pytest.approx(10e-3 / 32)
    assert scaled(known, PROBLEM, thin).collective == pytest.approx(1.75e-3)
    assert scaled(known, PROBLEM, thin).gather == 0
    assert scaled(known, PROBLEM, replace(PROBLEM, k=64 * 9)) is None
    assert scaled(known, PROBLEM, replace(PROBLEM, m=2048)) is None


class PlantedDevice:
    """A device module on which whatever lies between two events takes so many milliseconds."""

    def __init__(self, milliseconds):
        self.milliseconds, self.order = milliseconds, []

    def Event(self, enable_timing):
        assert enable_timing
        return PlantedEvent(self)


class PlantedEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.order.append("record")

    def synchronize(self):
        self.device.order.append("synchronize")

    def elapsed_time(self, later):
        assert self.device.order == ["record", "call", "record", "synchronize"]
        return self.device.milliseconds


@pytest.mark.parametrize(("device", "host"), [(2500.0, 0.0), (0.0, 0.02)])
def test_a_call_on_a_device_takes_what_the_slower_of_device_and_host_takes(device, host):
    module = PlantedDevice(device)

    def call():
        module.order.append("call")
        time.sleep(host)

    with mock.patch.object(torch, "get_device_module", lambda _: module):
        found = seconds_of(call, "cuda")
    assert found == 2.5 if device else found >= host


GATHER = LayerShape("column", 1024, 64, 64, 2, sequence_parallel=True, dtype=torch.float32, device="cpu")


def test_a_gather_that_is_not_cut_is_predicted_where_chunks_cost_more_than_they_hide():
    operator = GATHER.operator("forward")
    with mock.patch.dict(ROWS, {("gloo", "cpu"): NCCL}):
        slow_start = predicted(operator.matmul, breakdown(10e-3, 4e-3, 4e-3))  # each chunk costs as much as the whole
        assert slow_start.sizes == one_gather(1024)
        # The own rows take half of the matmul, which hides the gather.
        assert (slow_start.serial, slow_start.chosen) == pytest.approx((14e-3, 10e-3), rel=0.1)
        assert len(predicted(operator.matmul, breakdown(10e-3, 40e-3, 50e-6)).sizes) > 2
    too_small = replace(operator.matmul, device="cuda")  # its chunks have a tile or two
    assert predicted(too_small, breakdown(10e-3, 40e-3, 50e-6)).sizes == one_gather(1024)
    assert not is_one_gather(predicted(operator.matmul, breakdown(10e-3, 4e-3, 4e-3)).sizes)  # on a CPU


def one_gather_wins(group, tune):
    """Tune a column layer's forward on a device's way, by a clock that likes a gather that is not cut; run it."""
    shape = GATHER._replace(ranks=group.size())
    generator = torch.Generator().manual_seed(group.rank())
    x, weight = (torch.randn(rows, 64, generator=generator) for rows in (1024, 64))
    options = {"group": group, "sequence_parallel": True}
    plain = column_linear(x, weight, settings=Settings(num_chunks=1), **options)

    def clock(self, operator, candidates, rounds):
        return {sizes: [1.0 if is_one_gather(sizes) else 2.0] * rounds for sizes in candidates}

    def alike(self, layer, operator):
        return breakdown(10e-3, 4e-3, 4e-3)

    with (
        as_backend("nccl", group),
        mock.patch.object(pass_times.TimedLinear, "time_sizes", clock),
        mock.patch.object(MeasuredBreakdowns, "of", alike),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "/no/such/cache"}),
        logged(lambda record: record.getMessage()) as lines,
    ):
        found = Decider(Settings(tune=tune, auto=tune is None))
        found._file.save = lambda *_: None
        known = found.known_of_layer(shape, group, backward=False)
        ascend_parallel.ops.COUNTS.clear()
        y = column_linear(x, weight, settings=Settings(tune=tune, auto=tune is None), known=known, **options)
        counted = ascend_parallel.ops.COUNTS.as_dict()["all_gather_matmul"]
        kernel = choose(shape.operator("forward").matmul, Settings(), known).kernel
        read = chunk_plan.read_plan(known.plan.as_dict())
    assert read == known.plan
    return known.plan.entries[0].sizes, kernel, counted, torch.equal(y, plain), lines


@pytest.mark.parametrize("tune", ["nowhere.json", None])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_gather_that_is_not_cut_is_a_candidate_on_a_device(ranks, count, tune):
    for rank, (sizes, kernel, counted, same, lines) in enumerate(ranks(count).run(one_gather_wins, tune)):
        assert (sizes, kernel) == ((0, 1024), "chunked")  # "reference" gathers before it multiplies
        assert counted == {"calls": 1, "chunks": 1, "collectives": 1}
        assert same
        said = "one gather under the product of a rank's own rows, 1000.000 ms (waited for first: 2000.000 ms)"
        assert any(said in line for line in lines) == (rank == 0)


def test_one_pass_of_each_kind_is_measured():
    class Timed:
        def __init__(self, kind):
            self.shape, self.asked = SHAPE._replace(kind=kind), []

        def breakdown(self, operator, rounds):
            self.asked.append((operator.matmul.operator, rounds))
            return breakdown(10e-3, 4e-3, 1e-3)

    known, row, column = MeasuredBreakdowns(), Timed("row"), Timed("column")
    for n in (64, 128, 64 * 9, 1024):
        known.of(row, SHAPE._replace(n=n).operator("forward"))
    known.of(column, OPERATOR)
    assert row.asked == [("matmul_all_reduce", tuner.FIRST_ROUNDS)] * 2
    assert len(column.asked) == 1


def cases(group):
    """Return the sizes for every kind of layer, measured and predicted; equal on every rank."""
    found = {}
    for kind in ("column", "row"):
        for sequence_parallel in (False, True):
            for tune in ("nowhere.json", None):
                settings = Settings(tune=tune, auto=tune is None)
                own_tuner = Decider(settings)
                own_tuner._file.save = lambda *_: None
                shape = LayerShape(
                    kind=kind,
                    own_rows=192,
                    ranks=group.size(),
                    n=48,
                    k=64,
                    dtype=torch.float32,
                    device="cpu",
                    sequence_parallel=sequence_parallel,
                )
                torch.manual_seed(3)
                before = torch.get_rng_state()
                chosen = own_tuner.known_of_layer(shape, group, backward=True)
                assert torch.equal(before, torch.get_rng_state())
                assert own_tuner.known_of_layer(shape, group, backward=True) is chosen
                found[kind, sequence_parallel, tune] = [(e.run, e.operator, e.sizes) for e in chosen.plan.entries]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_finds_the_same(ranks, count, tmp_path, monkeypatch):
    first, *others = ranks(count).run(cases)
    assert all(other == first for other in others)
    runs = {key: [(run, operator) for run, operator, _ in entries] for key, entries in first.items()}
    assert runs["column", False, None] == [("backward", "matmul_all_reduce")]
    assert runs["row", True, "nowhere.json"] == [
        ("forward", "matmul_reduce_scatter"),
        ("backward", "all_gather_matmul"),
    ]


@on_ranks(4)
def test_groups_of_another_size_are_measured_and_not_kept(group):
    """A plan may have matmuls along mesh dimensions of unequal sizes; a file is of one."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp")).get_group("mp")
    with tempfile.TemporaryDirectory() as folder, logged(lambda record: record.getMessage()) as lines:
        path = Path(folder) / "plan.json"
        found = Decider(Settings(tune=str(path)))
        plans = [
            found.known_of_layer(SHAPE._replace(ranks=each.size()), each, backward=False).plan for each in (group, pair)
        ]
        dist.barrier(group)
        found.keep(plans[1].entries[0], pair, "cpu")
        if group.rank() == 0:
            assert json.loads(path.read_text(encoding="utf-8"))["machine"]["ranks"] == 4
            assert f"COC_TUNE: {path} is of groups of 4 ranks; what is measured on 2 is not kept" in lines
    assert [plan.machine.ranks for plan in plans] == [4, 2]


def decided(group, path, seconds):
    """Return the log and the sizes of a shape, if a cut takes `seconds(chunks)` in each round."""
    kept = pass_times.TimedLinear.time_sizes
    pass_times.TimedLinear.time_sizes = lambda self, operator, candidates, rounds: {
        sizes: [seconds[min(len(sizes), 2)]] * rounds for sizes in candidates
    }
    sizes = []
    try:
        read = logged(lambda record: (record.levelno, record.getMessage()))
        with read as lines, mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{path}-cache"):
            for settings in (Settings(tune=path), Settings(tune=path), Settings(auto=True)):
                found = Decider(settings).known_of_layer(SHAPE, group, backward=False)
                sizes.append(found.plan.entries[0].sizes)
    finally:
        pass_times.TimedLinear.time_sizes = kept
    return lines, sizes


@promise("auto-log")
@pytest.mark.parametrize(
    ("seconds", "tuned"),
    [
        ({1: 0.004, 2: 0.003}, "2 chunks of 512 rows, 3.000 ms (whole 4.000 ms)"),
        (
            {1: 0.003, 2: 0.004},
            "kept whole (one chunk of 1024 rows), because no cut that was timed is faster; 3.000 ms",
        ),
        (
            {1: 0.00300, 2: 0.00298},
            "2 chunks, wins 0.7 % and loses 0 of 7 rounds, which may be noise",
        ),
    ],
)
def test_what_was_found_is_said_in_words_once_and_on_rank_0(ranks, tmp_path, seconds, tuned):
    (lines, sizes), (others, _) = ranks(2).run(decided, str(tmp_path / "plan.json"), seconds)
    assert others == []
    assert {level for level, _ in lines} == {logging.WARNING}
    asked = ("COC_TUNE", "COC_TUNE", "COC_PARALLEL_NUM=auto")
    for (_, text), variable, cut in zip(lines, asked, sizes, strict=True):
        assert text.startswith(f"{variable}: forward matmul_all_reduce [1024, 64] x [64, 64]: ")
        assert (f"{len(cut)} chunks of " if len(cut) > 1 else "kept whole (one chunk of 1024 rows), because ") in text
    measured, known, auto = (text for _, text in lines)
    assert tuned in measured
    assert f"(known from {tmp_path / 'plan.json'})" in known
    assert "known from" not in measured + auto


def overlap_always_wins(group, path):
    """Run a real layer with COC_TUNE; a planted clock makes every chunked call faster."""
    kept = pass_times.TimedLinear.time_sizes
    pass_times.TimedLinear.time_sizes = lambda self, operator, candidates, rounds: {
        sizes: [1.0 / len(sizes)] * rounds for sizes in candidates
    }
    try:
        with Layers(group.size()) as layers:
            ascend_parallel.configure(tune=path)
            layer = layers.make("RowParallelLinear", (64, 96))
            torch.manual_seed(1)
            x = torch.randn(256, 32, requires_grad=True)
            ascend_parallel.ops.COUNTS.clear()
            y = layer(x)[0]
            tuned = ascend_parallel.ops.COUNTS.as_dict()
            ascend_parallel.configure(plan=path)
            ascend_parallel.ops.COUNTS.clear()
            again = layer(x)[0]
            planned = ascend_parallel.ops.COUNTS.as_dict()
            ascend_parallel.configure(num_chunks=1)
            plain = layer(x)[0]
    finally:
        pass_times.TimedLinear.time_sizes = kept
    return tuned, planned, torch.equal(y, again) and torch.equal(y, plain)


def test_a_run_writes_a_plan_and_the_next_one_uses_it(ranks, tmp_path):
    path = tmp_path / "plan.json"
    for tuned, planned, equal in ranks(2).run(overlap_always_wins, str(path)):
        assert equal
        assert tuned["matmul_all_reduce"]["calls"] == 1  # the run's own, and none of those that were measured
        assert planned["matmul_all_reduce"]["calls"] == 1
        assert planned["matmul_all_reduce"]["chunks"] >= 8
    raw = json.loads(path.read_text())
    assert [entry["operator"] for entry in raw["entries"]] == ["matmul_all_reduce"]
    assert raw["machine"]["ranks"] == 2
    assert sum(raw["entries"][0]["sizes"]) == 256


def foreign(group, path):
    with Layers(group.size()) as layers:
        ascend_parallel.configure(tune=path)
        layer = layers.make("RowParallelLinear", (64, 96))
        with pytest.raises(chunk_plan.PlanError) as error:
            layer(torch.randn(256, 32))
        return str(error.value)


@pytest.mark.parametrize("broken", [False, True])
def test_a_foreign_or_broken_file_is_neither_used_nor_overwritten(ranks, tmp_path, broken):
    path = tmp_path / "plan.json"
    machine = chunk_plan.Machine(hardware="another", torch="2.0", backend="gloo", threads=1, ranks=2)
    chunk_plan.Plan(machine).save(path)
    if broken:
        path.write_text("{")
    before = path.read_text()
    messages = ranks(2).run(foreign, str(path))
    assert messages[0] == messages[1]
    assert ("not valid JSON" if broken else "hardware is") in messages[0]
    assert path.read_text() == before


def test_the_cache_has_a_file_for_each_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = chunk_plan.Machine(hardware="a", torch="2.13.0", backend="gloo", threads=1, ranks=2)
    other = chunk_plan.Machine(hardware="a", torch="2.13.0", backend="gloo", threads=1, ranks=4)
    assert chunk_plan.cached_plan(machine) != chunk_plan.cached_plan(other)
    assert chunk_plan.cached_plan(machine).is_relative_to(tmp_path)


def alone(group):
    """Run a forward without a collective on one rank only; the tuner must not communicate."""
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks="auto")
        if group.rank() == 0:
            with torch.no_grad():
                layers.make("ColumnParallelLinear")(torch.randn(64, 96))
        torch.distributed.barrier(group)
        none = layers.make("RowParallelLinear")(torch.randn(0, 96 // group.size()))[0]
    return tuple(none.shape)


def test_what_does_not_communicate_is_not_measured(ranks):
    assert ranks(2).run(alone) == [(0, 96)] * 2


@on_ranks(2)
def test_a_checkpoint_does_not_see_what_is_measured(group):
    """torch's checkpoint counts saved tensors; the tuner's tensors must not count."""
    from torch.utils.checkpoint import checkpoint

    found = []
    with Layers(group.size()) as layers:
        for settings in ({"num_chunks": 1, "mode": 2}, {"num_chunks": "auto"}):
            ascend_parallel.configure(**settings)
            layer = layers.make("RowParallelLinear", (64, 96))
            torch.manual_seed(group.rank())
            x = torch.randn(256, 32, requires_grad=True)
            checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=False).square().sum().backward()
            found.append((x.grad, layer.weight.grad))
    assert all(map(torch.equal, *found))


def unlike(group):
    """Ranks that call a layer with and without gradients would measure different passes."""
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks="auto")
        layer = layers.make("RowParallelLinear", (64, 96))
        with pytest.raises(ascend_parallel.DisagreementError) as error, torch.set_grad_enabled(group.rank() == 0):
            layer(torch.randn(256, 32))
    return str(error.value)


def test_ranks_that_come_to_different_calls_are_told_apart(ranks):
    first, second = ranks(2).run(unlike)
    assert first == second
    assert "rank 0: LayerShape(kind='row', own_rows=256" in first
    assert "with gradients; rank 1: LayerShape" in first


@on_ranks(2)
def test_a_failure_of_one_rank_is_told_to_all(group):
    missing = mock.patch.object(Path, "expanduser", side_effect=RuntimeError("Could not determine home directory."))
    refused = pytest.raises(chunk_plan.PlanError, match="Could not determine home directory")
    with missing, mock.patch.dict(os.environ, XDG_CACHE_HOME=""), refused:
        Decider(Settings(auto=True)).known_of_layer(SHAPE, group, backward=False)


def test_stages_keep_each_others_entries(tmp_path):
    machine = chunk_plan.Machine(hardware="a", torch="2.13.0", backend="gloo", threads=1, ranks=2)
    entry = chunk_plan.Entry(
        run="forward",
        operator="matmul_all_reduce",
        m=32,
        k=8,
        n=8,
        dtype="float32",
        sizes=(32,),
        serial=1.0,
        chosen=1.0,
    )
    path = tmp_path / "plan.json"
    for k in (8, 16):  # two stages, each of which knows its own shapes alone
        own = chunk_plan.Plan(machine, (chunk_plan.Entry(**{**vars(entry), "k": k}),))
        Decider(Settings(tune=str(path)))._file.save(own)
    assert [found.k for found in chunk_plan.load_plan(str(path)).entries] == [8, 16]
