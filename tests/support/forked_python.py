"""The program of `launch.forked_python`: it asks the fork server for a process, and stands for it."""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(python, server, in_server):
    """Run this process's words in a process of the server; with other options and elsewhere, in the usual python."""
    words = [word for word in sys.argv[1:] if word != "-u"]
    known = words and (not words[0].startswith("-") or words[0] in ("-c", "-m"))
    if not known or namespaces() != in_server:
        os.execv(python, [python, *sys.argv[1:]])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    call = {"words": words, "environ": dict(os.environ), "folder": str(Path.cwd())}
    call |= {"python": str(Path(sys.argv[0]).absolute()), "parent": os.getppid()}
    text = json.dumps(call).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(text)
    answers = connection.makefile()
    process = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sent(process, number))
    status = int(answers.readline() or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def namespaces():
    """Return the numbers of the process's network and of its users."""
    return [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "user")]


def sent(process, number):
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
