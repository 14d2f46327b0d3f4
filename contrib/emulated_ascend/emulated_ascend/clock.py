"""The virtual clock in a program: its times answer with it, steps are marked, and what happened is written at the end.

from emulated_ascend import clock
clock.mark()                 # the end of a step; behind an optimizer's step it is set by itself
clock.steps()                # the steps so far, as Step values
"""

import atexit
import ctypes
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .kernels.table import library
from .records import Record, Step


def is_on() -> bool:
    """Tell whether this process runs under the virtual clock."""
    return bool(library().emulated_clock_on())


def install() -> None:
    """Let Python's times answer with the clock, mark optimizers' steps, write the record at the end."""
    native = library()
    native.emulated_clock_now.restype = ctypes.c_double
    native.emulated_clock_wait.argtypes = [ctypes.c_double]
    now, began, sleep = native.emulated_clock_now, time.time(), time.sleep

    def slept(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            native.emulated_clock_wait(seconds)
        sleep(seconds)

    for name, function in {
        "perf_counter": lambda: now(),
        "perf_counter_ns": lambda: int(now() * 1e9),
        "time": lambda: began + now(),
        "time_ns": lambda: int((began + now()) * 1e9),
        "sleep": slept,
    }.items():
        _replace(name, function)
    _mark_optimizers()
    if folder := os.environ.get("EMULATED_ASCEND_CLOCK_FOLDER"):
        _write_at_the_end(Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json")


def _write_at_the_end(path: Path) -> None:
    """Write the record when the program ends, also by os._exit, as trainers end to leave hanging threads behind."""
    atexit.register(write, path)
    leave, process = os._exit, os.getpid()

    def left(status: int) -> None:
        if os.getpid() == process:  # not a process that it has forked
            write(path)
        leave(status)

    os._exit = left  # type: ignore[assignment]


def _replace(name: str, function: Any) -> None:
    """Put a function in the place of time's, also where a module has taken it by `from time import`."""
    original = getattr(time, name)
    setattr(time, name, function)
    if name not in ("perf_counter", "perf_counter_ns"):
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, function)


def _mark_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[int] = []

    def stepped(optimizer: Any, *_: Any) -> None:
        first[:] = first or [id(optimizer)]  # of several optimizers the first ends a step
        if first == [id(optimizer)]:
            mark()

    register_optimizer_step_post_hook(stepped)


def mark() -> None:
    """Mark a moment, now on the host and when the current stream gets here on the device."""
    import torch

    library().emulated_clock_mark(ctypes.c_void_p(torch.npu.current_stream().npu_stream))


def write(path: Path) -> None:
    """Write marks and spans of this process as JSON."""
    library().emulated_wait_for_all()
    if not library().emulated_clock_write(str(path).encode()):
        print(f"emulated_ascend: {path} cannot be written", file=sys.stderr)


def forget() -> None:
    """Drop what was recorded so far."""
    library().emulated_wait_for_all()
    library().emulated_clock_forget()


def steps() -> list[Step]:
    """Return the steps between the marks of this process so far."""
    with tempfile.NamedTemporaryFile() as file:
        write(Path(file.name))
        return Record.read(Path(file.name)).steps()
