"""Run a function of a test on two ranks that hold vLLM in their own process: an external launcher, as vLLM says.

``python ranks.py FILE FUNCTION FOLDER`` is a rank. vLLM's own executor would start four processes, which all import it.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
LIMIT = 280


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
    module = sys.modules[function.__module__].__file__
    port = 20000 + os.getpid() % 20000
    running, logs = [], [Path(folder) / f"{function.__name__}-{rank}.log" for rank in (0, 1)]
    for rank in (0, 1):
        env = environment(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=2,
            LOCAL_WORLD_SIZE=2,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            VLLM_ENABLE_V1_MULTIPROCESSING=0,
            **variables,
        )
        command = [sys.executable, __file__, module, function.__name__, str(folder)]
        with logs[rank].open("w") as log:
            running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True))
    end = time.monotonic() + LIMIT
    try:
        outputs = [process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in running]
    finally:
        for process in running:
            process.kill()
    errors = [log.read_text() for log in logs]
    results = [line[7:] for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    codes = [process.returncode for process in running]
    assert len(results) == 2, f"exit codes {codes}\n{errors[0][-4000:]}{errors[1][-4000:]}"
    return [json.loads(result) for result in results], outputs[0] + errors[0]


if __name__ == "__main__":
    file, name, folder = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("test_functions", file)
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    print("RESULT " + json.dumps(getattr(functions, name)(folder)), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the other rank needs this one's store
    os._exit(0)  # a server's threads may wait for each other
