"""The defaults of hardware and objective: the same in Python and of the commands."""

import inspect
import json

import typer
from typer.testing import CliRunner

from ascend_parallel import settings
from ascend_parallel.cli import options
from ascend_parallel.cli.app import app
from ascend_parallel.sharding import advise, propagate
from ascend_parallel.training import Strategy
from ascend_parallel.training.degrees.search import search_degrees
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware

COMMANDS = typer.main.get_command(app).commands


def option(command, name):
    return next(each.default for each in COMMANDS[command].params if each.name == name)


def argument(function, name):
    return inspect.signature(function).parameters[name].default


def test_the_objective_is_the_same_in_python_and_of_the_command():
    assert option("propagate", "objective") == argument(propagate, "objective") == "time"


def test_the_hardware_is_the_same_everywhere():
    functions = [argument(each, "hardware") for each in (propagate, advise, search_degrees)]
    commands = [option(each, "hardware") for each in ("propagate", "plan-training")]
    assert {*functions, *commands, Strategy(mesh={"dp": 1}).hardware} == {DEFAULT_HARDWARE}


def test_ranks_sequences_and_dtypes_are_the_same_everywhere():
    """8 ranks, or 2 where they are started here; the model's sequence, or 4096; the device's dtype."""
    found = {
        each: tuple(option(each, name) for name in ("tp", "seq", "dtype"))
        for each in ("predict", "explain", "bench", "tune")
    }
    here, cluster = (2, None, "float32"), (8, None, None)
    assert found == {"predict": cluster, "explain": cluster, "bench": here, "tune": here}
    assert option("plan-training", "seq") is None and option("plan-training", "dtype") is None
    assert (options.RAREST, options.MOST_GROUPS) == (settings.RAREST, settings.MAX_CHUNKS)
    for command in ("predict", "plan-training"):  # as many as `sequence_groups` of a strategy allows
        refused = CliRunner().invoke(app, [command, "--cp-groups", "65"]).output
        assert f"less than or equal to {settings.MAX_CHUNKS}, not '65'" in refused
    helps = {
        each.help
        for command in ("predict", "explain", "bench", "tune")
        for each in COMMANDS[command].params
        if each.name == "seq"
    }
    assert helps == {"Sequence length; default: the model's, or 4096."}
    for device, dtype in (("npu", "bfloat16"), ("cpu", "float32")):
        words = ["explain", "--model", "llama3-8b", "--device", device, "--json"]
        passes = json.loads(CliRunner().invoke(app, words).stdout)["passes"]
        assert all(dtype in one["problem"] and "8192" in one["problem"] for one in passes), passes


def test_a_prediction_without_hardware_is_for_the_default():
    words = ["predict", "--model", "llama2-7b", "--json"]
    found, named = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout) for more in ((), ("--hardware", DEFAULT_HARDWARE))
    )
    assert found == named
    assert find_hardware(DEFAULT_HARDWARE).name in json.dumps(found)


def test_a_prediction_says_how_keys_reach_the_queries():
    words = ["predict", "--model", "llama3-8b", "--seq", "32768", "--tp", "1", "--cp", "8"]
    for more, expected in (
        (
            ("--cp-exchange", "heads", "--cp-groups", "4", "--runtime", "megatron"),
            "CP 8 (heads) x DP 1",
        ),  # 1 head of keys a rank
        (("--runtime", "megatron"), "CP 8 (ring) x DP 1"),
        (("--cp-exchange", "gather", "--cp-groups", "2"), "CP 8 (gather, 2 groups) x DP 1"),
    ):
        assert expected in CliRunner().invoke(app, [*words, *more]).stdout
    refused = CliRunner().invoke(app, [*words, "--runtime", "megatron", "--cp-groups", "4"])
    assert refused.exit_code and "cp_groups=4 is not allowed" in refused.output


FILE = """
base = "cpu-gloo"
[link]
rate = { value = 1e7, source = "measured" }
"""
MODEL = """
import torch
from torch import nn


def planned():
    return nn.Linear(1024, 1024, bias=False), (torch.zeros(16384, 1024),), lambda model, x: model(x).square().mean()


def layer():
    return planned()[:2]
"""


def test_a_hardware_file_counts_wherever_a_hardware_is_named(tmp_path, monkeypatch):
    """The file has another link than its base, and the base's name: every sum over ranks takes longer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.toml").write_text(FILE)
    (tmp_path / "models.py").write_text(MODEL)
    seconds = {}
    for hardware in ("cpu-gloo", "slow.toml"):
        (tmp_path / "s.toml").write_text(f'hardware = "{hardware}"\n[mesh]\ndp = 2\n')
        named = ["--hardware", hardware, "--json"]
        degrees = ["--ranks", "2", "--memory", "1GB", "--out", f"{hardware}-best.toml"]
        words = {
            "propagate": ["models.py:layer", "--mesh", "mp=2", "--data-dim", "mp", *named],
            "strategy": ["models.py:planned", "--config", "s.toml", "--json"],
            "plan-training": ["--model", "models.py:planned", *degrees, *named],
            "predict": ["--model", "llama2-7b", "--tp", "2", *named],
        }
        told = {}
        for command, more in words.items():
            result = CliRunner().invoke(app, [command, *more])
            assert result.exit_code == 0, result.output
            told[command] = json.loads(result.stdout)
        sums = told["propagate"]["communication"], told["strategy"]["step"]["seconds"]
        best = told["plan-training"]["best"][0]["seconds"]
        seconds[hardware] = *sums, best, told["predict"]["step"]["serial"]["total"]
        assert f'hardware = "{hardware}"' in (tmp_path / f"{hardware}-best.toml").read_text()
    assert all(slow > fast > 0 for slow, fast in zip(seconds["slow.toml"], seconds["cpu-gloo"], strict=True))


def test_a_hardware_file_that_is_missing_is_named(tmp_path):
    result = CliRunner().invoke(
        app,
        [
            "plan-training",
            "--model",
            "llama2-7b",
            "--ranks",
            "2",
            "--memory",
            "1GB",
            "--hardware",
            "no.toml",
            "--out",
            str(tmp_path / "s.toml"),
        ],
    )
    assert result.exit_code == 2 and "no.toml cannot be read" in " ".join(result.output.split())
