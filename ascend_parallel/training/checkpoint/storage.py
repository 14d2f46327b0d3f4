"""Write a checkpoint's files with checksums and rename the folder when complete; raise errors on all ranks."""

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

from ascend_parallel.process_groups import time_limit
from ascend_parallel.process_groups.consistency import differing, store_all_gather
from ascend_parallel.training.checkpoint.differences import CheckpointError, in_words, refuse
from ascend_parallel.training.checkpoint.folder import complete, prepare, prune, saving_folder, step_folder
from ascend_parallel.training.checkpoint.lock import StepLock

# A gloo group of all ranks for each default group: a background save must not mix with a step's collectives.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class _HashingFile(io.BufferedWriter):
    """A new file that hashes the bytes written to it."""

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
        """Number and SHA-256 of the bytes written."""
        return self._size, self._hash.hexdigest()


class _HashingFiles(FileSystem):
    """A file system that records the bytes written, by file name: a file read back may be another process's."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _HashingFile(Path(path)) as file:
            yield file
            if not file.closed:  # torch syncs the metadata while its last bytes are still in the buffer
                file.flush()
                os.fsync(file.fileno())
        self.written[Path(path).name] = file.written


class StepWriter(FileSystemWriter):
    """Writes ``step-N.<token>.saving`` and, once every rank's files are there, renames it to ``step-N``."""

    def __init__(self, folder: Path, step: int, token: str, keep: int | None, about: Mapping[str, Any]) -> None:
        """Keep the last `keep` checkpoints of the folder (None: all); `about` goes into the manifest.

        token
            The save's token, the same on all ranks.
        """
        saving = saving_folder(folder, step, token)
        super().__init__(saving, overwrite=False)
        self.fs: FileSystem = _HashingFiles()
        self._saving, self._folder, self._step, self._token = saving, folder, step, token
        self._keep, self._about = keep, about
        self._lock: StepLock | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the lock and clean up on one rank; no rank writes before this is done."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._lock = prepare(self._folder, self._step, self._token)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; ranks make the directory when they write, as a rank may still be removing old ones."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; append their sizes and checksums to the results."""
        self._saving.mkdir(parents=True, exist_ok=True)
        results = super().write_data(plan, planner).wait()
        done: Future[list[Any]] = Future()
        done.set_result([*results, self._written()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, rename the directory, remove old checkpoints; runs on one rank."""
        before = self._written()
        super().finish(metadata, [rank_results[:-1] for rank_results in results])
        (of_metadata,) = (entry for name, entry in self._written().items() if name not in before)
        written_by_rank: list[Any] = [rank_results[-1] for rank_results in results]
        files = {name: entry for written in written_by_rank for name, entry in written.items()}
        complete(self._saving, step_folder(self._folder, self._step), self._about, files, of_metadata)
        prune(self._folder, self._keep)

    def release(self) -> None:
        """Release the lock on the rank that holds it; do nothing on the others."""
        if self._lock is not None:
            self._lock.release()

    def _written(self) -> dict[str, tuple[int, str]]:
        assert isinstance(self.fs, _HashingFiles)
        return dict(self.fs.written)


def everybody() -> dist.ProcessGroup | None:
    """Return the checkpoints' gloo group of all ranks, or None in one process. All ranks must call it together."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return None
    if dist.get_backend(world) == "fake":
        raise CheckpointError("the default process group is fake: ranks that do not exist have nothing to save or load")
    if _GROUPS.get(world) not in c10d._world.pg_map:  # not made yet, or destroyed: Megatron-core destroys all groups
        group = dist.new_group(backend="gloo", timeout=time_limit(world))
        assert group is not None
        _GROUPS[world] = group
    return _GROUPS[world]


def agree(group: dist.ProcessGroup | None, what: str, mine: dict[str, str], fault: str = "", offer: str = "") -> str:
    """Raise `CheckpointError` on every rank if any rank has a fault, or the ranks' values differ.

    mine
        This rank's values, by name; all ranks' must be equal.
    fault
        This rank's error message; "" without an error.
    offer
        This rank's proposal; the first rank's proposal is returned on all ranks.
    """
    if group is None:
        refuse([fault] if fault else [], what)
        return offer
    messages = store_all_gather(group, what, {"fault": fault, "mine": mine, "offer": offer}, CheckpointError)
    refuse([f"rank {rank}: {message['fault']}" for rank, message in messages.items() if message["fault"]], what)
    differences = differing({rank: message["mine"] for rank, message in messages.items()})
    refuse([f"{name}: {by_rank}" for name, by_rank in differences.items()], f"{what}: ranks differ")
    return str(messages[min(messages)]["offer"])


def names_of_all(group: dist.ProcessGroup | None, names: Iterable[str]) -> set[str]:
    """Return the names that any rank has; all ranks call it, after `agree`."""
    names_by_rank: list[Any] = [list(names)]
    if group is not None:
        names_by_rank *= group.size()
        dist.all_gather_object(names_by_rank, names_by_rank[0], group=group)
    return {name for rank_names in names_by_rank for name in rank_names}


@contextmanager
def same_error_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn torch.distributed.checkpoint's exception, which all ranks raise, into `CheckpointError`."""
    with warnings.catch_warnings() if group is None else nullcontext():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            lines = [
                f"{'' if isinstance(cause, CheckpointError) else f'rank {rank}: '}{in_words(cause)}"
                for rank, (cause, _) in sorted(error.failures.items())
            ]
            raise CheckpointError("\n".join(dict.fromkeys(lines))) from error
