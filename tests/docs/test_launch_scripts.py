"""The launch scripts of examples/launch: the one for CPUs runs, and the one for NPUs switches overlap on alike."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from launch import forked_python

LAUNCH = Path(__file__).parents[2] / "examples/launch"
CPU, NPU = LAUNCH / "gpt_cpu.sh", LAUNCH / "qwen3_32b_npu.sh"
NODES, SLURM = LAUNCH / "two_nodes.sh", LAUNCH / "slurm.sh"
TRAIN = LAUNCH.parent / "gpt" / "train.py"
GPT = (str(TRAIN), "--tensor-model-parallel-size", "2", "--transformer-impl", "local", "--steps", "2")


def environ(folder, *paths, **variables):
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    path = os.pathsep.join([*map(str, paths), str(Path(forked_python()).parent), os.environ["PATH"]])
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder)}
    return {**kept, **own, **variables}


def run(words, environ, folder):
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def launch(folder, **variables):
    return run([CPU], environ(folder, **variables), folder)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_all_scripts_switch_overlap_on_with_the_same_lines():
    exports = re.compile(r"^export .*COC.*$", re.MULTILINE)
    found = {path.name: exports.findall(path.read_text()) for path in LAUNCH.glob("*.sh")}
    assert set(found) == {path.name for path in (CPU, NPU, NODES, SLURM)}
    assert all(lines == found[CPU.name] and len(lines) == 2 for lines in found.values()), found
    page = (LAUNCH.parents[1] / "docs" / "launch.md").read_text()
    assert all(f"(../examples/launch/{name})" in page for name in found)


def test_both_scripts_check_before_and_draw_after_with_the_same_lines():
    switches = re.compile(r"^(?:export .*COC.*|.*ascend-parallel .*)$", re.MULTILINE)
    lines = [switches.findall(path.read_text()) for path in (CPU, NPU)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4


@pytest.mark.slow
def test_the_script_for_cpus_trains_verifies_and_draws_a_timeline(tmp_path):
    variables = {"ITERATIONS": "3", "COC_PARALLEL_NUM": "4", "COC_VERIFY": "2"}
    finished = launch(tmp_path, COC_TIMELINE=str(tmp_path / "timeline"), **variables)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    for part in ("9 of 9 linear layers covered", "verification, every 2 calls", "0 over the limit"):
        assert part in finished.stderr, (part, finished.stderr)
    assert "nothing is wrong" in finished.stdout
    assert list((tmp_path / "timeline").glob("*.html"))


@pytest.mark.slow
def test_a_script_stops_before_the_training_when_the_doctor_finds_something_wrong(tmp_path):
    finished = launch(tmp_path, COC_PARALLEL_NUMM="4")
    assert finished.returncode != 0
    assert "step" not in finished.stdout


@pytest.mark.slow
def test_two_nodes_train_as_one_job(tmp_path):
    """Two torchruns of one process each, as on two hosts; the records of both lie in one folder."""
    port = free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NPROC": "1", "COC_PARALLEL_NUM": "4"}
    variables["COC_TIMELINE"] = str(tmp_path / "timeline")
    nodes = [
        subprocess.Popen(
            ["bash", str(NODES), *GPT],
            env=environ(tmp_path, **variables, NODE_RANK=str(rank)),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "9 of 9 linear layers covered, on 2 ranks" in told[0][1]
    assert len(re.findall(r"^step", told[0][0], re.MULTILINE)) == 2
    assert list((tmp_path / "timeline").glob("*.html"))


@pytest.mark.slow
def test_slurm_starts_both_nodes_with_the_variables(tmp_path):
    """With stand-ins: scontrol names two hosts, and srun runs its command once for each, with the environment."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    programs = {
        "scontrol": '[ "$*" = "show hostnames a[1-2]" ] && echo 127.0.0.1 && sleep 0.2 && echo 127.0.0.2',
        "srun": "while [[ $1 == --* ]]; do shift; done\n"
        'SLURM_NODEID=1 "$@" > "$TOLD" 2>&1 & other=$!\nSLURM_NODEID=0 "$@"\nwait $other',
    }
    for name, text in programs.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (stand_ins / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(LAUNCH.parents[1])}
    variables |= {"MASTER_PORT": free_port(), "NPROC": "1", "COC_PARALLEL_NUM": "4", "TOLD": str(tmp_path / "told")}
    spooled = tmp_path / "slurm_script"  # Slurm runs a copy
    spooled.write_text(SLURM.read_text())
    ended = run([spooled, *GPT], environ(tmp_path, stand_ins, **variables), tmp_path)
    assert ended.returncode == 0, ended.stderr + (tmp_path / "told").read_text()
    assert "9 of 9 linear layers covered, on 2 ranks" in ended.stderr
    assert "4 chunks (COC_PARALLEL_NUM=4)" in (tmp_path / "told").read_text()  # the other node's doctor
