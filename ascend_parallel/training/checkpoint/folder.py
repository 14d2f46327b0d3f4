"""A folder of checkpoints: the complete ones, the files of each, and the leftovers of interrupted saves.

    step-00000010/           complete: renamed to this name after everything was written
        .metadata            torch.distributed.checkpoint's: which shard of which tensor is in which file
        __0_0.distcp ...     each rank's file
        manifest.json        step, ranks, bytes and SHA-256 of each file, and of the manifest
    step-00000020.7c1e55d2.saving/    a save under way or interrupted; each save has its own token
    step-00000020.lock                the process that saves the step, and its heartbeats
    step-00000005.90ab3c1f.removing/  a checkpoint beyond the number to keep, being removed

A directory is renamed atomically, so a kill at any moment leaves no incomplete checkpoint under a complete name. Each
save writes into a directory of its own, so two jobs cannot mix, and only one of them gets the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ascend_parallel.text import shown
from ascend_parallel.training.checkpoint.differences import CheckpointError, refuse
from ascend_parallel.training.checkpoint.lock import StepLock, is_left, owner_of, read, take_away

Written = tuple[int, str]
"""Bytes and SHA-256 of a file."""

FORMAT = "ascend_parallel checkpoint 1"
MANIFEST = "manifest.json"
METADATA = ".metadata"
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
_UNFINISHED = re.compile(r"(step-[0-9]{8,})(?:\.([0-9a-f]+))?\.(saving|removing)")
_LOCK = re.compile(r"step-[0-9]{8,}\.lock(\.[0-9a-f]+)?")
_BLOCK = 1 << 20


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def steps(folder: str | Path) -> list[int]:
    """Return the steps of a folder's complete checkpoints, ascending; none if there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None if there is none."""
    complete_steps = steps(folder)
    return step_folder(Path(folder), complete_steps[-1]) if complete_steps else None


