"""Processes of programs: ranks that die, disagree or run different programs, and commands as a user types them."""

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forked_python import namespaces

FOLDER = Path(__file__).parent
MEGATRON = ("torch.distributed", "megatron.core")
# What programs import, without a framework: its layers would be patched before the program imports them.
COMMON = ("torch.distributed.launcher.api", "torch.distributed.tensor", "torch.export._trace", "sympy.tensor.tensor")
COMMON += ("numpy", "scipy.optimize", "typer", "rich.progress", "jinja2", "tokenizers", "safetensors.torch")


def launch(code, environs, timeout=120, fresh=False):
    """Run `code` on one process per entry of `environs` (variables of that rank); return them finished.

    Each process has joined nothing yet; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. It begins with torch and
    megatron-core imported, and nothing of ascend_parallel; with `fresh` with nothing imported, for variables that
    Python or torch look at as they start. It can import the modules of this folder.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {name: value for name, value in os.environ.items() if "COC" not in name}
    base |= {"WORLD_SIZE": str(len(environs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    base["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [base.get("PYTHONPATH")])])
    words = [sys.executable if fresh else forked_python(*MEGATRON), "-u", "-c", code]
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder) / f"{what}{rank}" for what in ("out", "err")] for rank in range(len(environs))]
        started = []
        for rank, environ in enumerate(environs):
            with files[rank][0].open("w") as out, files[rank][1].open("w") as err:
                own = {**base, "RANK": str(rank), **environ}
                started.append(subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
        ended = _ended(started, time.monotonic() + timeout)
        texts = [[one.read_text() for one in pair] for pair in files]
    if None in ended:
        raise AssertionError(f"a rank did not end within {timeout} s:\n{texts}")
    return [subprocess.CompletedProcess(words, status, *pair) for status, pair in zip(ended, texts, strict=True)]


def _ended(processes, end):
    """Return the exit statuses; None, and the process is killed, for one that takes longer."""
    found = []
    for process in processes:
        try:
            found.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            found.append(None)
    return found


@functools.cache
def forked_python(*modules):
    """Return the path of a python whose processes begin with these modules imported, by default `COMMON`.

    Beside it lie torchrun and ascend-parallel.

    It is called as `sys.executable` is, with -u, -c, -m or a script. What a program starts by its own `sys.executable`
    begins so too. Not for programs that give open files to processes that they start (multiprocessing, torch.compile),
    nor for variables that Python or torch look at as they start; `fork_server.py` heeds TORCH_DEVICE_BACKEND_AUTOLOAD,
    whose own test in test_patches.py starts anew.
    """
    folder = tempfile.TemporaryDirectory()
    server, python = Path(folder.name) / "server", Path(folder.name) / "python"
    environ = {name: value for name, value in os.environ.items() if "COC" not in name and name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / "fork_server.py"), str(server), *(modules or COMMON)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == b"ready\n", "the fork server does not start"
    imports = f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom forked_python import main\n"
    programs = {
        "python": f"#!{sys.executable} -SE\n{imports}main({sys.executable!r}, {str(server)!r}, {namespaces()})\n"
    }
    start = {"torchrun": "-c 'from torch.distributed.run import main; main()'", "ascend-parallel": "-m ascend_parallel"}
    programs |= {name: f'#!/bin/sh\nexec {python} {words} "$@"\n' for name, words in start.items()}
    for name, text in programs.items():
        python.with_name(name).write_text(text)
        python.with_name(name).chmod(0o755)

    @atexit.register
    def end():
        process.stdin.close()
        process.wait(10)
        folder.cleanup()

    return str(python)
