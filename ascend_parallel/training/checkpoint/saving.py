"""Save each rank's shards of a model and its optimizer, values and random states, at once or in the background."""

from __future__ import annotations

import hashlib
import io
import logging
import random
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.checkpoint.dcp_planner import TensorShardSavePlanner, kinds
from ascend_parallel.training.checkpoint.differences import in_words
from ascend_parallel.training.checkpoint.folder import new_token, step_folder
from ascend_parallel.training.checkpoint.storage import StepWriter, agree, everybody, same_error_on_all_ranks
from ascend_parallel.version import __version__

log = logging.getLogger(__name__)

VALUES = "values"
RANDOM = "random"


class Saving:
    """A save, finished or in the background.

    path
        The checkpoint's folder once it is complete.
    """

    def __init__(self, path: Path, background: Future[None] | None = None) -> None:
        """Hold a save that has ended, or one that runs in the background."""
        self.path = path
        self._background = background
        self._raised = False
        if background is not None:
            background.add_done_callback(self._log)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its folder; raise the save's error, on every rank."""
        if error := self._error():
            self._raised = True
            raise error
        return self.path

    def done(self) -> bool:
        """Tell whether the save has ended on this rank, with or without an error."""
        return self._background is None or self._background.done()

    def _error(self) -> BaseException | None:
        """Wait for the save and return its error."""
        return None if self._background is None else self._background.exception()

    def _log(self, background: Future[None]) -> None:
        if error := background.exception():
            log.error("saving %s failed: %s", self.path, error)


# The last asynchronous save of this process: the next save or load waits for it.
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
    """Save to ``path/step-N``. Every rank of the default process group calls it; without a group, this process alone.

    path
        A folder on a file system that all ranks share.
    model, optimizer
        This rank's shards, such as ``module.tensor_shards()`` returns. Together the ranks' shards of a name cover its
        tensor exactly; a shard that several ranks hold is written by one rank.
    values
        Anything else to continue with, equal on all ranks: data position, the state of a scheduler, ... All of it must
        be readable by ``torch.load(weights_only=True)``: numbers, strings, tensors, lists, dicts, ...
    asynchronous
        Return once this rank's state is copied, and write in the background. Needs the memory of a copy.
    keep
        Once this checkpoint is complete, remove all but the last `keep` checkpoints; None: remove none.

    Every rank's random state is saved too. A save that ends early leaves all earlier checkpoints unchanged. An earlier
    asynchronous save is waited for, and its error raised. Raises `CheckpointError` on every rank if the ranks'
    arguments differ, shards do not cover their tensors, the step is saved already, another job is saving it, or writing
    fails on any rank.
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
    except Exception as error:  # noqa: BLE001  raised on all ranks by agree()
        fault = in_words(error)
    mine = {"path": str(path), "step": str(step), "keep": str(keep), "asynchronous": str(asynchronous), **digests}
    token = agree(group, "save of a checkpoint", mine, fault, offer=new_token())
    target = step_folder(folder, step)
    about = {"step": step, "ranks": 1 if group is None else group.size(), "torch": torch.__version__}
    writer = StepWriter(folder, step, token, keep, {**about, "ascend_parallel": __version__})
    if not asynchronous:
        _write(group, shards, blobs, writer)
        return Saving(target)
    copies = {name: replace(shard, local=shard.local.detach().to("cpu", copy=True)) for name, shard in shards.items()}
    thread = ThreadPoolExecutor(1, f"saving {target.name}")
    saving = Saving(target, thread.submit(_write, group, copies, blobs, writer))
    thread.shutdown(wait=False)
    _LAST[:] = [saving]
    return saving


def fault_of_last() -> str:
    """Wait for the last background save; return its error if the error has not been raised yet, else ""."""
    last = _LAST.pop() if _LAST else None
    error = None if last is None else last._error()
    if last is None or error is None or last._raised:
        return ""
    last._raised = True
    return f"the asynchronous save to {last.path} failed: {error}"


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
    """Return the shards of both, by their names in a checkpoint."""
    found = {f"model.{name}": shard for name, shard in model.items()}
    return found | {f"optimizer.{name}": shard for name, shard in (optimizer or {}).items()}


def _blobs(values: dict[str, Any], step: int, keep: int | None) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the bytes that this rank writes beside tensors, and fingerprints of values that all ranks must share."""
    if type(step) is not int or step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step={step}, keep={keep}: a step is 0 or more, and 1 or more are kept (or None: all)")
    rank = dist.get_rank() if dist.is_initialized() else 0
    digests = {f"values[{name!r}]": _fingerprint(value) for name, value in values.items()}
    blobs = {f"{RANDOM}.{rank}": as_bytes(random_state())}
    if rank == 0:
        blobs[VALUES] = as_bytes(values)
    return blobs, digests


def as_bytes(value: Any) -> bytes:
    """Return a value as bytes; raise `ValueError` if ``torch.load(weights_only=True)`` cannot read them."""
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


def random_state() -> dict[str, Any]:
    """Return the generator states of torch, the current accelerator (if any), Python and numpy."""
    kind, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        found[device.type] = torch.get_device_module(device).get_rng_state()
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` returned; the state of an accelerator that this process lacks is ignored."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type in state and torch.accelerator.is_available():
        torch.get_device_module(device).set_rng_state(state[device.type])
