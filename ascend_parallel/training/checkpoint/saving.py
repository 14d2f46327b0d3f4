"""Saving what every rank holds of a model and its optimizer, values and random states, at once or in background."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardSavePlanner, kinds
from ascend_parallel.training.checkpoint.differences import in_words
from ascend_parallel.training.checkpoint.folder import new_token, step_folder
from ascend_parallel.training.checkpoint.random_state import random_state
from ascend_parallel.training.checkpoint.storage import StepWriter, agree, everybody, same_error_on_all_ranks
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

VALUES = "values"
RANDOM = "random"


class Saving:
    """A save that is done or under way.

    path
        Where the checkpoint is once it is whole.
    """

    def __init__(self, path: Path) -> None:
        """Make one that is done; `_start` puts it in the background."""
        self.path = path
        self._error: BaseException | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def wait(self) -> Path:
        """Wait until the checkpoint is whole, and return where it is; raise what went wrong, on every rank."""
        self._join()
        if self._error is not None:
            self._told = True
            raise self._error
        return self.path

    def done(self) -> bool:
        """Tell whether it is over on this rank, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _start(self, *args: Any) -> None:
        self._thread = threading.Thread(target=self._run, args=args, name=f"saving {self.path.name}")
        self._thread.start()

    def _run(self, *args: Any) -> None:
        try:
            _write(*args)
        except BaseException as error:  # noqa: BLE001  raised by wait()
            self._error = error
            log.error("saving %s failed: %s", self.path, error)


# The asynchronous save begun last in this process: the next one, and a load, wait for it.
_LAST: list[Saving] = []


def save(
    path: str | Path,
    *,
    step: int,
    model: Mapping[str, TensorShard],
    optimizer: Mapping[str, TensorShard] | None = None,
    values: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Saving:
    """Save to ``path/step-N``. Every rank of the default process group calls it; without one, this process alone.

    path
        A folder on a file system that all ranks share.
    model, optimizer
        This rank's boxes, such as ``module.tensor_shards()`` gives. Together the ranks' boxes of a name make up its tensor
        exactly; a box that several ranks hold is written by one of them.
    values
        What else to continue with, alike on all ranks: data position, the state of a scheduler, ... Of it
        ``torch.load(weights_only=True)`` has to read everything: numbers, strings, tensors, lists, dicts, ...
    asynchronous
        Return once this rank's state is copied, and write in the background. Needs the memory of a copy.
    keep
        Remove all but so many last checkpoints once this is whole; else none.

    Every rank's random state is saved too. A save that ends early, however, leaves the checkpoints before as they are.
    Waits for the asynchronous save before, and raises what went wrong in it. Raises `CheckpointError` on every rank
    when ranks differ, boxes do not fit, the step is saved already or being saved by another job, or writing fails
    anywhere.
    """
    fault = fault_of_last()
    group = everybody()
    shards: dict[str, TensorShard] = {}
    blobs: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    try:
        shards = named(model, optimizer)
        blobs, digests = _blobs(dict(values or {}), step, keep)
        kinds(shards)
        folder = Path(path)
    except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it
        fault = in_words(error)
    mine = {"path": str(path), "step": str(step), "keep": str(keep), "asynchronous": str(asynchronous), **digests}
    token = agree(group, "save of a checkpoint", mine, fault, offer=new_token())
    saving = Saving(step_folder(folder, step))
    about = {"step": step, "ranks": 1 if group is None else group.size(), "torch": torch.__version__}
    writer = StepWriter(folder, step, token, keep, {**about, "ascend_parallel": __version__})
    if not asynchronous:
        _write(group, shards, blobs, writer)
        return saving
    copies = {name: replace(shard, local=_copy(shard.local)) for name, shard in shards.items()}
    saving._start(group, copies, blobs, writer)
    _LAST[:] = [saving]
    return saving


def fault_of_last() -> str:
    """Wait for the save begun last in the background; return what went wrong in it if nobody has been told."""
    last = _LAST.pop() if _LAST else None
    if last is None:
        return ""
    last._join()
    if last._error is None or last._told:
        return ""
    last._told = True
    return f"the asynchronous save to {last.path} failed: {last._error}"


def _write(
    group: dist.ProcessGroup | None, shards: Mapping[str, TensorShard], blobs: Mapping[str, bytes], writer: StepWriter
) -> None:
    try:
        with same_error_on_all_ranks(group):
            dcp.save(
                {},
                storage_writer=writer,
                planner=TensorShardSavePlanner(shards, blobs),
                process_group=group,
                no_dist=group is None,
            )
    finally:
        writer.release()


def named(model: Mapping[str, TensorShard], optimizer: Mapping[str, TensorShard] | None) -> dict[str, TensorShard]:
    """Return both by the names that they have in a checkpoint."""
    found = {f"model.{name}": shard for name, shard in model.items()}
    return found | {f"optimizer.{name}": shard for name, shard in (optimizer or {}).items()}


def _blobs(values: dict[str, Any], step: int, keep: int | None) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return what this rank writes beside tensors, and what of it has to be alike on all."""
    if type(step) is not int or step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step={step}, keep={keep}: a step is 0 or more, and 1 or more are kept (or None: all)")
    rank = dist.get_rank() if dist.is_initialized() else 0
    digests = {f"values[{name!r}]": _fingerprint(value) for name, value in values.items()}
    blobs = {f"{RANDOM}.{rank}": as_bytes(random_state())}
    if rank == 0:
        blobs[VALUES] = as_bytes(values)
    return blobs, digests


def as_bytes(value: Any) -> bytes:
    """Return what ``torch.load(weights_only=True)`` reads; raise `ValueError` for what it refuses to."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(f"values: give numbers, strings, tensors and lists or dicts of them ({error})") from error
    return file.getvalue()


def _fingerprint(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = (str(value.dtype), value.tolist())
    shown = repr(value)
    return shown if len(shown) <= 40 else hashlib.sha256(shown.encode()).hexdigest()[:16]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
