"""The command `explain`, `--version`, and JSON objects of every command that lists."""

import json
import os
import subprocess

import pytest
import torch
from launch import forked_python
from typer.testing import CliRunner

import ascend_parallel
from ascend_parallel import Matmul
from ascend_parallel.cli.app import app
from ascend_parallel.tuning.cost_model.models import all_models

SHAPE = ("explain", "--shape", "2048,1024,512", "--tp", "2", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def run():
    yield lambda *words: CliRunner().invoke(app, list(words))
    ascend_parallel.configure(num_chunks=1)
    ascend_parallel.revert()


def test_the_command_says_what_the_python_function_says(run):
    ascend_parallel.configure(num_chunks=4)
    result = run(*SHAPE, "--layer", "row", "--no-sequence-parallel")
    assert result.exit_code == 0, result.output
    shm = ascend_parallel.status().kernels["shm"]
    problem = Matmul(
        "matmul_all_reduce", 2048, 1024, 512, torch.float32, "cpu", 2, shm=None if shm == "available" else shm
    )
    assert result.output == f"row (row), forward: {ascend_parallel.explain(problem)}\n"
    assert "float32 on 2 cpu ranks: chunked, chunks: 4" in result.output


def test_json_has_an_object_for_each_pass(run):
    ascend_parallel.configure(num_chunks=8)
    found = json.loads(run(*SHAPE, "--json").output)
    assert found["settings"]["num_chunks"] == 8
    assert found["framework"] is None
    kinds = [(one["kind"], one["direction"], one["operator"]) for one in found["passes"]]
    assert kinds == [
        ("row", "forward", "matmul_reduce_scatter"),
        ("row", "backward", "all_gather_matmul"),
        ("column", "forward", "all_gather_matmul"),
        ("column", "backward", "matmul_reduce_scatter"),
    ]
    for one in found["passes"]:
        assert (one["kernel"], one["chunks"], sum(one["sizes"])) == ("chunked", 8, 1024)
        assert one["kernels"]["npu"] == "cannot: device cpu, not npu"


def test_the_chip_and_the_request_decide_about_the_fused_kernel(run):
    ascend_parallel.configure(fused=True)
    words = ("explain", "--shape", "4096,1376,4096", "--layer", "row", "--json")
    known, unknown = (json.loads(run(*words, *more).output)["passes"][0] for more in (("--chip", "Ascend910B1"), ()))
    assert "the chip is unknown" in unknown["kernels"]["npu"]
    assert "the chip is unknown" not in known["kernels"]["npu"]
    assert "the chip is unknown" in unknown["unmet"]


def test_a_framework_is_named_with_its_replaced_methods(run):
    ascend_parallel.configure(num_chunks=4)
    state = json.loads(run(*SHAPE, "--framework", "torch", "--json").output)["framework"]
    assert state["name"] == "torch"
    assert any(patch["replaced"] and "ColwiseParallel" in patch["target"] for patch in state["patches"])
    assert "replaced  torch.distributed.tensor.parallel" in run(*SHAPE, "--framework", "torch").output
    ascend_parallel.configure(num_chunks=1)
    state = json.loads(run(*SHAPE, "--framework", "torch", "--json").output)["framework"]
    assert state == {"name": "torch", "state": "its layers are untouched: overlap is off", "patches": []}


def test_attention_of_a_shared_sequence_is_explained_with_its_operators(run):
    """With settings and chip that allow the fused operators, one group; and where keys are gathered none is named."""
    ascend_parallel.configure(fused=True)
    words = ("explain", "--context", "4096,32,8,128", "--tp", "8", "--chip", "Ascend910_9391")
    (found,) = json.loads(run(*words, "--json").output)["passes"]
    assert (found["kind"], found["operator"], found["kernel"], found["chunks"]) == ("heads", "head_exchange", "npu", 1)
    assert found["codes"][-1] == "fused_projection"
    operators = [(one["operator"], one["shape"], one["kernel"], one["code"], one["why"]) for one in found["beside"]]
    shape = [512, 4096, 4096]
    assert operators == [
        ("all_to_all_matmul", shape, "npu", "fused_projection", "taken"),
        ("matmul_all_to_all", shape, "npu", "fused_projection", "taken"),
    ]
    said = run(*words).output
    assert "all_to_all_matmul [512, 4096, 4096]: npu; npu_all_to_all_matmul: taken" in said
    (gathered,) = json.loads(run("explain", "--context", "4096,32,1,128", "--tp", "8", "--json").output)["passes"]
    assert (gathered["kind"], gathered["operator"], gathered["beside"]) == ("gather", "key_gather", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain",), "give either --model or --shape"),
        (("explain", "--model", "llama2-7b", "--framework", "jax"), "--framework 'jax' is not known"),
        (("explain", "--model", "llama2-7b", "--device", "tpu"), "--device 'tpu' is not known"),
        (("explain", "--context", "64,8"), "give TOKENS,HEADS,KEYS,WIDTH"),
        (("explain", "--context", "64,8,8,8", "--model", "llama2-7b"), "give one of --model, --shape and --context"),
        (("explain", "--context", "64,8,8,8", "--layer", "row"), "--context: leave out --layer"),
        (("explain", "--shape", "2047,64,64"), "M is not divisible by the 8 ranks"),
    ],
)
def test_wrong_words_end_with_2(run, words, said):
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output


def test_the_version(run):
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"ascend_parallel {ascend_parallel.__version__}\n")


def test_lists_and_sources_have_json_too(run):
    found = json.loads(run("predict", "--list", "--json").output)
    assert [model["name"] for model in found["models"]] == list(all_models())
    found = json.loads(run("predict", "--hardware", "910b", "--sources", "--json").output)
    assert found["hardware"] == "ascend-910b2"
    assert found["numbers"]["network.bandwidth"]["value"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status"), [(["run", "--help"], 0), (["verify", "-h"], 0), (["run"], 2)])
def test_run_and_verify_have_the_help_of_the_other_commands(words, status):
    environment = {name: value for name, value in os.environ.items() if "COC" not in name}
    command = [forked_python(), "-m", "ascend_parallel", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert f"Usage: ascend-parallel {words[0]}" in ended.stdout
    assert "Example" in ended.stdout
    assert "torchrun --nproc-per-node 8" in ended.stdout
