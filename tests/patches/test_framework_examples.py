"""The scripts of examples/frameworks, plain and with the variable, and that their comparison can fail."""

import importlib.util
import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from launch import forked_python

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
COMPARE = FOLDER / "compare.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("transformers_tp", "-- --model Qwen2 --generate --dtype bfloat16"),
        ("transformers_tp", "-- --accelerate"),
        ("torch_tp", "--ranks 4 -- --sequence-parallel --fsdp --dtype bfloat16"),
        ("torch_tp", "-- --sequence-parallel --lora 8 --checkpoint"),
        # Of the same script; test_torch_native.py has three ranks.
        pytest.param(
            "torch_tp",
            "--ranks 3 --limit 1e-3 -- --hidden 384 --heads 6 --inner 768 --checkpoint",
            marks=pytest.mark.stress,
        ),
        ("deepspeed_tp", "-- --zero 1 --dtype bfloat16"),
        ("megatron_moe", "-- --steps 2"),
        ("megatron_compiled", "-- --backend aot_eager --layers 1"),
        ("long_sequence", "-- --rows 512 --dtype bfloat16"),
    ],
)
def test_an_unmodified_script_gives_the_same_with_the_variable(script, options):
    options = options.split()
    needed = "deepspeed" if script == "deepspeed_tp" else "torch" if script == "torch_tp" else "transformers"
    needed = "megatron.core" if script.startswith("megatron") else needed
    pytest.importorskip(needed, reason=f"{needed} is not installed")
    rounded = ["--limit", "0.1"] if "bfloat16" in options else []  # where chunks change bits on this machine
    words = [forked_python(), str(COMPARE), script, "--json", *rounded, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["gradients"] > 20
    assert found["bits_promised"] or rounded
    assert found["communication_ms"] > 0 and 0 <= found["hidden"] <= 1
    if "3" not in options and found["bits_promised"]:
        assert found["gradients_equal"] == found["gradients"]
        assert found["losses_equal"]


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_frameworks", COMPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._compare


def results(**changes):
    own = {"losses": {"loss": torch.tensor(2.0)}, "gradients": {"a": torch.ones(3), "b": torch.full((3,), 1e-3)}}
    return [{**own, "generated": {"tokens": torch.tensor([1000])}, **changes}]


@pytest.mark.parametrize(
    ("changes", "worst", "where"),
    [
        ({}, 0.0, ""),
        ({"gradients": {"a": torch.ones(3), "b": torch.full((3,), 2e-3)}}, 1.0, "b on rank 0"),
        ({"gradients": {"a": torch.full((3,), torch.nan), "b": torch.full((3,), 1e-3)}}, math.inf, "a on rank 0"),
        ({"losses": {"loss": torch.tensor(torch.nan)}}, math.inf, "loss on rank 0"),
        ({"generated": {"tokens": torch.tensor([999])}}, 1e-3, "tokens on rank 0"),
    ],
)
def test_the_comparison_finds_differences(compare, changes, worst, where):
    found = compare(results(), results(**changes))
    assert found["worst"] == pytest.approx(worst)
    assert found["where"] == where


def test_gradients_of_other_parameters_are_an_error(compare):
    with pytest.raises(SystemExit, match="rank 0 has other gradients"):
        compare(results(), results(gradients={"a": torch.ones(3)}))
