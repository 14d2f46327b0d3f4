"""A process that has imported modules, and forks one that becomes a program for each `forked_python` that asks.

    python fork_server.py SOCKET MODULE ...

It has imported nothing of ascend_parallel, which each program does in its own environment. It serves until its standard
input ends. A program that asks sends its words, variables, folder and three files, gets its process and then its exit
status, and is killed when its `forked_python` ends.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from pathlib import Path

import ascend_parallel_autoload

sys.path.pop(0)  # the folder of this script


def main():
    """Serve until standard input ends; return, in a forked process, the call that it is to run."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    wake, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen(64)
    print("ready", flush=True)
    waiting, asked = selectors.DefaultSelector(), {}
    for each in (sys.stdin.fileno(), wake, listening):
        waiting.register(each, selectors.EVENT_READ)
    while True:
        for ready in [key.fileobj for key, _ in waiting.select()]:
            if ready is listening:
                connection, _ = listening.accept()
                call, files = received(connection)
                if call is None:  # who asked has ended before it said what
                    connection.close()
                    continue
                if (process := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listening, connection, *asked.values()):
                        other.close()
                    return call, files
                for file in files:
                    os.close(file)
                asked[process] = connection
                waiting.register(connection, selectors.EVENT_READ)
                say(connection, process)
            elif ready == wake:
                os.read(wake, 1024)
                for process, status in ended():
                    answer(asked.pop(process), status, waiting)
            elif ready == sys.stdin.fileno():
                killed(*asked)
                return None
            else:  # who asked has ended
                waiting.unregister(ready)
                killed(*(process for process, connection in asked.items() if connection is ready))


def received(connection):
    """Return the call that a connection sends, and its three files; None for a call that does not come whole."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size and (more := connection.recv(size - len(text))):
        text += more
    if not head or len(text) < size:
        for file in files:
            os.close(file)
        return None, []
    return json.loads(text), files


def answer(connection, status, waiting):
    """Tell the exit status, if somebody still asks for it."""
    if connection in waiting.get_map():
        waiting.unregister(connection)
        say(connection, status)
    connection.close()


def say(connection, number):
    """Send a number to who asked, unless it has ended, which the connection then tells."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def killed(*processes):
    """Kill these processes, which may not have begun their sessions, with all that they started in them."""
    for process in processes:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)


def ended():
    """Yield the processes that have ended, with their exit statuses."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        yield process, os.waitstatus_to_exitcode(status)


def run(call, files):
    """Become the program."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environ"])
    # A program that ends by os._exit has said what it printed.
    sys.stdout.reconfigure(line_buffering=True)
    sys.executable, sys.orig_argv = call["python"], [call["python"], *call["words"]]
    os.getppid = lambda: call["parent"]
    first, *words = call["words"]
    kind, program = (first, words.pop(0)) if first in ("-c", "-m") else ("", first)
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    own = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(program).resolve().parent))
    sys.path[:0] = [own, *folders]
    sys.argv = [kind or program, *words]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        ascend_parallel_autoload.register()  # as `import torch` does at its end
    if kind == "-m":
        runpy._run_module_as_main(program)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    file, text = "<string>", program
    if not kind:
        file = module.__file__ = program
        text = Path(program).read_bytes()
    exec(compile(text, file, "exec"), module.__dict__)


def status_of(call, files):
    """Run the program to its end, also what it does at its end, and return its exit status."""
    try:
        run(call, files)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as python itself does
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    found = main()
    if found is not None:
        status = status_of(*found)
        sys.stdout.flush()
        os._exit(status & 255)  # to free all that the server has imported would copy it
