"""Every command, as the parser knows it: help, version, JSON, and errors of one line that name option and value."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from launch import forked_python
from profiles import of_gpu
from profiles import write as write_profile
from timelines import made
from typer.testing import CliRunner

import ascend_parallel
from ascend_parallel.__main__ import run
from ascend_parallel.cli.app import app
from ascend_parallel.diagnostics.timeline.files import write
from ascend_parallel.settings import VARIABLES
from ascend_parallel.training.checkpoint import save

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT}/examples/sharding/llama.py:small"
PLANNED = f"{ROOT}/examples/strategy/train.py:planned"
GPT = f"{ROOT}/examples/strategy/gpt.toml"


def commands(group, path=()):
    """Yield the words and the command of every command of a group."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
# These start a script, whose own words follow.
STARTERS = [("run",), ("verify",), ("try",)]
OTHERS = [words for words in COMMANDS if words not in STARTERS]
TIMED = ("--shape", "64,32,32", "--rounds", "3", "--chunks", "2", "--layer", "row")
# A valid call of each command; {folder} is a temporary folder.
CALLS = {
    ("doctor",): (),
    ("explain",): ("--shape", "64,64,64", "--tp", "2", "--device", "cpu"),
    ("predict",): ("--model", "llama2-7b"),
    ("bench",): TIMED,
    ("tune",): (*TIMED, "--out", "{folder}/plan.json"),
    ("report",): ("--ranks", "2", "--quick", "--only", "doctor", "--out", "{folder}"),
    ("audit",): ("{folder}/trace.json",),
    ("timeline",): ("{folder}/spans", "--no-png"),
    ("propagate",): (MODEL, "--mesh", "mp=2"),
    ("strategy",): (PLANNED, "--config", GPT),
    ("plan-training",): (
        *("--model", "llama2-7b", "--ranks", "8", "--memory", "64GB", "--batch", "8"),
        *("--out", "{folder}/strategy.toml"),
    ),
    ("status",): (),
    ("checkpoint", "show"): ("{folder}/saved",),
    ("checkpoint", "convert"): ("{folder}/saved", "{folder}/whole.pt", "--to", "torch"),
    ("checkpoint", "diff"): ("{folder}/saved", "{folder}/saved"),
}
# Options that take any text: nothing is refused.
FREE = {(("explain",), "--chip")}
# What a value is called where the message has another name than the option.
CALLED = {
    "--hardware": "hardware ",
    "--link": "'nonsense'",
    "--run": "no run ",
    "--semi-auto": "semi_auto",
    "--data-dim": "data_dim",
    "--objective": "objective",
    "--cp-exchange": "cp_exchange",
}


def kind(option):
    """Return the Python type of a parameter's value, of any version of typer."""
    described = getattr(option, "type_descriptor", None)
    if described is not None:
        return described.annotation
    names = {"integer": int, "integer range": int, "float": float, "float range": float, "path": Path}
    return names.get(option.type.name, bool if option.is_flag else str)


def of_kind(words, *kinds):
    """Return the names of a command's options, and of its arguments, whose values are of these types."""
    return [param.opts[0] for param in COMMANDS[words].params if kind(param) in kinds and param.name != "version"]


def name_of(words):
    return " ".join(words)


@pytest.fixture
def folder(tmp_path):
    """A temporary folder with a timeline, a profile and a checkpoint."""
    write_profile(tmp_path / "trace.json", of_gpu())
    (tmp_path / "spans").mkdir()
    for rank in range(2):
        write(tmp_path / "spans", *made(rank, steps=3))
    save(tmp_path / "saved", step=12, model={}, optimizer={}, values={"position": 7})
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def call_of(words, folder, without=()):
    """Return the words of a valid call, without some options and their values."""
    call = [word.replace("{folder}", str(folder)) for word in CALLS[words]]
    for name in without:
        if name in call:
            del call[call.index(name) : call.index(name) + 2]
    return [*words, *call]


