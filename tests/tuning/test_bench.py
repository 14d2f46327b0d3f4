"""ascend-parallel bench and tune, run as a user runs them; no test checks a time."""

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import forked_python
from marks import promise
from rich.console import Console
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.ops import probing, shm
from ascend_parallel.overlap.context import attention_call
from ascend_parallel.tuning.bench.attention import AttentionCase, projections_of
from ascend_parallel.tuning.bench.passes import SERIAL
from ascend_parallel.tuning.bench.results import interval, result_rows, show
from ascend_parallel.tuning.bench.shapes import scaled
from ascend_parallel.tuning.cost_model.models import all_models, find_model
from ascend_parallel.tuning.measured.chunk_plan import Plan, load_plan, this_machine

TIME = st.floats(0.1, 10.0)
FEW = ("--rounds", "3", "--chunks", "2,4")


def command(*arguments, **variables):
    environ = {name: value for name, value in os.environ.items() if "COC" not in name}
    words = [forked_python(), "-m", "ascend_parallel", *arguments]
    environ |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_bench_measures_every_pass_and_draws(tmp_path):
    picture = tmp_path / "bench.svg"
    ended = command("bench", "--shape", "256,64,96", "--deterministic", "tp", "--json", "--plot", str(picture), *FEW)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    passes = [(row["layer"], row["run"], row["operator"]) for row in found["passes"]]
    assert passes == [
        ("row", "forward", "matmul_reduce_scatter"),
        ("row", "backward", "all_gather_matmul"),
        ("column", "forward", "all_gather_matmul"),
        ("column", "backward", "matmul_reduce_scatter"),
    ]
    for row, times in zip(found["passes"], found["times"], strict=True):
        names = [variant["name"] for variant in row["variants"]]
        assert {"2 chunks", "4 chunks", "serial, 1", "4 chunks, 1", "serial, tp", "2 chunks, tp"} <= set(names)
        assert ("shm" in names) == (not isinstance(shm.extension(), str))
        assert all(len(values) == 3 and min(values) > 0 for values in times.values())
        assert row["serial"] == sorted(times[SERIAL])[1]
        assert row["bound"] == max(row["matmul"], row["comm"])
        assert {"serial", "2 chunks", "4 chunks"} <= set(row["predicted"]) <= set(names) | {"serial"}
        assert min(row["predicted"].values()) > 0 and row["parts"]["matmul"] <= row["matmul"]
        assert row["predicted_parts"] is None  # the cost model has no data of this processor
    # 16 rows and all: of 128 rows a rank that are scattered, 96 wide, and of as many that are gathered, 64 wide.
    sizes = {(row["collective"], row["bytes"]) for row in found["collectives"]}
    assert sizes == {
        *(("reduce-scatter", 4 * 2 * rows * columns) for rows in (16, 128) for columns in (96, 64)),
        *(("all-gather", 4 * 2 * rows * columns) for rows in (16, 128) for columns in (96, 64)),
    }
    assert all(row["bus"] == pytest.approx(row["bytes"] / 2 / row["seconds"]) for row in found["collectives"])
    assert picture.read_text().count("<svg") == 1


@pytest.mark.slow
def test_bench_of_a_model_in_words():
    ended = command(
        "bench", "--model", "llama2-7b", "--scale", "64", "--seq", "64", "--no-sequence-parallel", "--all", *FEW
    )
    assert ended.returncode == 0, ended.stderr
    for word in ("qkv", "proj", "up", "down", "64 times narrower", "2 ranks of one thread over loopback"):
        assert word in ended.stdout


@pytest.mark.slow
def test_tune_writes_a_plan_that_a_run_takes(tmp_path):
    path = tmp_path / "plan.json"
    ended = command("tune", "--shape", "256,64,96", "--layer", "row", "--out", str(path), *FEW)
    assert ended.returncode == 0, ended.stderr
    assert f"{path}: 2 passes" in ended.stdout
    plan = load_plan(str(path))
    assert [entry.run for entry in plan.entries] == ["forward", "backward"]
    kept = [f"{len(entry.sizes)} chunks" if len(entry.sizes) > 1 else "serial" for entry in plan.entries]
    assert [line.endswith(end) for line, end in zip(ended.stdout.splitlines()[1:], kept, strict=False)] == [True, True]
    assert all(sum(entry.sizes) == 128 for entry in plan.entries)
    status = command("status", "--json", COC_PLAN=str(path))
    assert json.loads(status.stdout)["settings"]["plan"] == plan.digest


