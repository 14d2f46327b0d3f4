"""The program of two halves of a card, where no card is: what it starts, sets and stops, and a rank that hangs."""

import importlib
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ascend_parallel.tuning.launch.ranks import RankError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = {"device": "cuda", "share": 45, "nccl": "/opt/nccl/libnccl.so.2", "priority": True, "connections": 8}
# What stands for NVIDIA's programs: the first notes how it was called, by whom its folders were named, and its input.
PROGRAMS = {
    "nvidia-cuda-mps-control": 'echo "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "$CALLS"\n'
    '[ "$1" = -d ] || cat >> "$CALLS"',
    "nvidia-smi": '[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] && echo 580.159.04',
}
SILENT = """
import time
import halves


def stuck():
    time.sleep(60)


def rank(group):
    halves.SILENCE = 1.0
    halves.alive("a collective begins")
    if group.rank():
        stuck()
    halves.dist.barrier(group)
"""


@pytest.fixture
def halves(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("halves")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Put `PROGRAMS` before all others; return the file of their calls."""
    for name, text in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_mps_has_folders_of_its_own_and_is_stopped_also_after_an_error(halves, calls):
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="a part failed"), halves.mps(OPTIONS):
        own = [os.environ[f"CUDA_MPS_{name}_DIRECTORY"] for name in ("PIPE", "LOG")]
        assert all(Path(folder).is_dir() for folder in own) and own[0] != own[1]
        raise RuntimeError("a part failed")
    assert calls.read_text().splitlines() == [f"-d {own[0]} {own[1]}", f" {own[0]} {own[1]}", "quit"]
    assert not any(Path(folder).exists() for folder in own) and dict(os.environ) == before


def test_ranks_get_halves_of_the_card_the_librarys_path_and_the_ctas(halves):
    before = dict(os.environ)
    with halves._environment(OPTIONS, "4"):
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "45" and os.environ["NCCL_MAX_CTAS"] == "4"
        assert os.environ["LD_PRELOAD"] == OPTIONS["nccl"] and os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert dict(os.environ) == before
    with halves._environment({**OPTIONS, "nccl": None, "priority": False}, "0"):  # NCCL's own number of CTAs
        assert not {"NCCL_MAX_CTAS", "LD_PRELOAD", "TORCH_NCCL_HIGH_PRIORITY"} & (set(os.environ) - set(before))


def test_figures_stand_beside_the_card_its_halves_driver_ctas_and_loaded_nccl(halves, calls, monkeypatch):
    def version(address):
        address._obj.value = 23007

    loaded = {"libnccl.so.2": SimpleNamespace(ncclGetVersion=version)}
    monkeypatch.setattr(halves.ctypes, "CDLL", loaded.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    machine = halves._machine(OPTIONS)
    assert machine["card"] == "NVIDIA H100 80GB HBM3" and machine["driver"] == "580.159.04"
    assert machine["halves"] == "two of one card (MPS: 45 % of its multiprocessors for each rank)"
    assert (machine["CTAs"], machine["backend"]) == ("4", "NCCL 2.30.7")
    assert (machine["CUDA_DEVICE_MAX_CONNECTIONS"], machine["NCCL's streams"]) == ("8", "of high priority")
    monkeypatch.delenv("NCCL_MAX_CTAS")
    assert halves._machine(OPTIONS)["CTAs"] == "NCCL's own"


@pytest.mark.slow
def test_a_rank_that_is_silent_prints_its_stack_and_both_end(tmp_path, monkeypatch, halves):
    (tmp_path / "silent.py").write_text(SILENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    measuring = importlib.import_module("measuring")
    with pytest.raises(RankError, match=r"(?s)Timeout .*in (stuck|barrier)\b") as ended:
        measuring.on_ranks("silent:rank", 2, limit=60)
    assert "a collective begins" in str(ended.value)
