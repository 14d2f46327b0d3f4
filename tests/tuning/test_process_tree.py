"""What a command starts ends with it, however it ends: also ranks that ignore signals, in sessions of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import forked_python

from ascend_parallel.tuning.launch.process_tree import process_tree

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
# A launch of two processes, the second in a session of its own, that heed no signal.
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
time.sleep(300)
"""
# What a launcher starts begins in the usual python: a process of the fork server is no child of who asked for it.
# Signals are heeded, also where these tests run under nohup or in the background of a shell.
BEGIN = (
    f"import signal, sys; sys.executable = {sys.executable!r}; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
)
COMMAND = BEGIN + (
    "import ascend_parallel.diagnostics.{0} as launcher; launcher.PATIENCE = 0.3; "
    "sys.argv[1:] = {1!r}; from ascend_parallel.__main__ import main; main()"
)
RANKS = BEGIN + (
    "from ascend_parallel.tuning.launch import ranks; ranks.PROGRAM = open('stubborn.py').read(); "
    "ranks.call_on_ranks('no:matter', 2, limit=100)"
)
# The program of each launcher, and how many processes of its launch heed no signal.
LAUNCHERS = [
    pytest.param(
        COMMAND.format("trial", ["try", "--", sys.executable, "-S", "stubborn.py"]), 2, SIGNALS[::3], id="try"
    ),
    pytest.param(RANKS, 4, SIGNALS, id="ranks"),
    pytest.param(
        COMMAND.format("degrees", ["verify", "--degrees", "2,1", "stubborn.py"]),
        4,
        SIGNALS,
        id="degrees",
        marks=pytest.mark.slow,
    ),
]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(reached, seconds):
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.05)
    assert reached()


@pytest.mark.parametrize(("program", "count", "signals"), LAUNCHERS)
def test_nothing_outlives_a_command(program, count, signals, tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    runs = []
    for number in signals:
        pids, temporary = tmp_path / f"{number.name}-pids", tmp_path / f"{number.name}-temporary"
        pids.mkdir(), temporary.mkdir()
        command = subprocess.Popen(
            [forked_python(), "-c", program],
            env={**os.environ, "PIDS": str(pids), "TMPDIR": str(temporary)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        runs.append((number, command, pids, temporary))
    for number, command, pids, _ in runs:
        until(lambda pids=pids: len(list(pids.iterdir())) == count, 60)
        command.send_signal(number)
    for number, command, pids, temporary in runs:
        try:
            command.wait(150)  # ranks that ignore signals are given time, and machines differ
        except subprocess.TimeoutExpired:
            left = {pid.name: alive(pid.name) for pid in pids.iterdir()}
            pytest.fail(f"{number.name}: the command does not end; its processes that live: {left}")
        until(lambda pids=pids: not any(alive(pid.name) for pid in pids.iterdir()), 20)
        until(lambda place=temporary: not list(place.glob("ascend_parallel-*")), 20)


def test_a_command_that_ends_takes_with_it_what_it_has_left(tmp_path):
    words = ["sh", "-c", "setsid sleep 300 & echo $! > pid; exit 3"]
    with process_tree(words, patience=5, cwd=tmp_path) as process:
        assert process.wait(20) == 3
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("words", "status"), [(["sh", "-c", "kill -SEGV $$"], -signal.SIGSEGV), (["/no/such"], 127)])
def test_the_status_is_the_commands(words, status):
    with process_tree(words, patience=0, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=20)
    assert process.returncode == status
    assert said.startswith(b"/no/such cannot be started") == (status == 127)


def test_a_signal_that_is_ignored_stays_so():
    """Under nohup a command goes on when its terminal is closed, and so does what it starts."""
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from ascend_parallel.tuning.launch.process_tree import process_tree\n"
        "with process_tree(['grep', 'SigIgn', '/proc/self/status'], patience=0) as process:\n"
        "    process.wait()\n"
        "    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
    )
    done = subprocess.run([forked_python(), "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout.split()[1], 16) & 1 << (signal.SIGHUP - 1)


# Programs that are asked one question, with a limit, and start nothing themselves.
TOOLS = {
    "ascend_parallel/diagnostics/doctor/findings.py",
    "ascend_parallel/tuning/launch/link.py",
    "benchmarks/halves.py",
    "benchmarks/serving.py",
}
# They start a command that ends all that it has started itself: `try`, and the ranks of emulated_ascend.
OF_COMMANDS = {"benchmarks/audit.py", "benchmarks/emulated.py"}
STARTERS = {
    "ascend_parallel/tuning/launch/process_tree.py",
    "ascend_parallel/tuning/launch/reaper.py",
    "ascend_parallel/tuning/launch/user_namespaces.py",  # its process ends with a pipe too
}
STARTS = re.compile(
    r"\b(subprocess|os|multiprocessing)\.(Popen|run|call|check_call|check_output|system|popen|posix_spawn|Process)\("
)


def test_every_launcher_starts_by_a_tree():
    rooms = ("ascend_parallel", "ops", "patches", "benchmarks", "examples")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if STARTS.search(path.read_text(encoding="utf-8"))}
    assert found == TOOLS | OF_COMMANDS | STARTERS
