"""The files of a checkpoint: written with checksums, named when whole; and the ranks' way to say what went wrong."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ascend_parallel.consistency import exchange
from ascend_parallel.process_groups import time_limit
from ascend_parallel.training.checkpoint.differences import CheckpointError, in_words, refuse
from ascend_parallel.training.checkpoint.folder import complete, prepare, prune, saving_folder, step_folder
from ascend_parallel.training.checkpoint.lock import StepLock

# A gloo group of all ranks for each default group: a save may run under a step, whose collectives it must not meet.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class _HashingFile(io.BufferedWriter):
    """A new file that hashes what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        written = super().write(data)
        self._size += written
        return written

    @property
    def written(self) -> tuple[int, str]:
        """Bytes and SHA-256 of what was written."""
        return self._size, self._hash.hexdigest()


class _HashingFiles(FileSystem):
    """Files of which it is known what was written to them, by name; what is read back may be another's."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _HashingFile(Path(path)) as file:
            yield file
            if not file.closed:  # torch syncs the metadata while its end is in the buffer
                file.flush()
                os.fsync(file.fileno())
        self.written[Path(path).name] = file.written


class StepWriter(FileSystemWriter):
    """Writes ``step-N.<token>.saving`` and, once every rank's files are there, renames it to ``step-N``."""

    def __init__(self, folder: Path, step: int, token: str, keep: int | None, about: Mapping[str, Any]) -> None:
        """Keep the `keep` last checkpoints of the folder, or all; `about` goes into the manifest.

        token
            The save's own word, the same on all ranks.
        """
        saving = saving_folder(folder, step, token)
        super().__init__(saving, overwrite=False)
        self.fs: FileSystem = _HashingFiles()
        self._saving, self._folder, self._step, self._token = saving, folder, step, token
        self._keep, self._about = keep, about
        self._lock: StepLock | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the lock and make way on one rank; no rank writes before it is done."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._lock = prepare(self._folder, self._step, self._token)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan; the directory is made when ranks write, since one may still be removing an older."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and add to the results their bytes and checksums."""
        self._saving.mkdir(parents=True, exist_ok=True)
        results = super().write_data(plan, planner).wait()
        done: Future[list[Any]] = Future()
        done.set_result([*results, self._written()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, name the directory, remove what is not kept; on one rank."""
        before = self._written()
        super().finish(metadata, [told[:-1] for told in results])
        (last,) = (entry for name, entry in self._written().items() if name not in before)  # the metadata's own
        every: list[Any] = [told[-1] for told in results]
        files = {name: entry for told in every for name, entry in told.items()}
        complete(self._saving, step_folder(self._folder, self._step), self._about, files, last)
        prune(self._folder, self._keep)

    def release(self) -> None:
        """Give back the lock, on the rank that has it; the others do nothing."""
        if self._lock is not None:
            self._lock.release()

    def _written(self) -> dict[str, tuple[int, str]]:
        assert isinstance(self.fs, _HashingFiles)
        return dict(self.fs.written)


def everybody() -> dist.ProcessGroup | None:
    """Return checkpoints' own gloo group of all ranks, or None in one process. All ranks make it at the same place."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return None
    if dist.get_backend(world) == "fake":
        raise CheckpointError("the default process group is fake: ranks that do not exist have nothing to save or load")
    if _GROUPS.get(world) not in c10d._world.pg_map:  # not made yet, or destroyed, as Megatron-core's end destroys all
        made = dist.new_group(backend="gloo", timeout=time_limit(world))
        assert made is not None
        _GROUPS[world] = made
    return _GROUPS[world]


def agree(group: dist.ProcessGroup | None, what: str, mine: dict[str, str], fault: str = "", offer: str = "") -> str:
    """Raise `CheckpointError` on every rank if any has a fault, or the ranks came with different values.

    mine
        What has to be alike, by name.
    fault
        What this rank found wrong.
    offer
        Of what the ranks offer, the first one's is returned.
    """
    if group is None:
        refuse([fault] if fault else [], what)
        return offer
    told = exchange(group, what, {"fault": fault, "mine": mine, "offer": offer}, CheckpointError)
    refuse([f"rank {rank}: {value['fault']}" for rank, value in told.items() if value["fault"]], what)
    values = {rank: value["mine"] for rank, value in told.items()}
    names = dict.fromkeys(name for value in values.values() for name in value)
    differ = [name for name in names if len({value.get(name) for value in values.values()}) > 1]
    lines = [
        f"{name}: " + ", ".join(f"{value.get(name)} on rank {at}" for at, value in values.items()) for name in differ
    ]
    refuse(lines, f"{what}: ranks differ")
    return str(told[min(told)]["offer"])


def names_of_all(group: dist.ProcessGroup | None, names: Iterable[str]) -> set[str]:
    """Return the names that any rank has; all ranks call it, after they agreed."""
    told: list[Any] = [list(names)]
    if group is not None:
        told *= group.size()
        dist.all_gather_object(told, told[0], group=group)
    return {name for some in told for name in some}


@contextmanager
def same_error_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn torch.distributed.checkpoint's exception, which all ranks raise alike, into `CheckpointError`."""
    with warnings.catch_warnings() if group is None else nullcontext():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            found = dict.fromkeys(_words(rank, cause) for rank, (cause, _) in sorted(error.failures.items()))
            raise CheckpointError("\n".join(found)) from error


def _words(rank: int, cause: BaseException) -> str:
    return in_words(cause) if isinstance(cause, CheckpointError) else f"rank {rank}: {in_words(cause)}"