@pytest.mark.slow
def test_tune_measures_exchanges_beside_what_a_plan_has(tmp_path):
    path = tmp_path / "plan.json"
    linear = ("--shape", "256,64,96", "--layer", "row", "--rounds", "3")
    for words in (("--moe", "8,96,32,16"), ("--context", "64,8,4,8"), linear):
        ended = command("tune", *words, "--out", str(path), "--chunks", "2,4")
        assert ended.returncode == 0, ended.stderr
    experts, heads, *layers = load_plan(str(path)).entries
    assert (heads.run, heads.operator, heads.m, heads.k, heads.n) == ("forward", "head_exchange", 2, 64, 8 * 16)
    assert sum(heads.sizes) == 2
    assert (experts.run, experts.operator, experts.m, experts.k, experts.n) == ("forward", "expert_exchange", 4, 32, 32)
    assert sum(experts.sizes) == 4 and len(layers) == 2
    refused = command("tune", "--moe", "8,96,32,16", "--model", "llama2-7b", "--out", str(path), *FEW)
    assert refused.returncode == 2 and "give one of --model, --shape, --moe and --context" in refused.stderr


@promise("auto-context")
@pytest.mark.slow
def test_bench_of_shared_attention_beside_the_whole_exchange():
    ended = command("bench", "--context", "64,8,4,8", "--json", "--rounds", "3", "--chunks", "2,4")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    names = [variant["name"] for variant in found["variants"]]
    # Two of four heads of keys are a rank's: no more groups are exchanged.
    gathers = [f"gather, {count} group{'s' if count > 1 else ''}" for count in (1, 2, 4)]
    assert names == ["serial", "heads, 1 group", "heads, 2 groups", *gathers, "auto"]
    assert found["auto"] in ("heads, 1 group", "heads, 2 groups")
    assert found["case"] == {"tokens": 64, "heads": 8, "key_heads": 4, "width": 8, "dtype": "float32"}
    assert all(len(times) == 3 and min(times) > 0 for times in found["times"].values())
    projections = found["projections"]
    assert f"heads, {projections['groups']} group" in found["auto"] and projections["features"] == 64
    assert projections["low"] <= projections["speedup"] <= projections["high"] and projections["under"] > 0
    assert projections["fused"] == "device cpu, not npu"


def projected(group, sizes, groups):
    torch.set_num_threads(1)
    tokens, heads, key_heads, width = sizes
    case = AttentionCase(tokens=tokens, heads=heads, key_heads=key_heads, width=width)
    with mock.patch.dict(os.environ, RANK="1"):  # reports no progress
        return projections_of(case, group, groups, 3)


def test_bench_says_how_projections_run_under_the_exchange(ranks):
    for found in ranks(2).run(projected, (512, 8, 8, 64), 4):
        assert (found.exchange, found.inputs, found.output) == ("heads", 4, 4)
        assert "Queries, keys and values in 4 groups of heads; the output in 4 pieces of rows." in str(found)
        assert "npu_all_to_all_matmul and npu_matmul_all_to_all run none of it: device cpu, not npu (" in str(found)
    for found in ranks(2).run(projected, (512, 8, 8, 64), 1):
        assert (found.inputs, found.output) == (1, 1) and "All whole, because there is one group" in str(found)
    for found in ranks(2).run(projected, (512, 8, 1, 16), 1):
        assert (found.exchange, found.inputs, found.output) == ("gather", 0, 0)
        assert "because keys are gathered. " in str(found)


def exchanges(group):
    """Return whether the exchange of a case is that of tensors, for heads and for gathered keys."""
    found = []
    for sizes in ((64, 8, 4, 8), (64, 8, 1, 8)):
        case = AttentionCase(**dict(zip(("tokens", "heads", "key_heads", "width"), sizes, strict=True)))
        q, k, v = (torch.zeros(32, 1, count, 8) for count in (case.heads, case.key_heads, case.key_heads))
        ran = attention_call(q, k, v, group, case.chosen_exchange(2))
        found.append(replace(case.exchange(2, "cpu"), projection=None) == ran)
    return found


def test_the_exchange_of_a_case_is_that_of_its_tensors(ranks):
    assert ranks(2).run(exchanges) == [[True, True]] * 2


