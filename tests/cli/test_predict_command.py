"""Output and errors of ascend-parallel predict."""

import json

import pytest
import typer
from typer.testing import CliRunner

from ascend_parallel.cli import predict as command
from ascend_parallel.tuning.cost_model.hardware import all_hardware, find_hardware
from ascend_parallel.tuning.cost_model.models import all_models


@pytest.fixture(scope="module")
def run():
    app = typer.Typer()
    app.command(help=command.EXAMPLES)(command.predict)
    return lambda *words: CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))


def test_the_command_prints_tables_and_json(run):
    words = ("--model", "llama2-70b", "--tp", "8", "--hardware", "910b", "--seq", "4096", "--micro-batch", "2")
    text = run(*words)
    assert text.exit_code == 0
    for expected in ("matmul_reduce_scatter", "llama2-70b (69.0B) on ascend-910b2", "best equal", "bound", "assumed"):
        assert expected in text.output
    found = json.loads(run(*words, "--json").output)
    assert found["ranks"] == 8 and len(found["calls"]) == 10
    for call in found["calls"]:
        assert call["bound"] <= call["best"] <= call["serial"] <= call["in_turn"] * (1 + 1e-9)
        assert sum(call["sizes"]) == call["rows"]


def test_a_model_with_experts_has_its_exchange_in_the_tables(run):
    words = ("--model", "mixtral-8x7b", "--tp", "2", "--dp", "8", "--hardware", "910b", "--seq", "4096")
    text = run(*words, "--ep", "4").output
    for expected in ("(46.7B, 12.9B active)", "experts over EP 4, ", "experts, 2 a rank", "expert_exchange"):
        assert expected in text
    whole, shared = (json.loads(run(*words, "--ep", ep, "--json").output) for ep in ("1", "4"))
    layer = 4096 * (2 * 32 + 2 * 8) * 128 + 2 * 4096 + 8 * 4096 + 2 * 3 * 4096 * 14336  # two experts of eight
    assert (shared["ep"], shared["active_parameters"]) == (4, 32 * layer + 2 * 32000 * 4096 + 4096)
    calls = [call for call in shared["calls"] if call["operator"] == "expert_exchange"]
    assert [call["pass"] for call in calls] == ["forward", "backward"]
    for call in calls:
        assert sum(call["sizes"]) == 2 and call["bound"] <= call["best"] < call["serial"]
    assert shared["memory"]["parameters"] < whole["memory"]["parameters"] / 2
    assert shared["step"]["best"]["total"] < shared["step"]["serial"]["total"]


