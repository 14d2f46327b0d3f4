"""Fresh rank processes for tests of faults, where ranks die, disagree or run different programs."""

import os
import socket
import subprocess
import sys


def launch(code, environs, timeout=120):
    """Run `code` on one process per entry of `environs` (variables of that rank); return them finished.

    Each process has joined nothing yet; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {name: value for name, value in os.environ.items() if "COC" not in name}
    base |= {"WORLD_SIZE": str(len(environs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**base, "RANK": str(rank), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environ in enumerate(environs)
    ]
    finished = []
    for process in started:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            out, err = process.communicate()
            raise AssertionError(f"a rank did not end within {timeout} s:\n{out}\n{err}") from None
        finished.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return finished