def refused(result, *parts):
    """Check that a result is a refusal: 2, nothing on stdout, a line with these parts and no traceback on stderr."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert "Traceback" not in line
    for part in parts:
        assert str(part) in line, (part, line)


def test_every_command_has_a_call():
    assert set(CALLS) == set(OTHERS)


@pytest.mark.parametrize("words", COMMANDS, ids=name_of)
def test_help_names_every_option_and_has_an_example(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke(*words, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Example" in result.stdout
    for param in COMMANDS[words].params:
        assert param.help, f"{param.opts} of {words} has no help"
        if param.param_type_name == "option":
            assert param.opts[0] in result.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=name_of)
def test_version_is_the_same_of_every_command(words):
    result = invoke(*words, "--version")
    assert (result.exit_code, result.stdout) == (0, f"ascend_parallel {ascend_parallel.__version__}\n")


@pytest.mark.parametrize("words", OTHERS, ids=name_of)
def test_an_unknown_option_is_named(words, folder):
    refused(invoke(*call_of(words, folder), "--nonsense"), f"{name_of(words)}: ", "--nonsense")
    refused(invoke(*call_of(words, folder), "--json", "--nonsense"), "--nonsense")


# Of those that show their progress test_progress.py reads the JSON.
SHOWING = ("doctor", "propagate", "strategy", "plan-training", "predict", "bench", "timeline", "audit", "checkpoint")


@pytest.mark.sample("explain", "status")
@pytest.mark.parametrize("words", [words for words in OTHERS if words[0] not in SHOWING], ids=name_of)
def test_json_is_an_object_and_nothing_else(words, folder):
    result = invoke(*call_of(words, folder), "--json")
    states = (("doctor",), ("status",))  # the exit code is what they found
    assert result.exit_code in ((0, 1) if words in states else (0,)), result.output
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == "" or words in states


NUMBERS = [(words, name) for words in OTHERS for name in of_kind(words, int, float)]
TEXTS = [
    (words, name)
    for words in OTHERS
    for name in of_kind(words, str, list, list[str])
    if name.startswith("--") and (words, name) not in FREE
]
# Folders that a command makes.
MADE = {(("tune",), "--out"), (("timeline",), "--out")}
FILES = [(words, name) for words in OTHERS for name in of_kind(words, Path) if (words, name) not in MADE]


def ids(case):
    return "-".join(case) if isinstance(case, tuple) else case


@pytest.mark.parametrize(("words", "name"), NUMBERS, ids=ids)
def test_a_word_where_a_number_belongs_is_refused(words, name, folder):
    refused(invoke(*call_of(words, folder, [name]), name, "many"), f"{name_of(words)}: ", name, "'many'")


@pytest.mark.parametrize(("words", "name"), TEXTS, ids=ids)
def test_an_unknown_text_is_refused(words, name, folder):
    others = ["--shape"] if name in ("--model", "--moe", "--context") else ["--model"] if name == "--shape" else []
    result = invoke(*call_of(words, folder, [name, *others]), name, "nonsense")
    refused(result, f"{words[0]}: ", CALLED.get(name, name), "nonsense")


@pytest.mark.parametrize(("words", "name"), FILES, ids=ids)
def test_a_missing_file_or_folder_is_named(words, name, folder):
    missing = folder / "missing" / "file.toml"
    call = call_of(words, folder, [name])
    if name.startswith("--"):
        others = {"--model-file": ["--model"], "--schedule": []}.get(name, [])
        result = invoke(*call_of(words, folder, [name, *others]), name, missing)
    else:
        arguments = [param.opts[0] for param in COMMANDS[words].params if param.param_type_name == "argument"]
        call[len(words) + arguments.index(name)] = str(missing)
        result = invoke(*call)
    refused(result, f"{words[0]}: ", missing.parent)


WRITTEN = [case for case in [*FILES, (("tune",), "--out")] if case[1] in ("--out", "--html", "--plot", "--schedule")]


@pytest.mark.parametrize(("words", "name"), WRITTEN, ids=ids)
def test_what_cannot_be_written_is_refused_before_the_work(words, name, folder, monkeypatch):
    """Work of minutes, whose result had no place."""
    taken = folder / "taken"
    taken.write_text("mine") if words == ("report",) else taken.mkdir()
    call = call_of(words, folder, [name])
    refused(invoke(*call, name, taken), f"{words[0]}: ", name, taken)
    locked, allowed = folder / "locked", os.access
    locked.mkdir()
    denied = (str(locked), os.W_OK)
    monkeypatch.setattr(os, "access", lambda path, mode: (str(path), mode) != denied and allowed(path, mode))
    file = locked if words == ("report",) else locked / "file.svg"
    refused(invoke(*call, name, file), f"{words[0]}: ", name, file, "may not write")


def test_an_encoding_without_a_letter_is_no_error(folder):
    """The clocks of a timeline are compared in µs."""
    result = CliRunner(charset="ascii").invoke(app, ["timeline", str(folder / "spans"), "--no-png"])
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "clock of rank 1" in result.stdout and " ?s" in result.stdout


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_who_leaves_is_no_error(as_json, monkeypatch, capsys):
    """As `| head` does: no word on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w")
    with monkeypatch.context() as patches:
        patches.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            app(["predict", "--list", *as_json])
    with contextlib.suppress(BrokenPipeError):
        output.close()
    assert (ended.value.code, capsys.readouterr().err) == (1, "")


