"""Recording from a start to an end in one process, and the file that comes of it."""

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

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.diagnostics.timeline import clocks, files
from ascend_parallel.diagnostics.timeline.modules import ModuleNames
from ascend_parallel.ops.record import RECORDING, RecordedPass, Recorder
from ascend_parallel.settings import MOST_PASSES
from ascend_parallel.version import __version__

PASSES = 4096


class Session:
    """Records in this process from now on, until `finish` writes the rank's file to `folder`."""

    def __init__(self, folder: str | Path, passes: int = PASSES) -> None:
        """Keep the last `passes` passes of layers; raises `ValueError` if that is no number from 1 to a million.

        Raises `SettingsError` if the folder cannot be written to.
        """
        if type(passes) is not int or not 1 <= passes <= MOST_PASSES:
            raise ValueError(f"passes={passes!r} is not allowed: give a whole number from 1 to {MOST_PASSES}")
        files.require_writable(folder, "folder")
        self.folder = Path(folder)
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._rank, self._ranks = 0, 1
        self._differences: list[clocks.Difference] = []
        self._pid = os.getpid()
        self._names = ModuleNames()
        self._recorder = Recorder(passes, self._meet, self._names.stack)
        self._before = RECORDING.recorder
        self._written: Path | None = None
        self._finished = False
        RECORDING.recorder = self._recorder

    def finish(self) -> Path | None:
        """Stop recording and write the file; None if nothing ran. A second call does nothing."""
        if self._finished or os.getpid() != self._pid:  # a forked child has the same passes
            return self._written
        self._finished = True
        self._names.remove()
        if RECORDING.recorder is self._recorder:
            RECORDING.recorder = self._before
        self.write()
        return self._written

    def write(self) -> None:
        """Write the file, once, if anything ran."""
        if self._written is None and self._recorder.total:
            self._written = files.write(self.folder, self._header(), map(_plain, self._recorder.passes))

    def say(self) -> None:
        """Say on rank 0, in one line, where the files are, or why there are none."""
        if self._rank or os.getpid() != self._pid:
            return
        if self._written is None:
            if os.environ.get("RANK") != "0" or multiprocessing.parent_process() is not None:
                return  # a command, another rank, or a data loader's worker
            said = (
                f"nothing was recorded for {self.folder}: no layer or operator of ascend_parallel ran (Megatron-core's "
                "own are not recorded; COC_MODE=1 replaces them without overlap)"
            )
        else:
            kept, total = len(self._recorder.passes), self._recorder.total
            last = f"the last {kept} of {total}" if total > kept else str(kept)
            said = (
                f"{last} passes of layers on each of {self._ranks} ranks; see: ascend-parallel timeline {self.folder}"
            )
        sys.stderr.write(f"ascend_parallel timeline: {said}\n")

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Compare clocks with the group, and take the run's name from whichever rank was first."""
        if not self._differences:
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
            store: Any = c10d._get_default_store()
            # Each rank counts its sessions: a second one has another name.
            count = store.add(f"ascend_parallel/diagnostics/timeline/count/{self._rank}", 1)
            name = store.compare_set(f"ascend_parallel/diagnostics/timeline/run/{count}", "", self.run)
            self.run = name.decode()
        difference = clocks.compare(group)
        if difference is not None:
            self._differences.append(difference)

    def _header(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "rank": self._rank,
            "ranks": self._ranks,
            "host": socket.gethostname(),
            "boot": clocks.boot_id(),
            "clocks": [asdict(difference) for difference in self._differences],
            "now": {"monotonic": time.monotonic_ns(), "wall": time.time_ns()},
            "passes": self._recorder.total,
            "versions": {"ascend_parallel": __version__, "torch": torch.__version__},
        }


@contextmanager
def record(folder: str | Path, *, passes: int = PASSES) -> Iterator[Session]:
    """Record the layers and operators that run inside, and write this rank's file to `folder` at the end.

    Enter it on every rank of a group alike: the group's ranks compare their clocks at their first call, and
    a rank that does not come is named by a `ClockError`. The last `passes` passes are kept. Nested, the inner
    one records. The file is written also if the block raises; passes that did not end are marked.
    """
    session = Session(folder, passes)
    try:
        yield session
    finally:
        session.finish()
        session.say()


class Variable:
    """The recording that COC_TIMELINE asks for, which lasts as long as the process."""

    def __init__(self) -> None:
        """Start without one."""
        self._session: Session | None = None
        self._asked: tuple[str, int] | None = None

    def follow(self, folder: str | None, passes: int) -> None:
        """Record to `folder` from now on, or stop; nothing changes where the same is asked again.

        Nor if what was recorded so far cannot be written, which raises `OSError`.
        """
        asked = None if folder is None else (folder, passes)
        if asked == self._asked:
            return
        if self._session is not None:
            self._session.write()
        self.finish()
        if asked is not None:
            self._session, self._asked = Session(*asked), asked
            atexit.register(self.finish)

    def finish(self) -> None:
        """Write what there is."""
        atexit.unregister(self.finish)
        session, self._session, self._asked = self._session, None, None
        if session is None:
            return
        try:
            session.finish()
        except OSError as error:  # the run itself ended well
            sys.stderr.write(f"ascend_parallel timeline: {session.folder} could not be written to: {error.strerror}\n")
            return
        session.say()


def _plain(one: RecordedPass) -> dict[str, Any]:
    """One pass as plain values, with times in ns."""

    def ns(mark: Any) -> int | None:
        return None if mark is None else one.clock.ns(mark)

    spans = [[s.kind, s.name, s.index, ns(s.begin), ns(s.end), s.workers] for s in one.spans]
    return {
        "layer": one.layer,
        "kind": one.kind,
        "direction": one.direction,
        "group": one.group,
        "begin": ns(one.begin),
        "end": ns(one.end),
        "calls": one.calls,
        "spans": spans,
    }
