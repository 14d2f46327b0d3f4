"""A process that has imported torch and megatron-core, and forks one that runs a program for every line it reads.

Started by `launch`; it has imported nothing of ascend_parallel, which each program does in its own environment. A line
of standard input is JSON: code, environ, and the files for stdout and stderr; the answer is the process's id, and a
line with that and the exit status when it has ended.
"""

import json
import os
import selectors
import signal
import sys
import types

import megatron.core  # noqa: F401
import torch.distributed

import ascend_parallel_autoload


def main():
    """Serve until standard input ends; return, in a forked process, the program that it is to run."""
    wake, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
    waiting.register(wake, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in waiting.select()}
        if wake in ready:
            os.read(wake, 1024)
            ended()
        if sys.stdin.fileno() in ready:
            line = read_line()
            if not line:
                return None
            call = json.loads(line)
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return call
            print(json.dumps({"process": process}), flush=True)


def read_line():
    """Return a line of standard input, unbuffered: what is behind it is still to be selected."""
    found = b""
    while not found.endswith(b"\n"):
        one = os.read(sys.stdin.fileno(), 1)
        if not one:
            return ""
        found += one
    return found.decode()


def ended():
    """Tell who has ended."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        print(json.dumps({"ended": process, "status": os.waitstatus_to_exitcode(status)}), flush=True)


def run(call):
    """Become the program."""
    os.environ.clear()
    os.environ.update(call["environ"])
    for number, name in ((0, os.devnull), (1, call["stdout"]), (2, call["stderr"])):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    # A program that ends by os._exit has said what it printed.
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    ascend_parallel_autoload.register()  # as `import torch` does at its end
    program = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = program, ["-c"]
    exec(compile(call["code"], "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    found = main()
    if found is not None:
        run(found)