def test_the_command_predicts_a_shaped_link(run):
    words = ("--model", "llama2-7b", "--tp", "2", "--hardware", "cpu-gloo", "--seq", "512", "--json")
    slow, fast = (json.loads(run(*words, "--link", rate).output) for rate in ("100mbit", "10gbit"))
    assert slow["layer"]["serial"]["forward"] > fast["layer"]["serial"]["forward"]
    assert slow["dtype"] == "float32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama2-7o", "--hardware", "910b"), "did you mean llama2-7b?"),
        (("--model", "llama2-7b", "--hardware", "910b5"), "did you mean 910b?"),
        (("--model", "llama2-7b", "--hardware", "910b", "--hardware-file", "own.toml"), "give either --hardware or"),
        (("--hardware", "910b"), "give --model, --model-file or --mindformers"),
        (("--model", "llama2-7b", "--hardware", "910b", "--tp", "0"), "Invalid value for '--tp'"),
        (
            ("--model", "llama2-7b", "--hardware", "910b", "--ep", "2"),
            "--ep=2 is not allowed: give 1: llama2-7b has no",
        ),
        (("--model", "llama2-7b", "--hardware", "910b", "--recompute", "some"), "none, selective, full"),
        (("--model", "llama2-7b", "--hardware", "910b", "--dtype", "int4"), "--dtype 'int4' is not known"),
        (("--model-file", "/nowhere.toml", "--hardware", "910b"), "cannot be read"),
    ],
)
def test_the_command_refuses_with_what_is_allowed(run, words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_command_lists_what_exists_and_its_sources(run):
    listed = run("--list").output
    assert all(name in listed for name in (*all_models(), *all_hardware()))
    sources = run("--hardware", "910b", "--sources").output
    assert "cube_core_cnt" in sources and "[[65536, " in sources


def test_help_shows_examples(run):
    assert "--model llama2-70b --tp 8 --hardware 910b" in " ".join(run("--help").output.replace("│", "").split())


def test_a_verdict_ends_the_prediction(run):
    """The MFU by hand: 6 N + 12 L H Q T operations a token over the peak, for Llama 2 7B on 8 cards."""
    words = ["--model", "llama2-7b", "--tp", "1", "--dp", "8", "--micro-batches", "4"]
    found = json.loads(run(*words, "--json").stdout)
    verdict, hardware = found["verdict"], find_hardware("910b")
    assert verdict["seconds"] == found["step"]["best"]["total"]
    assert verdict["tokens_per_second_per_card"] == pytest.approx(4096 * 4 * 8 / verdict["seconds"] / 8)
    weights = 6.738e9 - 32000 * 4096  # without the embedding, which no matmul reads
    operations = 6 * weights + 12 * 32 * 32 * 128 * 4096
    peak = 2 * hardware.matmul.macs_per_cycle * hardware.matmul.frequency * hardware.matmul.cores
    assert verdict["mfu"] == pytest.approx(operations * verdict["tokens_per_second_per_card"] / peak, rel=1e-3)
    assert 0.2 < verdict["mfu"] < 0.8
    text = " ".join(run(*words).stdout.split())
    assert f"verdict: {verdict['seconds']:.4g} s a step" in text and f"MFU {verdict['mfu']:.1%}" in text


def test_a_verdict_says_what_is_hidden_and_what_is_exposed(run):
    """The collectives of a layer's passes, call by call; and the slowest of the cards."""
    words = ["--model", "llama2-7b", "--tp", "8"]
    found = json.loads(run(*words, "--json").stdout)
    verdict, calls = found["verdict"], [call for call in found["calls"] if call["layer"] != "logits"]
    assert verdict["communication"] == pytest.approx(sum(call["communication"] for call in calls))
    for key, kind in (("exposed", "best"), ("exposed_serial", "serial")):
        assert verdict[key] == pytest.approx(sum(call[kind] - call["computation"] for call in calls))
    assert 0 < verdict["exposed"] < verdict["exposed_serial"] < verdict["communication"]
    text = " ".join(run(*words).stdout.split())
    assert f"{1e3 * verdict['exposed']:.3f} ms exposed" in text
    assert f"The slowest of 8 cards computes {verdict['slowest']:.1%} slower" in text and 0 < verdict["slowest"] < 0.05


def test_a_mindformers_file_gives_the_model_and_the_degrees(run, tmp_path):
    file = tmp_path / "qwen.yaml"
    sizes = (
        "num_hidden_layers: 8, hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 16, vocab_size: 32000"
    )
    file.write_text(
        "parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 2, micro_batch_num: 8}\n"
        "parallel: {enable_parallel_optimizer: True}\nrecompute_config: {recompute: [1, 2]}\n"
        f"model: {{model_config: {{model_type: qwen3, seq_length: 2048, {sizes}}}}}\n"
    )
    found = json.loads(run("--mindformers", str(file), "--json").output)
    keys = found.pop("mindformers")
    assert {"recompute_config.recompute", "model.model_config.vocab_size"} <= {use["key"] for use in keys}
    config = tmp_path / "qwen.json"
    pairs = (pair.split(": ") for pair in sizes.split(", "))
    config.write_text(json.dumps({"model_type": "qwen3"} | {key: int(value) for key, value in pairs}))
    words = ("--tp", "4", "--dp", "2", "--pp", "2", "--micro-batches", "8", "--micro-batch", "1", "--seq", "2048")
    more = ("--zero", "1", "--recompute", "full", "--recompute-layers", "2", "--no-sequence-parallel", "--json")
    same = json.loads(run("--model-file", str(config), *words, *more).output)
    assert found["step"] == same["step"] and found["memory"] == same["memory"]
    text = run("--mindformers", str(file)).output
    assert "PP 2 (1f1b, 8 micro-batches) = 16 ranks" in text and "recompute full, 2 layers a stage" in text
    assert text.index("verdict:") < text.index("keys of MindFormers")  # the answer first
    file.write_text(file.read_text().replace("model_type: qwen3", "pet_config: {pet_type: lora}"))
    refused = run("--mindformers", str(file))
    assert refused.exit_code == 2 and "has no model_type; or give --model or --model-file" in refused.output
    given = run("--mindformers", str(file), "--model-file", str(config)).output
    assert "note: the file trains adapters (pet_config)" in given[given.index("verdict:") :]
    refused = run("--mindformers", str(file), "--tp", "8")
    assert refused.exit_code == 2 and "--mindformers: leave out --tp, which the file gives" in refused.output
