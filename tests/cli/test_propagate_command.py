"""``ascend-parallel propagate``: plans without a device, and errors for wrong options."""

import json
import subprocess
from pathlib import Path

import pytest
from launch import forked_python
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.cli.propagate import bytes_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sharding"


def command(*arguments):
    words = [forked_python(), "-m", "ascend_parallel", "propagate", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.slow
def test_the_command_explains_a_model_on_a_large_mesh():
    strategies = str(EXAMPLE / "llama.toml")
    ended = command("examples/sharding/llama.py:small", "--mesh", "dp=128,mp=8", "--config", strategies, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["mesh"] == {"dp": 128, "mp": 8}
    assert found["collectives"]["reduce_scatter"] >= 8
    assert found["bound"] is None


@pytest.mark.slow
def test_the_command_advises_and_draws(tmp_path):
    ended = command("examples/sharding/llama.py:small", "--mesh", "mp=2", "--advise")
    assert ended.returncode == 0, ended.stderr
    assert "layers.*.mlp.gate" in ended.stdout
    page = tmp_path / "plan.html"
    ended = command("examples/sharding/llama.py:small", "--mesh", "mp=2", "--brief", "--html", str(page))
    assert ended.returncode == 0, ended.stderr
    assert "</svg>" in page.read_text()


def test_the_command_says_what_is_wrong(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    broken = tmp_path / "broken.py"
    broken.write_text("def small(:\n")
    failing = tmp_path / "failing.py"
    failing.write_text("import not_installed_anywhere\n")
    for arguments, message in (
        (("examples/sharding/llama.py:small", "--mesh", "mp"), "give names and sizes"),
        (("examples/sharding/llama.py:none", "--mesh", "mp=2"), "has no 'none'"),
        (("examples/sharding/llama.py:smal", "--mesh", "mp=2"), "has no 'smal'; did you mean small?"),
        (("nowhere.py:small", "--mesh", "mp=2"), "nowhere.py"),
        (("small", "--mesh", "mp=2"), "give a module or a .py file and a function"),
        ((f"{broken}:small", "--mesh", "mp=2"), "broken.py raised SyntaxError: "),
        ((f"{failing}:small", "--mesh", "mp=2"), "failing.py raised ModuleNotFoundError: No module named 'not_inst"),
        (("no_such_module:small", "--mesh", "mp=2"), "propagate: No module named 'no_such_module'"),
        (("examples/sharding/llama.py:train", "--mesh", "mp=2"), "train raised TypeError"),
        (("examples/sharding/llama.py:train", "--mesh", "mp=2"), "it cannot load weights"),
        (("examples/sharding/llama.py:small", "--mesh", "mp=2", "--html", "none/p.html"), "there is no folder"),
    ):
        ended = CliRunner().invoke(app, ["propagate", *arguments])
        assert ended.exit_code != 0
        assert message in " ".join(ended.output.split()), ended.output


@pytest.mark.slow
def test_the_command_takes_a_memory_limit_and_data_parallelism():
    def run(*more):
        return CliRunner().invoke(app, ["propagate", f"{EXAMPLE}/llama.py:small", "--mesh", "dp=2,mp=2", *more])

    ended = run("--brief", "--memory-limit", "5.75GB")
    assert ended.exit_code == 0, ended.output
    assert "no plan costs less than" in ended.output
    ended = run("--semi-auto", "dp", "--json")
    assert ended.exit_code == 0, ended.output
    nodes = json.loads(ended.stdout)["nodes"]
    assert {node["outputs"][0] for node in nodes if node["kind"] == "parameter"} == {"R R"}
    for more, message in (
        (("--memory-limit", "much"), "--memory-limit 'much': give bytes up to 1e18, such as 32e9, 32GB or 30GiB"),
        (("--memory-limit", "1kB"), "memory_limit=1000 bytes: the least that was found is"),
        (("--semi-auto", "tp"), "semi_auto='tp': give one of the mesh dimensions dp, mp"),
        (("--semi-auto", "dp", "--advise"), "leave out --semi-auto"),
    ):
        ended = run(*more)
        assert ended.exit_code == 2
        assert message in ended.output


def test_bytes_are_read_with_and_without_a_unit():
    for text, wanted in (("32e9", 32e9), ("1.5 kB", 1500), ("2MiB", 2 * 2**20), ("7B", 7), ("1TB", 1e12)):
        assert bytes_of(text) == wanted
    for text in ("", "-1", "1.2.3", "0", "GB", "32e9e9", "nan"):
        with pytest.raises(ValueError, match="give bytes"):
            bytes_of(text)
