"""Whole runs with verification: a GPT keeps every bit, ranks with different calls raise, exit codes of the command."""

import gc
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from allocations import _Watch
from gpt_training import train
from launch import launch
from marks import promise
from megatron_cpu import megatron_on_cpu, start_model_parallel
from pool import on_ranks
from test_verify import verifying

import ascend_parallel
from ascend_parallel import Settings, SettingsError, Verification
from ascend_parallel.diagnostics.verify import LayerErrors, difference, worst_place
from ascend_parallel.environment import read_settings

LAYERS = {f"decoder.layers.{i}.self_attention.linear_{name}" for i in (0, 1) for name in ("qkv", "proj")}
LAYERS |= {f"decoder.layers.{i}.mlp.linear_fc{j}" for i in (0, 1) for j in (1, 2)} | {"output_layer"}

RUNS = {
    "all-reduce": (2, {}),
    "sequence parallel, dropout, recompute": (2, {"recompute": True, "sequence_parallel": True, "dropout": 0.1}),
    "three ranks, untied": (3, {"hidden": 96, "heads": 3, "vocab": 258, "tied": False}),
    "bfloat16": (2, {"dtype": torch.bfloat16}),
}


@promise("verify-bits")
@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "options"), RUNS.values(), ids=RUNS)
@on_ranks()
def test_a_verified_run_keeps_every_bit(group, options):
    """Three steps, every second call: the first and third, of those with and without gradients each."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from ascend_parallel.diagnostics.verify import LEDGER

    LEDGER.clear()
    with megatron_on_cpu():
        start_model_parallel(group.size())
        results = []
        for every in (0, 2):
            model_parallel_cuda_manual_seed(1234)
            results.append(train({**options, "settings": {"num_chunks": 4, "verify_every": every}}, overlap=True))
        ascend_parallel.configure(num_chunks=1)
        parallel_state.destroy_model_parallel()
    (losses, gradients, counts, _), (verified, others, verified_counts, _) = results
    different = [name for name in gradients if not torch.equal(gradients[name], others[name])]
    found = ascend_parallel.verification().as_dict()
    LEDGER.clear()
    equal = losses == verified and counts == verified_counts
    assert equal and different == []
    assert found["failures"] == [] and found["notes"] == []
    assert {layer["layer"] for layer in found["layers"]} == LAYERS
    for layer in found["layers"]:
        recomputed = options.get("recompute") and layer["layer"] != "output_layer"
        assert (layer["forwards"], layer["backwards"]) == ((4, 2) if recomputed else (2, 2))
        assert set(layer["errors"]) == {"output", "input gradient", "weight gradient"}


@pytest.mark.slow
@on_ranks(2)
def test_a_check_keeps_no_tensors_between_forward_and_backward(group):
    def held(every):
        ascend_parallel.configure(num_chunks=4, verify_every=every)
        layer = layers.make("ColumnParallelLinear", config={"sequence_parallel": True})
        x = torch.randn(64, 2, 96, requires_grad=True)
        layer(x)[0].sum().backward()  # Megatron's own buffers, and whatever is made once
        ascend_parallel.configure(num_chunks=4, verify_every=every)
        with _Watch() as watch:
            y = layer(x)[0]
            between = settled(watch)
            y.sum().backward()
            del y
            return between, settled(watch)

    def settled(watch):
        """Return the minimum over 0.2 s: gloo's threads free sent buffers with a delay."""
        found = []
        gc.collect()
        for _ in range(20):
            found.append(watch.alive)
            time.sleep(0.01)
        return min(found)

    with verifying(group) as layers:
        plain, verified = held(0), held(1)
        assert plain == verified
        assert plain[0] >= 128 * 2 * 48 * 4  # the output at least


