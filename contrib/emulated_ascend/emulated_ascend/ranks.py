"""A pool of ranks for tests: processes that run functions of test files, forked where torch_npu is imported.

    ranks = Ranks(2)
    ranks.run(function, *arguments)     the results, by rank
    ranks.close()

The functions are named by their file; a rank has a device and a process group. An error of a rank is an AssertionError
with the tracebacks of all; the pool is closed then, for its ranks may wait for each other.
"""

import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

_context = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed", "torch_npu", "numpy"]
_context.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Have the server of forks import further modules beside those of earlier calls; before the first pool."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)
    _context.set_forkserver_preload(PRELOADED)


class Ranks:
    """So many processes with a process group of `backend`, "hccl" or "gloo".

    variables  environment of the processes; None removes a variable
    seconds    how long a call may take
    """

    def __init__(
        self, count: int, variables: Mapping[str, str | None] | None = None, backend: str = "hccl", seconds: float = 120
    ) -> None:
        self._seconds, self._processes, self._pipes = seconds, [], []
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(count):
            ours, theirs = _context.Pipe()
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "EMULATED_ASCEND_TIMEOUT": str(int(seconds) // 2),
            }
            process = _context.Process(
                target=_serve,
                args=(theirs, rank, count, backend, f"{self._folder.name}/store", {**own, **(variables or {})}),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on every rank; return its results by rank."""
        call = (inspect.getsourcefile(function), function.__qualname__, arguments)
        for pipe in self._pipes:
            pipe.send(call)
        limit = time.monotonic() + self._seconds
        answers = [self._answer(rank, limit) for rank in range(len(self._pipes))]
        errors = [f"rank {rank}:\n{answer}" for rank, (right, answer) in enumerate(answers) if not right]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [answer for _, answer in answers]

    def _answer(self, rank: int, limit: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, limit - time.monotonic())):
                return pipe.recv()
        except EOFError:
            self._processes[rank].join(1)
            return False, f"ended with {self._processes[rank].exitcode}"
        return False, f"no answer within {self._seconds:g} s"

    @property
    def alive(self) -> bool:
        """Whether the pool can be used."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        self._folder.cleanup()


def _serve(
    pipe: Connection, rank: int, count: int, backend: str, store: str, variables: Mapping[str, str | None]
) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch._import_device_backends()  # as `import torch` does at its end, with this rank's variables
    if backend == "hccl":
        torch.npu.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            file, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if file not in modules:
                modules[file] = _loaded(file)
            function: Any = modules[file]
            for part in name.split("."):
                function = getattr(function, part)
            result = function(*arguments)
            if backend == "hccl":
                torch.npu.synchronize()
            pipe.send((True, result))
        except BaseException:  # noqa: BLE001  who asked reports it
            pipe.send((False, traceback.format_exc()))


def _loaded(file: str) -> ModuleType:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
