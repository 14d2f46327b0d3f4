"""Fresh rank processes for tests of faults, where ranks die, disagree or run different programs."""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def launch(code, environs, timeout=120, fresh=False):
    """Run `code` on one process per entry of `environs` (variables of that rank); return them finished.

    Each process has joined nothing yet; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. It begins with torch and
    megatron-core imported (fork_server.py), and nothing of ascend_parallel; with `fresh` with nothing imported, for
    variables that Python or torch look at as they start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {name: value for name, value in os.environ.items() if "COC" not in name}
    base |= {"WORLD_SIZE": str(len(environs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder) / f"{what}{rank}" for what in ("out", "err")] for rank in range(len(environs))]
        calls = [{**base, "RANK": str(rank), **environ} for rank, environ in enumerate(environs)]
        parent = _Fresh() if fresh else _fork_server()
        started = [parent.start(code, call, *pair) for call, pair in zip(calls, files, strict=True)]
        ended = parent.wait(started, timeout)
        texts = [[one.read_text() for one in pair] for pair in files]
    if None in ended:
        raise AssertionError(f"a rank did not end within {timeout} s:\n{texts}")
    args = [sys.executable, "-c", code]
    return [subprocess.CompletedProcess(args, status, *pair) for status, pair in zip(ended, texts, strict=True)]


class _Fresh:
    def start(self, code, environ, out, err):
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen([sys.executable, "-u", "-c", code], env=environ, stdout=stdout, stderr=stderr)

    def wait(self, processes, timeout):
        end, found = time.monotonic() + timeout, []
        for process in processes:
            try:
                found.append(process.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                found.append(None)
        return found


class _ForkServer:
    def __init__(self):
        environ = {name: value for name, value in os.environ.items() if "COC" not in name}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
        )
        self._ended, self._rest = {}, b""

    def start(self, code, environ, out, err):
        for file in (out, err):
            file.touch()
        call = {"code": code, "environ": environ, "stdout": str(out), "stderr": str(err)}
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()
        while (answer := self._read(60)) is not None:
            if "process" in answer:
                return answer["process"]
            self._ended[answer["ended"]] = answer["status"]
        raise AssertionError("the process that starts others does not answer")

    def wait(self, processes, timeout):
        """Return the exit statuses; None, and the process is killed, for one that takes longer."""
        end = time.monotonic() + timeout
        while not self._ended.keys() >= set(processes):
            answer = self._read(max(0.0, end - time.monotonic()))
            if answer is None:
                for process in set(processes) - self._ended.keys():
                    os.kill(process, signal.SIGKILL)
                break
            self._ended[answer["ended"]] = answer["status"]
        return [self._ended.get(process) for process in processes]

    def _read(self, seconds):
        """Return the next line, or None if there is none for so long."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            found = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not found:
                return None
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


@functools.cache
def _fork_server():
    return _ForkServer()