def test_an_encoding_that_lacks_a_letter_replaces_it_in_the_output_and_escapes_it_in_errors(monkeypatch):
    output, error = (
        io.TextIOWrapper(io.BytesIO(), encoding="iso8859-5", errors=errors) for errors in ("strict", "backslashreplace")
    )
    with monkeypatch.context() as patches:
        patches.setattr(sys, "stdout", output)
        patches.setattr(sys, "stderr", error)
        with pytest.raises(SystemExit):
            app(["predict", "--tp", "µ"])
    error.flush()
    assert (output.errors, error.errors) == ("replace", "backslashreplace")
    assert b"\\xb5" in error.buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("job_of_this_test.py", ": leave out .py, or -m"), ("job_of_this_test.x", ""), (".x", ""), ("", "")],
)
def test_a_name_that_is_no_module_is_refused_and_nothing_of_it_runs(name, hint, monkeypatch, tmp_path, capsys):
    (tmp_path / "job_of_this_test.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        run(["-m", name, "--layers", "2"])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"run: no module named {name!r}{hint}\n")


def test_a_package_around_a_script_has_its_arguments(monkeypatch, tmp_path, capsys):
    package = tmp_path / "package_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (package / "job.py").write_text("import sys\nprint(sys.argv[1:], sys.path.count(sys.path[0]))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    run(["-m", "package_of_this_test.job", "--layers", "2"])
    assert capsys.readouterr().out == "['-m', '--layers', '2']\n['--layers', '2'] 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("run",), ()),
        (("run", "-m", "missing.train"), ("run: ", "no module named 'missing.train'")),
        (("verify", "missing.py"), ("verify: ", "missing.py")),
        (("verify", "--every", "many", "missing.py"), ("verify: ", "--every", "'many'")),
        (("propagat",), ("ascend-parallel: ", "'propagat'", "'propagate'")),
        (("plan-training", "--model", "llama2-7b"), ("plan-training: ", "--ranks")),
        # Other words for the same refusals:
        pytest.param(("run", "missing.py"), ("run: ", "missing.py"), marks=pytest.mark.stress),
        pytest.param(("verify", "-m", "missing"), ("verify: ", "no module named 'missing'"), marks=pytest.mark.stress),
        pytest.param(("verify",), (), marks=pytest.mark.stress),
        pytest.param(("verify", "--nonsense", "missing.py"), ("verify: ", "--nonsense"), marks=pytest.mark.stress),
        pytest.param(
            ("verify", "--every", "0", "missing.py"), ("verify: ", "--every", "'0'"), marks=pytest.mark.stress
        ),
        pytest.param(("predict", "--tp"), ("predict: ", "--tp"), marks=pytest.mark.stress),
        pytest.param(("propagate",), ("propagate: ", "MODULE:FUNCTION"), marks=pytest.mark.stress),
    ],
    ids=name_of,
)
def test_a_process_refuses_in_a_line_too(words, parts, tmp_path):
    environment = {**os.environ, "COC_PARALLEL_NUM": "2"}
    command = [forked_python(), "-m", "ascend_parallel", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    if not parts:  # no script: the help
        assert "Usage" in ended.stdout
        return
    assert ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    for part in parts:
        assert part in line, line


@pytest.mark.slow
def test_verify_prints_an_object_as_its_last_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    command = [forked_python(), "-m", "ascend_parallel", "verify", "--json", str(script)]
    environment = {**os.environ, "COC_PARALLEL_NUM": "2"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    first, last = ended.stdout.strip().splitlines()
    assert first == "trained"
    assert isinstance(json.loads(last), dict)
    assert ended.returncode == 1  # nothing was checked


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_the_help_at_80_columns_has_whole_names_and_flags_without_a_type(words):
    text = CliRunner().invoke(app, [*words, "--help"], prog_name="ascend-parallel", env={"COLUMNS": "80"}).stdout
    params = COMMANDS[words].params if words else []
    names = [option for param in params for option in (*param.opts, *param.secondary_opts) if option.startswith("--")]
    assert [name for name in names if not re.search(rf"{name}\b", text)] == []
    assert "<bool>" not in text and "…" not in text and "..." not in text.partition("Commands:")[2]
    assert max(map(len, text.splitlines())) <= 80


def test_no_help_imports_torch():
    """Torch takes seconds. The first words start the command as users do; the others in one process, for time."""
    start = "import sys; sys.argv = ['ascend-parallel', '--help']; from ascend_parallel.__main__ import main\n"
    code = f"""{start}
import json
from typer.testing import CliRunner
from ascend_parallel.cli.app import app
loaded = lambda: [name for name in ("torch", "numpy") if name in sys.modules]
assert not loaded(), "the import of the command line"
for words in json.loads({json.dumps(json.dumps([[], *COMMANDS]))}):
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="ascend-parallel")
    assert result.exit_code == 0 and "Usage: ascend-parallel" in result.stdout, result.output
    assert not loaded(), words
assert main.__module__ == "ascend_parallel.__main__"
CliRunner().invoke(app, ["explain", "--shape", "64,64,64"])
assert loaded(), "this test cannot fail"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    words = [sys.executable, "-X", "importtime", "-m", "ascend_parallel", "--help"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "plan-training" in ended.stdout
    assert "ascend_parallel.cli.app" in ended.stderr and not re.search(r"\| +torch$", ended.stderr, re.MULTILINE)


def test_status_names_settings_as_users_do():
    text = CliRunner().invoke(app, ["status"]).stdout
    assert [name for name in VARIABLES.values() if name not in text] == []
