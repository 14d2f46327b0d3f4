"""A run announces its overlap once, on rank 0, through the program's logging configuration."""

import logging

import pytest
import torch
from launch import launch
from layers import Layers
from logged import logged
from marks import promise

import ascend_parallel
from ascend_parallel import Settings, SettingsError
from ascend_parallel.environment import read_settings
from ascend_parallel.logs import LogLevel

OURS = logging.getLogger("ascend_parallel")

TRAIN = """
import logging
{before}
root = list(logging.root.handlers), logging.root.level
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron_cpu import megatron_on_cpu, next_token_loss, small_gpt
from megatron_cpu import start_model_parallel, stop_model_parallel
with megatron_on_cpu():
    start_model_parallel(2)
    model = small_gpt(seq=64)
    for _ in range(2):
        next_token_loss(model, torch.ones(2, 65, dtype=torch.long)).backward()
    stop_model_parallel()
print(root == (logging.root.handlers, logging.root.level))
"""


def run(before="", **variables):
    """Train on two ranks; return each rank's lines of standard error."""
    processes = launch(TRAIN.replace("{before}", before), [variables] * 2)
    for process in processes:
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip() == "True"  # the root logger is unchanged
    return [process.stderr.splitlines() for process in processes]


@promise("announcement")
def test_a_run_says_once_that_it_is_overlapped():
    first, second = run(COC_PARALLEL_NUM="4")
    (line,) = [line for line in first if "ascend_parallel: " in line]
    for part in ("overlap is on: 4 chunks (COC_PARALLEL_NUM=4)", "9 of 9 linear layers covered", "2 ranks", "chunked"):
        assert part in line
    for place in ("ascend-parallel status", "COC_TIMELINE", "COC_LOG_LEVEL"):
        assert place in line
    assert not [line for line in second if "ascend_parallel" in line]


@pytest.mark.slow
def test_a_program_that_logs_gets_every_line_its_own_way():
    first, second = run(
        "logging.basicConfig(format='MINE %(name)s %(message)s')", COC_PARALLEL_NUM="4", COC_LOG_LEVEL="info"
    )
    # The patches are applied before the program's first line here.
    early = [line for line in first if line.startswith("ascend_parallel")]
    assert sum("2 of 2 methods of megatron-core" in line for line in early) == 1
    assert all("methods of" in line for line in early)
    mine = [line for line in first if line.startswith("MINE ascend_parallel ")]
    chosen = [line for line in mine if " asked in " not in line]  # a shape is asked about in each layout, maybe as long
    assert len(chosen) == len(set(chosen))
    for part in ("overlap is on", "matmul_all_reduce [128, 32, 64] float32 on 2 cpu ranks: chunked, chunks: 4"):
        assert sum(part in line for line in mine) >= 1, (part, mine)
    assert not [line for line in second if "ascend_parallel " in line]


def announced(group):
    """Return the log of a single layer, called twice for each of several settings."""
    with logged() as lines, Layers(group.size()) as layers:
        for settings in ({"fused": True, "num_chunks": "auto"}, {"mode": 1}, {"num_chunks": 8}):
            ascend_parallel.configure(**settings)
            layer = layers.make("RowParallelLinear", (64, 96))
            for _ in range(2):
                layer(torch.randn(64, 32))
    return [line for line in lines if "overlap is" in line]


def test_what_is_said_is_what_runs(ranks):
    first, second = ranks(2).run(announced)
    assert second == []
    fused, uncut, cut = first
    assert "overlap is on: fused operators where they can run, else 4 chunks" in fused
    assert "is timed" not in fused
    assert "overlap is off: COC_MODE=1 runs the layers without chunks; 1 of 1 linear layers" in uncut
    assert "first matmul_all_reduce: reference in 1" in uncut
    assert "first matmul_all_reduce: chunked in 4" in cut  # 64 rows allow no more


@pytest.mark.parametrize(
    ("environ", "level"), [({}, None), ({"COC_LOG_LEVEL": "error"}, "error"), ({"COC_LOG_LEVEL": " Debug "}, "debug")]
)
def test_levels(environ, level):
    settings = read_settings(environ)
    assert settings.log_level == level
    assert not settings.enabled


@pytest.mark.parametrize("value", ["", "loud", "30", "warn"])
def test_other_levels_are_refused(value):
    with pytest.raises(SettingsError, match=f"COC_LOG_LEVEL='{value}' is not allowed: give debug, info, warning or"):
        read_settings({"COC_LOG_LEVEL": value})
    with pytest.raises(SettingsError, match=f"log_level='{value}'"):
        Settings(log_level=value)


def test_a_level_is_put_back():
    level = LogLevel()
    OURS.setLevel(logging.CRITICAL)
    try:
        for asked, found in (("info", logging.INFO), ("error", logging.ERROR), (None, logging.CRITICAL)):
            level.follow(asked)
            assert OURS.level == found
    finally:
        OURS.setLevel(logging.NOTSET)


@promise("announcement")
def test_the_fallback_is_silent_where_somebody_listens(capsys, caplog):
    OURS.warning("heard by pytest's handler of the root logger")
    assert len(caplog.records) == 1
    assert capsys.readouterr().err == ""


def test_the_fallback_speaks_where_nobody_listens(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    OURS.warning("a %s", "line")
    OURS.info("less")
    assert capsys.readouterr().err == "ascend_parallel: a line\n"
    handler = logging.NullHandler()
    OURS.addHandler(handler)
    try:
        OURS.warning("another")
    finally:
        OURS.removeHandler(handler)
    assert capsys.readouterr().err == ""
