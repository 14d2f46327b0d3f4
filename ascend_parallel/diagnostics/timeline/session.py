"""Record the passes of one process and write the rank's file."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.modules import module as hooks

from ascend_parallel.diagnostics.timeline import align, files
from ascend_parallel.ops.record import RECORDING, RecordedPass, Recorder
from ascend_parallel.process_groups.rendezvous import Rendezvous
from ascend_parallel.settings import MOST_PASSES
from ascend_parallel.version import __version__

PASSES = 4096


class Session:
    """A recording in this process, from the constructor until `finish`, which writes the rank's file to `folder`."""

    def __init__(self, folder: str | Path, passes: int = PASSES) -> None:
        """Start recording; keep the last `passes` passes of layers.

        Raises `ValueError` unless `passes` is from 1 to a million, and `SettingsError` if `folder` is not writable.
        """
        if type(passes) is not int or not 1 <= passes <= MOST_PASSES:
            raise ValueError(f"passes={passes!r} is not allowed: give a whole number from 1 to {MOST_PASSES}")
        files.require_writable(folder, "folder")
        self.folder = Path(folder)
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._rank, self._ranks = 0, 1
        self._differences: list[align.Difference] = []
        self._pid = os.getpid()
        self._names = ModuleNames()
        self._recorder = Recorder(passes, self._compare_clocks, self._names.stack)
        self._outer = RECORDING.recorder
        self._written: Path | None = None
        self._finished = False
        RECORDING.recorder = self._recorder

    def finish(self) -> Path | None:
        """Stop recording, write the file and return its path, or None if nothing ran. A second call does nothing."""
        if self._finished or os.getpid() != self._pid:  # a forked child must not write the parent's passes
            return self._written
        self._finished = True
        self._names.remove()
        if RECORDING.recorder is self._recorder:
            RECORDING.recorder = self._outer
        self.write()
        return self._written

    def write(self) -> None:
        """Write the file if a pass ran and the file is not written yet."""
        if self._written is None and self._recorder.total:
            self._written = files.write(self.folder, self._header(), map(_plain, self._recorder.passes))

    def say(self) -> None:
        """Print one line on rank 0: where the files are, or why there are none."""
        if self._rank or os.getpid() != self._pid:
            return
        if self._written is None:
            if os.environ.get("RANK") != "0" or multiprocessing.parent_process() is not None:
                return  # an ascend-parallel command, another rank, or a data loader's worker
            message = (
                f"nothing was recorded for {self.folder}: no layer or operator of ascend_parallel ran (Megatron-core's "
                "own layers are not recorded; COC_MODE=1 replaces them without overlap)"
            )
        else:
            kept, total = len(self._recorder.passes), self._recorder.total
            last = f"the last {kept} of {total}" if total > kept else str(kept)
            message = (
                f"{last} passes of layers on each of {self._ranks} ranks; see: ascend-parallel timeline {self.folder}"
            )
        sys.stderr.write(f"ascend_parallel timeline: {message}\n")

    def _compare_clocks(self, group: dist.ProcessGroup) -> None:
        """Compare clocks with the group's ranks; the first call also agrees on the run's name with all ranks."""
        if not self._differences:
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
            everybody = dist.group.WORLD
            assert everybody is not None
            self.run = Rendezvous(everybody, "timeline").decide(self.run)
        difference = align.compare(group)
        if difference is not None:
            self._differences.append(difference)

    def _header(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "rank": self._rank,
            "ranks": self._ranks,
            "host": socket.gethostname(),
            "boot": align.boot_id(),
            "clocks": [asdict(difference) for difference in self._differences],
            "now": {"monotonic": time.monotonic_ns(), "wall": time.time_ns()},
            "passes": self._recorder.total,
            "versions": {"ascend_parallel": __version__, "torch": torch.__version__},
        }


@contextmanager
def record(folder: str | Path, *, passes: int = PASSES) -> Iterator[Session]:
    """Record the layers and operators that run inside, and write this rank's file to `folder` at the end.

    Enter the context on every rank of a group: the ranks compare their clocks at their first call, and a `ClockError`
    names a rank that does not take part. Only the last `passes` passes are kept. Of nested contexts, the innermost
    records. The file is written even if the block raises; unfinished passes are marked.
    """
    session = Session(folder, passes)
    try:
        yield session
    finally:
        session.finish()
        session.say()


class Variable:
    """The recording of COC_TIMELINE, which lasts until the process ends."""

    def __init__(self) -> None:
        """Start without a recording."""
        self._session: Session | None = None
        self._requested: tuple[str, int] | None = None

    def follow(self, folder: str | None, passes: int) -> None:
        """Record to `folder`, or stop if it is None; do nothing if neither argument has changed.

        Raises `OSError`, and keeps recording as before, if the present record cannot be written.
        """
        requested = None if folder is None else (folder, passes)
        if requested == self._requested:
            return
        if self._session is not None:
            self._session.write()
        self.finish()
        if requested is not None:
            self._session, self._requested = Session(*requested), requested
            atexit.register(self.finish)

    def finish(self) -> None:
        """Stop recording, write the file and print the line of `Session.say`."""
        atexit.unregister(self.finish)
        session, self._session, self._requested = self._session, None, None
        if session is None:
            return
        try:
            session.finish()
        except OSError as error:  # the run itself must not fail
            sys.stderr.write(f"ascend_parallel timeline: {session.folder} could not be written to: {error.strerror}\n")
            return
        session.say()


def _plain(recorded: RecordedPass) -> dict[str, Any]:
    """Return one pass as plain values, with times in ns."""

    def ns(mark: Any) -> int | None:
        return None if mark is None else recorded.clock.ns(mark)

    spans = [[s.kind, s.name, s.index, ns(s.begin), ns(s.end), s.workers] for s in recorded.spans]
    return {
        "layer": recorded.layer,
        "kind": recorded.kind,
        "direction": recorded.direction,
        "group": recorded.group,
        "begin": ns(recorded.begin),
        "end": ns(recorded.end),
        "calls": recorded.calls,
        "spans": spans,
    }


class ModuleNames:
    """The stack of running modules, tracked by torch's global module hooks until `remove`.

    A module that runs outside all other modules is a model: its submodules get their names from `named_modules`.
    """

    def __init__(self) -> None:
        """Register the hooks."""
        self.stack: list[str] = []
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            for name, inner in module.named_modules():
                self._names.setdefault(inner, name)
        self.stack.append(self._names[module] or type(module).__name__)

    def _leave(self, *_: Any) -> None:
        if self.stack:  # empty if recording began inside this forward
            self.stack.pop()
