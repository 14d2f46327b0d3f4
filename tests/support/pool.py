"""Real gloo processes for tests: started once a session per number of ranks, and reused.

`RankPool(n).run(function, *args)` calls ``function(group, *args)`` in n processes and returns the n
results in rank order. The function must stand at the top of a test file (it is found by file and
name). A rank that raises fails the test with that rank's traceback; a pool that hung is replaced.
A test that is itself what every rank runs says so: ``@on_ranks(n)`` above ``def test_...(group)``.
"""

import functools
import inspect
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import torch
from rewriting import compiled, install, load

from ascend_parallel.diagnostics.verify import LEDGER

TIME_LIMIT = 60.0
START = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[2]
START.set_forkserver_preload(["tests.support.preloaded"])
os.environ.setdefault("OMP_NUM_THREADS", "1")


class RankPool:
    """n processes in one gloo group."""

    def __init__(self, ranks):
        _start_server()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [START.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            START.Process(target=_serve, args=(rank, ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function, *args):
        """Call ``function(group, *args)`` on every rank."""
        file = sys.modules[function.__module__].__file__
        compiled(file)
        call = (file, function.__qualname__, args)
        for pipe in self._pipes:
            pipe.send(call)
        end = time.monotonic() + 2 * TIME_LIMIT  # for all of them together
        answers = [_answer(pipe, end) for pipe in self._pipes]
        errors = [f"rank {rank}:\n{answer}" for rank, (kind, answer) in enumerate(answers) if kind == "error"]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [answer for _, answer in answers]

    def close(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    @property
    def threads(self):
        """How many threads the first process has; 0 if it has ended."""
        try:
            return sum(1 for _ in Path(f"/proc/{self._processes[0].pid}/task").iterdir())
        except OSError:
            return 0

    @property
    def alive(self):
        """Whether the pool can be used."""
        return all(process.is_alive() for process in self._processes)


def on_ranks(count=None):
    """Let n ranks run a test ``test(group, ...)``, all with the same arguments; without n, as many as `count` says."""

    def decorate(function):
        names = [name for name, one in inspect.signature(function).parameters.items() if one.default is one.empty][1:]

        def test(ranks, **given):
            ranks(given["count"] if count is None else count).run(test, *(given[name] for name in names))

        functools.update_wrapper(test, function)
        del test.__wrapped__  # pytest asks for the arguments of this function
        wanted = ["ranks", *(["count"] if count is None else []), *names]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wanted]
        )
        test.on_each_rank = function
        return test

    return decorate


@functools.cache
def _start_server():
    """Start the server that forks ranks, once: in the folder from which it can import what it is to import."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


def _answer(pipe, end):
    if pipe.poll(max(0.0, end - time.monotonic())):
        return pipe.recv()
    return "error", f"no answer within {2 * TIME_LIMIT:g} s"


def _serve(rank, ranks, store, pipe):
    torch.set_num_threads(1)
    install()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIME_LIMIT)
    )
    modules = {}
    while True:
        try:
            file, name, args = pipe.recv()
        except EOFError:  # the session is over
            return
        try:
            if file not in modules:
                modules[file] = load(file)
            LEDGER.clear()  # what earlier tests checked
            logging.disable(logging.NOTSET)  # and what they silenced
            function = getattr(modules[file], name)
            function = getattr(function, "on_each_rank", function)
            pipe.send(("ok", function(torch.distributed.group.WORLD, *args)))
        except BaseException:  # noqa: BLE001  the test reports it
            pipe.send(("error", traceback.format_exc()))
