"""Run functions of tests on ranks that hold vLLM in their own process: an external launcher, as vLLM says.

``python ranks.py`` is a rank. vLLM's own executor would start four processes for each engine, which all import it.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 400  # seconds; a call takes 5 to 40 on a quiet machine


def environment(**variables):
    """Return the environment of a program that uses vLLM on CPUs, without this package's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COC_", "USE_COC_", "VLLM_"))}
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE / "plugin"), kept.get("PYTHONPATH")]))
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **{name: str(value) for name, value in variables.items()},
    }


class Ranks:
    """Processes that run functions of test files, each on all of them, one after the other: they import vLLM once.

    They write to files: one that writes more than a pipe holds would wait for a reader, and its peer for it.
    """

    def __init__(self, count, folder, **variables):
        """Start nothing yet; `folder` gets the logs, the processes get `variables`."""
        self.count, self.folder, self.variables = count, Path(folder), variables
        self.running, self.logs = [], []

    def start(self):
        """Start the processes, if none runs."""
        if self.running:
            return
        port, pair = free_port(), uuid.uuid4().hex
        self.logs = [self.folder / f"{pair}-{rank}.log" for rank in range(self.count)]
        for rank, log in enumerate(self.logs):
            env = environment(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=self.count,
                LOCAL_WORLD_SIZE=self.count,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                PAIR=pair,
                VLLM_ENABLE_V1_MULTIPROCESSING=0,
                **self.variables,
            )
            with log.open("w") as file:
                self.running.append(started([sys.executable, __file__], env, file, stdin=subprocess.PIPE))

    def call(self, function, folder, **variables):
        """Return what ``function(folder)``, of a test file, returns on each rank, and what rank 0 logged meanwhile."""
        self.start()
        begin, name = self.logs[0].stat().st_size, f"{function.__name__}-{uuid.uuid4().hex}"
        answers = [self.folder / f"{name}-{rank}.json" for rank in range(self.count)]
        for process, answer in zip(self.running, answers, strict=True):
            module = sys.modules[function.__module__].__file__
            order = [module, function.__name__, str(folder), variables, str(answer)]
            process.stdin.write(f"{json.dumps(order)}\n".encode())
            process.stdin.flush()
        end = time.monotonic() + LIMIT
        while not all(answer.exists() for answer in answers):
            if time.monotonic() > end or any(process.poll() is not None for process in self.running):
                codes = self.end()
                raise AssertionError(f"exit codes {codes}\n" + "".join(log.read_text()[-4000:] for log in self.logs))
            time.sleep(0.02)
        log = self.logs[0].read_bytes()[begin:].decode()
        return [json.loads(answer.read_text()) for answer in answers], log

    def end(self):
        """End the processes; the next call starts others."""
        codes, self.running = ended(self.running, 0), []
        return codes


def on_two_ranks(function, folder, **variables):
    """Return what `Ranks.call` does, on two ranks of their own."""
    return on_ranks(2, function, folder, **variables)


def on_ranks(count, function, folder, **variables):
    """Return what `Ranks.call` does, on so many ranks of their own."""
    ranks = Ranks(count, folder, **variables)
    try:
        return ranks.call(function, folder)
    finally:
        ranks.end()


def served_to_tests():
    """Be a rank: run what standard input orders until it ends."""
    for line in sys.stdin:
        file, name, folder, variables, answer = json.loads(line)
        os.environ.update(variables)
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        functions = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(functions)
        part = Path(answer).with_suffix(".part")
        part.write_text(json.dumps(getattr(functions, name)(folder)))
        part.rename(answer)
        for variable in variables:
            del os.environ[variable]


def collected(request, name, known):
    """Return the values of a parameter that the tests of this file to run have, or else all that are known."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params)) or [*known]


def started(command, env, log, stdin=subprocess.DEVNULL):
    """Start a program in a session of its own, so that no process of it outlives `ended`."""
    return subprocess.Popen(command, env=env, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def ended(running, seconds):
    """Wait until all programs have ended, or one has failed, or for `seconds`; end what is left of their sessions."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in running]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    served_to_tests()
    os._exit(0)  # a server's threads may wait for each other