PREPARE = """
import sys, time, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
sys.path.insert(0, {support!r})
from layers import Layers
import ascend_parallel
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
with Layers(2) as layers:
    ascend_parallel.configure(num_chunks=4, verify_every=2)
    column, row = layers.make("ColumnParallelLinear"), layers.make("RowParallelLinear")
    wide, narrow = torch.randn(64, 96, requires_grad=True), torch.randn(64, 48, requires_grad=True)
    try:
"""
FAULTS = {
    "one rank calls a layer alone": (
        """
        column(wide)
        if rank == 0:
            column(wide)
        column(wide)
        store.wait(["told"], datetime.timedelta(seconds=60))
""",
        ["rank 1 of group 'TENSOR_MODEL_PARALLEL_GROUP' of ranks 0, 1 has not come to the check of call 3 of Column"],
    ),
    "ranks call different layers": (
        """
        column(wide) if rank == 0 else row(narrow)
""",
        ["came to the checks of different calls (rank 0: call 1 of a Column", "rank 1: call 1 of a RowParallelLinear"],
    ),
    "one rank wants no gradients": (
        """
        with torch.set_grad_enabled(rank == 0):
            row(narrow)
""",
        ["weight [96, 48], torch.float32; gradients of input True, of weight True; rank 1", "float32; no gradients)"],
    ),
    "ranks verify differently": (
        """
        ascend_parallel.configure(num_chunks=4, verify_every=2 + rank)
        row(narrow)
""",
        ["COC_VERIFY is 2 on rank 0, 3 on rank 1"],
    ),
}
CLOSE = """
    except RuntimeError as error:
        print(type(error).__name__, error)
        store.set("told", "1")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [fault if place < 2 else pytest.param(fault, marks=pytest.mark.stress) for place, fault in enumerate(FAULTS)],
)
def test_ranks_that_do_not_check_the_same_call_are_told(case):
    """No fault hangs, and no check's collective pairs with a collective of the run."""
    code, expected = FAULTS[case]
    support = str(Path(__file__).parents[1] / "support")
    results = launch(PREPARE.format(support=support) + code + CLOSE, [{}, {}])
    told = [result.stdout for result in results if "Error " in result.stdout]
    assert len(told) == (1 if "alone" in case else 2), results
    for text in told:
        assert text.startswith("DisagreementError" if "differently" in case else "VerificationError")
        assert all(part in text for part in expected), text


SCRIPT = """
import sys, torch, torch.distributed as dist
from megatron_cpu import *
FAULT = "--fault" in sys.argv
if FAULT:
    from ascend_parallel.overlap import linear
    original = linear.start_matmul_all_reduce
    def faulty(x, w, group, decision, **options):
        pending = original(x, w, group, decision, **options)
        if dist.get_rank() == 1 and torch.is_grad_enabled() is False and x.shape[-1] == 96:
            pending.wait().mul_(2)
        return pending
    linear.start_matmul_all_reduce = faulty
    in_loop = linear.run_column_gradients  # the same gradient where a loop in C++ has it
    def faulty_in_loop(dy, w, x, group, decision, *, bias):
        found = in_loop(dy, w, x, group, decision, bias=bias)
        if dist.get_rank() == 1 and found is not None and dy.shape[-1] == 96:
            found[0].mul_(2)
        return found
    linear.run_column_gradients = faulty_in_loop
dist.init_process_group("gloo")
with megatron_on_cpu():
    start_model_parallel(dist.get_world_size())
    model = small_gpt()
    for _ in range(2):
        next_token_loss(model, torch.arange(65)[None]).backward()
    print("trained")
    stop_model_parallel()
sys.exit(0)
"""