def without_pieces(group, sizes, groups):
    """As `projected`, on a machine of which no piece of a product has the bits of the whole."""
    with mock.patch.object(probing, "same_bits", lambda *_: False):
        return projected(group, sizes, groups)


def test_products_that_would_change_bits_are_whole(ranks):
    for found in ranks(2).run(without_pieces, (448, 8, 8, 48), 4):  # of this shape the machine is asked here alone
        assert (found.inputs, found.output) == (1, 1)
        assert "Queries, keys and values whole, because pieces have other bits on this machine;" in str(found)


@pytest.mark.slow
def test_tune_fills_the_cache(tmp_path):
    ended = command("tune", "--shape", "64,16,16", "--layer", "row", *FEW, XDG_CACHE_HOME=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    (file,) = tmp_path.glob("ascend_parallel/plans/*.json")
    assert load_plan(str(file)).machine.ranks == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --model or --shape"),
        (("--model", "llama2-7b", "--shape", "1,2,3"), "give either --model or --shape"),
        (("--shape", "1024,1024"), "give M,K,N such as 2048,1024,1024"),
        (("--shape", "1023,64,64"), "M is not divisible by the 2 ranks"),
        (("--shape", "1024,64,64", "--chunks", "1,2"), "--chunks '1,2': give counts from 2 to 64"),
        (("--shape", "1024,64,64", "--dtype", "int8"), "--dtype"),
        (("--shape", "1024,64,64", "--link", "fast"), "the rate 'fast' is not allowed"),
        (("--model", "llama9"), "llama9"),
        (("--shape", "1024,64,64", "--tp", "1"), "--tp"),
        (("--shape", "1024,64,64", "--framework", "vllm"), "--framework vllm: vLLM is not installed for /"),
        (("--shape", "1024,64,64", "--framework", "nemo"), "--framework 'nemo' is not known. Known: vllm"),
        (("--context", "1024,8"), "give TOKENS,HEADS,KEYS,WIDTH, with a multiple of 4 tokens, such as 4096,8,8,64"),
        (("--context", "1022,8,8,64"), "with a multiple of 4 tokens"),
        (("--context", "1024,7,3,64"), "7 heads of queries, no multiple of 3 heads of keys"),
        (("--context", "1024,8,8,64", "--moe", "8,64,64,64"), "give one of --model, --shape, --moe and --context"),
        (("--context", "1024,8,8,64", "--plot", "x.png", "--shared", "8"), "--context: leave out --plot, --shared"),
        (("--moe", "8,64,64,64", "--deterministic", "tp"), "--moe: leave out --deterministic, which it does not know"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    ended = CliRunner().invoke(app, ["bench", *arguments])
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stdout == ""


def test_tune_overwrites_no_strangers_file(tmp_path):
    path = tmp_path / "thesis.json"
    path.write_text('{"title": "mine"}')
    ended = CliRunner().invoke(app, ["tune", "--shape", "64,16,16", "--out", str(path), *FEW])
    assert ended.exit_code == 2
    assert "is no plan" in ended.stderr
    assert path.read_text() == '{"title": "mine"}'


def test_tune_overwrites_no_plan_of_another_machine(tmp_path):
    path = tmp_path / "plan.json"
    Plan(replace(this_machine(3, torch.device("cpu"), "gloo"), threads=1)).save(path)
    before = path.read_text()
    ended = CliRunner().invoke(app, ["tune", "--shape", "64,16,16", "--out", str(path), *FEW])
    assert ended.exit_code == 2
    assert "a plan of another machine, ranks is 2 here and was 3: give another name" in ended.stderr
    assert path.read_text() == before


def test_tune_overwrites_no_plan_whose_machine_its_ranks_do_not_find(tmp_path, monkeypatch):
    """The ranks may run on another machine than the command saw, such as on other cores."""
    path, here = tmp_path / "plan.json", replace(this_machine(2, torch.device("cpu"), "gloo"), threads=1)
    Plan(here).save(path)
    before = path.read_text()
    measured = {"plan": json.loads(json.dumps(Plan(replace(here, hardware="another")).as_dict()))}
    monkeypatch.setattr("ascend_parallel.cli.bench_request.call_with_progress", lambda *_, **__: measured)
    ended = CliRunner().invoke(app, ["tune", "--moe", "8,96,32,16", "--chunks", "2,4", "--out", str(path)])
    assert ended.exit_code == 2
    assert "a plan of another machine, hardware is 'another' here" in ended.stderr
    assert path.read_text() == before


def found(times, **parts):
    defaults = {"rows": 64, "count": 8, "matmul": 1.0, "matmul_piece": 0.2, "weight_gradient": 1.0, "latency": 0.1}
    defaults |= {"collective": 2.0, "pieces": 2.5, "gather": 0.6, "gather_pieces": 0.5}
    shape = {"operator": "matmul_reduce_scatter", "m": 128, "k": 8, "n": 8}
    return {
        "case": 0,
        "kind": "column",
        "sequence_parallel": True,
        "run": "backward",
        **shape,
        "parts": defaults | parts,
        "sizes": {"2 chunks": [32, 32]},
        "times": times,
        "kept": [64],
    }


def test_figures():
    (row,) = result_rows(
        ["up"], [found({SERIAL: [4.0, 4.2, 4.1], "2 chunks": [3.0, 3.1, 2.9], "shm": [5.0, 5.0, 5.0]})]
    )
    assert (row.matmul, row.comm, row.bound, row.serial) == (2.0, 2.5, 2.5, 4.1)
    assert row.best.name == "2 chunks"
    assert row.best.speedup == 4.2 / 3.1
    assert row.best.e_bound == pytest.approx((4.1 - 4.1 / row.best.speedup) / (4.1 - 2.5))
    assert row.best.low <= row.best.speedup <= row.best.high
    (lost,) = result_rows(["up"], [found({SERIAL: [2.0] * 3, "2 chunks": [3.0] * 3})])
    assert lost.best is None
    assert lost.as_dict()["best"] == SERIAL
    assert lost.variants[0].e_bound is None


# Three noisy rounds of each: paired speedups of 0.5, 1.25 and 2 for two chunks, of 1.3 to 1.4 for four.
NOISY = {SERIAL: [3.0, 4.0, 5.0], "2 chunks": [6.0, 3.2, 2.5], "4 chunks": [2.3, 3.0, 3.6]}
NOISE = {name: NOISY[name] for name in (SERIAL, "2 chunks")}


@promise("bench-best")
def test_what_may_be_noise_is_not_called_best():
    (row,) = result_rows(["up"], [found(NOISE)])
    (variant,) = row.variants
    assert variant.low < 1 < variant.speedup < variant.high
    assert row.best is None
    assert row.as_dict()["best"] == SERIAL
    assert variant.e_bound is None


def test_the_best_is_the_fastest_of_those_that_surely_won():
    (row,) = result_rows(["up"], [found({**NOISY, "2 chunks": [2.2, 2.2, 5.1]})])
    assert min(row.variants, key=lambda variant: variant.seconds).name == "2 chunks"
    assert row.best.name == "4 chunks"


@given(times=st.fixed_dictionaries({name: st.lists(TIME, min_size=3, max_size=3) for name in NOISY}))
def test_a_quotient_stands_beside_a_sure_gain_alone_and_has_bounds(times):
    (row,) = result_rows(["up"], [found(times)])
    for variant in row.variants:
        assert variant.e_bound is None or (variant.low > 1 and 0 < variant.e_bound <= 1)


def test_the_table_says_serial_where_nothing_surely_won():
    (row,) = result_rows(["up"], [found(NOISE)])
    for every, lines in ((False, 1), (True, 1)):
        console = Console(width=160, record=True, file=io.StringIO())
        show([row], "here", console, every=every)
        shown = console.export_text().splitlines()[1:-1]
        assert len(shown) == lines
        assert ("serial" in shown[0].split()) != every
        assert not re.search(r"\d-\d.*-?\d\.\d\d$", shown[0])  # no figure after the interval


def test_an_interval_holds_the_median_and_shrinks():
    ratios = np.random.default_rng(1).normal(1.5, 0.1, 400)
    wide, narrow = interval(ratios[:10]), interval(ratios)
    assert wide[0] < 1.5 < wide[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


@pytest.mark.parametrize("name", list(all_models()))
def test_every_model_can_be_scaled_down(name):
    small = scaled(find_model(name), 16)
    assert small.count_parameters() < find_model(name).count_parameters() / 16
    assert small.head_dim == find_model(name).head_dim