def of_step(folder: str | Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the latest; if `folder` is a checkpoint and `step` is None, return it.

    Raises `CheckpointError` listing the steps that exist if the checkpoint does not.
    """
    folder = Path(folder)
    if step is None and (folder / MANIFEST).is_file():
        return folder
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {what}; give the folder that checkpoints were saved to")
    existing = steps(folder)
    if not existing or (step is not None and step not in existing):
        shown = ", ".join(map(str, existing)) or "none"
        raise CheckpointError(
            f"{folder}: no whole checkpoint{'' if step is None else f' of step {step}'}; steps: {shown}"
        )
    return step_folder(folder, existing[-1] if step is None else step)


def new_token() -> str:
    """Return the token of a new save."""
    return secrets.token_hex(4)


def saving_folder(folder: Path, step: int, token: str) -> Path:
    """Return the directory that a save writes into."""
    return folder / f"{step_folder(folder, step).name}.{token}.saving"


def prepare(folder: Path, step: int, token: str) -> StepLock:
    """Take the step's lock and remove the leftovers of interrupted saves; return the lock.

    Raises `CheckpointError` if the step is saved already, or a live job is saving it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = step_folder(folder, step)
    lock = StepLock(target.with_suffix(".lock"), token)
    lock.acquire()
    try:
        if target.exists():
            raise CheckpointError(f"{target} is there already: remove it, or save to another folder")
        _clean(folder, lock.path, token)
    except BaseException:
        lock.release()
        raise
    return lock


def _clean(folder: Path, own: Path, token: str) -> None:
    """Remove locks of dead jobs except `own`, and directories of saves without a lock."""
    paths = sorted(folder.iterdir())
    for path in (path for path in paths if _LOCK.fullmatch(path.name) and path != own):
        text = read(path)
        if text is not None and is_left(path, text, own):
            take_away(path, text, token)
    for path in paths:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None:
            continue
        text = read(folder / f"{match[1]}.lock")
        holder = owner_of(text) if text is not None else None
        if match[3] == "removing" or holder is None or holder.token != match[2]:
            _remove(path)


def complete(
    saving: Path,
    target: Path,
    about: Mapping[str, Any],
    files: Mapping[str, Written],
    metadata: Written,
) -> None:
    """Write the manifest into a save's directory and rename the directory to the step's name.

    files, metadata
        Bytes and SHA-256 of each file, and of the metadata, as written.

    Raises `CheckpointError` if a rank's file is missing (the ranks' hosts do not share the file system), or if another
    job's save got the name first.
    """
    written = {**files, METADATA: metadata}
    lost = [f"{name}: {size} bytes written" for name, (size, _) in written.items() if _size(saving / name) != size]
    refuse(lost, f"{saving} is not a file system that all ranks share; not there as written")
    content = {"format": FORMAT, **about, "files": written}
    with (saving / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({**content, "digest": digest_of(content)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _sync(saving)
    try:
        saving.rename(target)  # the system refuses to rename onto a directory that is not empty
    except OSError as error:
        raise CheckpointError(f"{target} was saved by another job meanwhile: {error.strerror}") from error
    _sync(target.parent)


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the `keep` last checkpoints."""
    for step in steps(folder)[: -keep if keep is not None else 0]:
        _remove(step_folder(folder, step))


def _remove(path: Path) -> None:
    """Rename a directory before removing it, so that a half-removed checkpoint never counts as complete."""
    away = path.with_name(f"{path.name.partition('.')[0]}.{new_token()}.removing")
    with suppress(FileNotFoundError):
        path.rename(away)
        shutil.rmtree(away)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest; raise `CheckpointError` if the manifest or the metadata is not as written."""
    path = checkpoint / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if not isinstance(content, dict) or "digest" not in content:
        raise CheckpointError(f"{path} is damaged: it is no table with a digest")
    digest = content.pop("digest")
    if digest != digest_of(content):
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {content.get('format')!r}, this version reads {FORMAT!r}")
    wrong = [f"{key}={shown(content.get(key))}" for key, is_valid in _CONTENT.items() if not is_valid(content.get(key))]
    refuse(wrong, f"{path} is damaged")
    verify(checkpoint, content, [METADATA])
    return {**content, "digest": digest}


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to; rename it to `path` when it is complete, else remove it.

    Raises `CheckpointError` when the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{new_token()}.saving")
    try:
        with unfinished.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(path)
    except CheckpointError:  # raised by the source that is being read
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    except RuntimeError as error:  # torch.save raises this for a failed write, without the write's own error
        raise CheckpointError(f"{path} cannot be written, as on a full disk: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _is_files(value: Any) -> bool:
    """Tell whether `value` is ``{plain file name: [bytes, checksum]}`` and has the metadata file."""
    return (
        isinstance(value, dict)
        and METADATA in value
        and all(Path(name).name == name for name in value)
        and all(isinstance(entry, list) and [type(part) for part in entry] == [int, str] for entry in value.values())
    )


_CONTENT: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and value >= 0,
    "ranks": lambda value: type(value) is int and value >= 1,
    "torch": lambda value: isinstance(value, str),
    "ascend_parallel": lambda value: isinstance(value, str),
    "files": _is_files,
}


def verify(checkpoint: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `CheckpointError` naming files that are missing, or whose size or checksum differs from the manifest."""
    damaged = []
    for name in names:
        size, written = manifest["files"][name]
        actual = _size(checkpoint / name)
        if actual != size:
            damaged.append(f"{name}: {'missing' if actual is None else f'{actual} bytes'}, {size} bytes were written")
        elif checksum(checkpoint / name)[1] != written:
            damaged.append(f"{name}: its checksum differs from the manifest's")
    refuse(damaged, f"{checkpoint} is damaged")


def checksum(path: Path) -> tuple[int, str]:
    """Return a file's bytes and SHA-256."""
    sha, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
            size += len(block)
    return size, sha.hexdigest()


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the digest of an index's content, which stands beside it in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
