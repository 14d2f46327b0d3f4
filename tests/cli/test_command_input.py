"""Invalid numbers and files of commands: an error that names them, and exit status 2."""

import json

import pytest
from marks import promise
from typer.testing import CliRunner

from ascend_parallel.cli.app import app

LLAMA = ("predict", "--model", "llama2-7b", "--hardware", "910b")
HUGE = "99999999999999999999"


@promise("input-checked")
@pytest.mark.parametrize(
    "words",
    [
        (*LLAMA, "--tp", HUGE),
        (*LLAMA, "--dp", HUGE),
        (*LLAMA, "--pp", HUGE),
        (*LLAMA, "--seq", HUGE),
        (*LLAMA, "--micro-batch", HUGE),
        (*LLAMA, "--micro-batches", "0"),
        (*LLAMA, "--launch-us", "inf"),
        (*LLAMA, "--launch-us", "nan"),
        ("predict", "--model", "llama2-7b", "--hardware", "cpu-gloo", "--link", "9" * 400 + "gbit"),
        ("bench", "--shape", f"{HUGE},64,64"),
        ("bench", "--shape", "\u0661\u0666,64,64"),
        ("bench", "--shape", "\u00b2,64,64"),
        ("bench", "--shape", "64,64,64", "--chunks", "\u00b2"),
        ("bench", "--shape", "64,64,64", "--chunks", "9" * 5000),
        ("bench", "--shape", "64,64,64", "--link", "9" * 400 + "gbit"),
        ("bench", "--model", "llama2-7b", "--seq", HUGE),
        ("tune", "--model", "llama2-7b", "--scale", HUGE),
        ("tune", "--shape", "64,64,64", "--rounds", HUGE),
        ("propagate", "nowhere:model", "--mesh", "mp=\u00b2"),
        ("propagate", "nowhere:model", "--mesh", f"mp={HUGE}"),
        ("propagate", "nowhere:model", "--mesh", "mp=2", "--memory-limit", "1e999GB"),
        ("checkpoint", "show", "nowhere", "--step", "-1"),
        ("bench", "--moe", f"8,{10**17},64,64"),
        ("bench", "--context", f"{4 * 10**16},8,8,64"),
        ("try", "true", "--limit", "nan"),
        ("strategy", "llama2-7b", "--batch", HUGE),
        ("strategy", "llama2-7b", "--seq", HUGE),
        ("propagate", "nowhere:model", "--mesh", "mp=2", "--rank", HUGE),
        ("doctor", "--group", HUGE),
        ("verify", "--every", HUGE, "train.py"),
    ],
)
def test_numbers_out_of_bounds_end_with_2_and_name_the_option(words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, (result.output, result.exception)
    option = [word for word in words if word.startswith("--")][-1]
    said = " ".join(result.output.split())
    assert option in said or "the rate" in said
    assert len(said) < 1500


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "--shape", "64,64,64", "--seq", "128", "--scale", "2"), "--shape: leave out --seq, --scale"),
        (("bench", "--shape", "64,64,64", "--shared", "8"), "--shape: leave out --shared"),
        (("bench", "--model", "llama2-7b", "--layer", "row"), "--model: leave out --layer"),
        (("bench", "--moe", "8,64,64,64", "--no-sequence-parallel"), "--moe: leave out --no-sequence-parallel"),
        (("bench", "--context", "1024,8,8,64", "--micro-batch", "2"), "--context: leave out --micro-batch"),
        (("bench", "--moe", "8,64,64,64", "--framework", "vllm"), "--moe: leave out --framework"),
        (("bench", "--shape", "64,64,64", "--framework", "vllm", "--layer", "row"), "--framework: leave out --layer"),
        (("tune", "--context", "1024,8,8,64", "--rounds", "3"), "--context: leave out --rounds"),
        (("tune", "--shape", "64,64,64", "--seq", "128"), "--shape: leave out --seq"),
        (("explain", "--shape", "64,64,64", "--micro-batch", "2"), "--shape: leave out --micro-batch"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(words, said):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, (result.output, result.exception)
    assert f"{words[0]}: {said}, which it does not know" in result.output


@pytest.mark.parametrize(
    "text",
    [
        "layers = 'x'",
        "heads = 1e400",
        "gated = 3",
        "kv_heads = 'x'",
        "title = 7",
        "q_rank = -1",
        "layers = 1" + "0" * 5000,
    ],
)
def test_a_model_file_of_wrong_values_is_refused_by_key(tmp_path, text):
    good = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 100}
    good.pop(text.partition(" ")[0], None)
    file = tmp_path / "own.toml"
    file.write_text("\n".join([f"{key} = {value}" for key, value in good.items()] + [text]))
    result = CliRunner().invoke(app, ["predict", "--model-file", str(file), "--hardware", "910b"])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "own" in result.output


