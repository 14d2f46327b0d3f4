"""One decider reads the settings of chunks; nobody rewrites settings or forges a plan; one function checks calls."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = "ops", "ascend_parallel", "patches"
LINKS = "ascend_parallel/ops", "ascend_parallel/patches"
SOURCES = {
    name: path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if not (name := str(path.relative_to(ROOT))).startswith(LINKS)
}

# What the user says about chunks; `plan` where it is a setting's.
CHUNK_SETTINGS = {"num_chunks", "customized_coc", "tune", "auto", "plan"}
# The decider, and what the settings say of themselves.
DECIDERS = {"ops/registry.py", "ops/settings.py", "ascend_parallel/settings.py"}
# Rules of a pass and measurements, which hand on what is known to the decider; and words for people.
READERS = {
    "ascend_parallel/overlap/known.py": {"num_chunks", "plan"},
    "ops/stream_limit.py": {"tune", "auto"},
    "ascend_parallel/tuning/measured/decider.py": {"tune", "plan"},
    "ascend_parallel/tuning/measured/plan_file.py": {"tune"},
    "ascend_parallel/sharding/planner/shared_sequences.py": {"auto", "tune", "plan"},
    "ascend_parallel/diagnostics/doctor/findings.py": {"plan"},
    "ascend_parallel/environment.py": {"plan"},
    "ascend_parallel/overlap/choices.py": {"tune", "auto", "plan", "customized_coc"},
    "ascend_parallel/patch_control.py": {"num_chunks"},
    "patches/tuned.py": {"tune", "auto", "customized_coc"},
    "patches/framework.py": {"plan"},
    "patches/vllm/layers.py": {"plan", "customized_coc"},
    "patches/vllm/start.py": {"tune", "auto"},
}


def is_settings(node):
    """Tell whether an expression is the settings, by its name."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_").endswith(("settings", "asked", "overlap"))


def read_of(tree):
    """Return the settings of chunks that a file reads."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in CHUNK_SETTINGS and is_settings(node.value)
    }


def rewritten_in(tree):
    """Return the lines of a file in which settings are copied with changes."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return [
        node.lineno
        for node in calls
        if (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) == "replace" and is_settings(node.args[0])
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_decider_reads_the_settings_of_chunks_and_nobody_rewrites_settings(name):
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    assert not rewritten_in(tree)
    if name not in DECIDERS:
        assert read_of(tree) == READERS.get(name, set())


def test_a_patched_call_is_checked_by_one_function():
    """How a call is agreed on, decided, run and put beside the framework's own code is written once."""
    calls = {name for name, path in SOURCES.items() if "verifier.run(" in path.read_text(encoding="utf-8")}
    assert calls == {"patches/covered_call.py"}


def test_an_entry_of_a_plan_is_made_of_a_measurement_alone():
    """Sizes to try are no plan: an entry has seconds, which somebody has measured."""
    made = {
        name
        for name, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("Entry", "Entry.of", "Plan")
        and any(isinstance(each, ast.Constant) for each in [*node.args, *(given.value for given in node.keywords)])
    }
    assert not made


@pytest.mark.parametrize(
    ("text", "lines", "read"),
    [
        ("x = replace(settings, num_chunks=4)", [1], set()),
        ("x = dataclasses.replace(self._settings, plan=None)", [1], set()),
        ("x = replace(matmul, m=4)", [], set()),
        ("x = self.settings.num_chunks or asked.auto", [], {"num_chunks", "auto"}),
        ("x = self.plan, state.plan", [], set()),
    ],
)
def test_what_is_looked_for_is_found(text, lines, read):
    tree = ast.parse(text)
    assert (rewritten_in(tree), read_of(tree)) == (lines, read)