def verified(tmp_path, arguments, ranks=2, variables=None, script_arguments=()):
    """Run the command on every rank as torchrun does; return the finished processes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    shutil.copy(Path(__file__).parents[1] / "support" / "megatron_cpu.py", tmp_path)  # as the quick start tells users
    command = ["ascend-parallel", "verify", *arguments, str(script), *script_arguments]
    code = f"import sys; sys.argv = {command!r}; from ascend_parallel.__main__ import main; main()"
    return launch(code, [{"COC_PARALLEL_NUM": "4", **(variables or {})}] * ranks)


@pytest.mark.slow
def test_the_command_reports_and_ends_well(tmp_path):
    first, second = verified(tmp_path, ["--every", "2", "--json"], variables={"COC_LOG_LEVEL": "error"})
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    found = json.loads(first.stdout.splitlines()[-1])
    assert found["passed"] and found["every"] == 2 and {layer["layer"] for layer in found["layers"]} == LAYERS
    assert all((layer["forwards"], layer["backwards"]) == (1, 1) for layer in found["layers"])
    assert second.stdout.splitlines() == ["trained"]
    assert "verification, every 2 calls: 18 checks of 9 layers, 0 over the limit" in first.stderr
    assert "verification, every" not in second.stderr
    for name in LAYERS:
        assert sum(line.startswith(f"{name} ") for line in first.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_command_fails_with_the_layer_that_is_wrong(tmp_path):
    for result in verified(tmp_path, ["--json"], script_arguments=["--fault"]):
        assert result.returncode == 1
        assert (
            "VerificationError: decoder.layers.1.self_attention.linear_qkv (ColumnParallelLinear, column): "
            in result.stderr
        )
        assert "the input gradient of call 1 is wrong on rank 1" in result.stderr
        assert "trained" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"COC_VERIFY": "3", "COC_LOG_LEVEL": "error"}, pytest.param({}, marks=pytest.mark.stress)]
)
def test_the_command_fails_where_nothing_was_checked(tmp_path, variables):
    (result,) = verified(tmp_path, [], ranks=1, variables=variables)
    assert result.returncode == 1
    assert f"every {variables.get('COC_VERIFY', 1)} calls: 0 checks of 0 layers, so nothing is known" in result.stdout
    assert "its tensor-parallel group has one rank, so nothing is communicated" in result.stdout
    assert "0 checks" not in result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"COC_PARALLEL_NUM": "1"}, "nothing to verify: export COC_PARALLEL_NUM=4"),
        (["--every", "0"], {}, "verify: --every '0': give a whole number of calls from 1 to 999999999"),
        (["--every", "often"], {}, "verify: --every 'often': give a whole number of calls from 1 to 999999999"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, arguments, variables, message):
    (result,) = verified(tmp_path, arguments, ranks=1, variables=variables)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.slow
def test_the_command_imports_no_command_line():
    code = "import ascend_parallel.__main__, sys; assert not {'typer', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings():
    assert read_settings({"COC_VERIFY": "10"}).verify_every == 10
    assert (Settings().verify_every, Settings().verify_limit) == (0, None)
    for wrong in ("-1", "", "1.5", "9" * 10):
        with pytest.raises(SettingsError, match=f"COC_VERIFY='{wrong}' is not allowed: give 0 .off. or a whole number"):
            read_settings({"COC_VERIFY": wrong})
    for wrong in (-1, True, 1.0, "1"):
        with pytest.raises(SettingsError, match=r"verify_every=.* is not allowed"):
            Settings(verify_every=wrong)
    for wrong in (-0.1, 1, math.nan, math.inf, "2%", True):
        with pytest.raises(SettingsError, match=r"verify_limit=.* is not allowed: give a number from 0 to less than 1"):
            Settings(verify_limit=wrong)


def test_difference_and_worst_place():
    expected = torch.zeros(3, 5)
    expected[2, 4], expected[0, 0] = -4.0, 1.0
    found = expected.clone()
    assert difference(found, expected).error == 0
    found[1, 2] += 0.5
    assert difference(found, expected).error == 0.5 / 4
    assert worst_place(found, expected) == ([1, 2], 0.5, 0.0)
    assert difference(found, expected, rounding=0.5).error == 0
    assert difference(found, torch.zeros(3, 5)).error == sys.float_info.max
    assert difference(torch.zeros(0, 5), torch.zeros(0, 5)).error == 0
    assert difference(torch.zeros(5, 3), torch.zeros(3, 5)).error == sys.float_info.max
    assert difference(found.bfloat16(), expected.bfloat16()).error == 0.5 / 4
    for spoiled in (math.nan, math.inf, -math.inf):
        found[1, 2] = spoiled
        assert difference(found, expected).error > 1e30
        assert worst_place(found, expected)[0] == [1, 2]
        assert difference(expected, found) == difference(found, found)
        assert difference(expected, found).skipped == 1
    largest = torch.tensor([65504.0, 1.0]).half()
    assert difference(torch.tensor([math.inf, 1.0]).half(), largest).error == 0  # beyond by an order of sums


def test_differences_across_blocks():
    """Tensors are compared in blocks of about a million elements: here in the second one, in both orders."""
    expected = torch.arange(1536 * 1024.0).view(1536, 1024)
    found = expected.clone()
    found[1100, 1000] -= expected.max() / 10
    assert difference(found, expected).error == pytest.approx(0.1)
    assert worst_place(found, expected)[0] == [1100, 1000]
    assert worst_place(found.t(), expected.t())[0] == [1000, 1100]


def test_what_a_report_says():
    layer = LayerErrors("mlp.linear", "RowParallelLinear")
    layer.add("forward", [{"output": 0.25}, {"output": 0.5}], 1e-6)
    layer.add("backward", [{"input gradient": 0.0}], 1e-6)
    report = Verification(7, [layer], [], ["something"])
    assert report.passed
    lines = str(report).splitlines()
    assert lines[0] == "verification, every 7 calls: 2 checks of 1 layers, 0 over the limit"
    assert " ".join(lines[1].split()) == "layer forwards backwards output input gradient weight gradient limit"
    assert lines[2].split() == ["mlp.linear", "1", "1", "5.0e-01", "0.0e+00", "-", "1e-06"]
    assert lines[3:] == ["note: something"]
    assert not Verification(7, [layer], ["wrong"], []).passed
    assert not Verification(7, [], [], []).passed