@pytest.mark.parametrize(
    "text",
    [
        "base = 5",
        "base = '910b'\naliases = 5",
        "base = 'ascend-910b1'\n[memory]\nbandwidth = { value = 'x', source = 'assumed', why = 'x' }",
        "base = 'ascend-910b1'\n[memory]\nbandwidth = { value = 0, source = 'assumed', why = 'x' }",
        "base = 'ascend-910b1'\n[memory]\nbandwidth = { value = 1, source = [], why = 'x' }",
        "base = 'ascend-910b1'\n[matmul]\nutilisation = { value = [['x', 1]], source = 'assumed', why = 'x' }",
        "base = 'ascend-910b1'\n[matmul]\ncores = { value = nan, source = 'assumed', why = 'x' }",
    ],
)
def test_a_hardware_file_of_wrong_values_is_refused(tmp_path, text):
    file = tmp_path / "own.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["predict", "--hardware-file", str(file), "--model", "llama2-7b"])
    assert result.exit_code == 2, (result.output, result.exception)


FILES = {
    "text.json": '"llama"',
    "few.json": '{"model_type": "llama", "hidden_size": 64, "intermediate_size": null}',
    "few.toml": "hidden = 64",
    "model.py": "wrong = 3",
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict --model-file text.json", "text.json has a text in place of a table: give model_type and sizes"),
        (
            "predict --model-file few.json",
            "few.json has no num_hidden_layers, intermediate_size, num_attention_heads, vocab_size",
        ),
        ("predict --model-file few.toml", "few.toml has no layers, ffn, heads, vocab"),
        ("predict", "give --model, --model-file or --mindformers"),
        ("predict --model llama2-7b --virtual-stages 3", "--virtual-stages=3 is not allowed: give 1 with --pp 1"),
        (
            "predict --model llama2-7b --cp 7 --cp-exchange heads",
            "--cp-exchange='heads' is not allowed: give gather: --cp 7 does not divide the 4 heads of a rank",
        ),
        ("try", "try: LAUNCH is missing: Your launch, behind --, as in: ascend-parallel try -- torchrun train.py;"),
        ("checkpoint show", "checkpoint show: PATH is missing: A checkpoint"),
        ("checkpoint show nowhere", "nowhere: no such folder; give the folder that checkpoints were saved to"),
        ("checkpoint show model.py", "model.py: that is a file; give the folder that checkpoints were saved to"),
        ("timeline model.py", "model.py: that is a file; give the folder that COC_TIMELINE named"),
        ("propagate model.py:wrong --mesh dp=2", "model.py:wrong is 3, no function"),
        ("propagate model.py:wrong --mesh dp=0", "--mesh 'dp=0': give names and sizes of at least 1"),
        ("propagate model.py:wrong --mesh dp=2,dp=2", "--mesh 'dp=2,dp=2': give each name once"),
        ("doctor --group 0", "greater than or equal to 2"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.output.count("\n")) == (2, 1), (result.output, result.exception)
    assert said in result.output


def test_heads_that_context_parallel_ranks_cannot_share_are_gathered():
    found = json.loads(CliRunner().invoke(app, ["predict", "--model", "llama2-7b", "--cp", "7", "--json"]).stdout)
    assert found["cp_exchange"] == "gather"


def test_a_table_of_gains_that_are_all_0_is_a_sentence():
    found = CliRunner().invoke(app, [*LLAMA, "--tp", "1", "--dp", "4"]).output
    assert "no schedule of chunks gains anything" in found
    assert "0.0%" not in found
