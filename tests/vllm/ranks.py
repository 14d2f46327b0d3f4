"""Run a function of a test on ranks that hold vLLM in their own process: an external launcher, as vLLM says.

``python ranks.py FILE FUNCTION FOLDER`` is a rank. vLLM's own executor would start four processes, which all import it.
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

import torch

HERE = Path(__file__).parent
LIMIT = 150  # seconds; a pair takes 15 to 40


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


def on_two_ranks(function, folder, **variables):
    """Return what ``function(folder)``, of a test file, returns on each of two ranks, and rank 0's log."""
    return on_ranks(2, function, folder, **variables)


def on_ranks(count, function, folder, **variables):
    """Return what ``function(folder)``, of a test file, returns on each of so many ranks, and rank 0's log.

    The ranks write to files: one that writes more than a pipe holds would wait for a reader, and its peer for it.
    """
    module = sys.modules[function.__module__].__file__
    logs = [Path(folder) / f"{function.__name__}-{rank}.log" for rank in range(count)]
    command = [sys.executable, __file__, module, function.__name__, str(folder)]
    running, port, pair = [], free_port(), uuid.uuid4().hex
    for rank, log in enumerate(logs):
        env = environment(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=count,
            LOCAL_WORLD_SIZE=count,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            PAIR=pair,
            VLLM_ENABLE_V1_MULTIPROCESSING=0,
            **variables,
        )
        with log.open("w") as file:
            running.append(started(command, env, file))
    codes = ended(running, LIMIT)
    texts = [log.read_text() for log in logs]
    results = [line[7:] for text in texts for line in text.splitlines() if line.startswith("RESULT ")]
    tails = "".join(text[-4000:] for text in texts)
    assert len(results) == count, f"exit codes {codes}\n{tails}"
    return [json.loads(result) for result in results], texts[0]


def collected(request, name, known):
    """Return the values of a parameter that the tests of this file to run have, or else all that are known."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params)) or [*known]


def started(command, env, log):
    """Start a program in a session of its own, so that no process of it outlives `ended`."""
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


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
    file, name, folder = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("test_functions", file)
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    print("RESULT " + json.dumps(getattr(functions, name)(folder)), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the other ranks need this one's store
    os._exit(0)  # a server's threads may wait for each other
