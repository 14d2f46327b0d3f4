"""A folder of checkpoints: which are whole, what each file has to be, and what an interrupted save left.

    step-00000010/           whole: renamed to this name when all else was written
        .metadata            torch.distributed.checkpoint's: which box of which tensor is in which file
        __0_0.distcp ...     each rank's file
        manifest.json        step, ranks, bytes and SHA-256 of each file, and of itself
    step-00000020.7c1e55d2.saving/    a save under way, or interrupted; the word is the save's own
    step-00000020.lock                who saves it, and lives
    step-00000005.90ab3c1f.removing/  one of more than are kept, on its way out

A directory's name changes at once or not at all, so that whatever is killed when, the names that mean whole are. A
save writes into a directory that no other has, so that two jobs cannot mix, and one of them gets the name.
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
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def steps(folder: str | Path) -> list[int]:
    """Return the steps of the checkpoints of a folder that were saved wholly, rising; none if there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def latest(folder: str | Path) -> Path | None:
    """Return the whole checkpoint of the highest step, or None if there is none."""
    found = steps(folder)
    return step_folder(Path(folder), found[-1]) if found else None


def of_step(folder: str | Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the latest; a checkpoint itself is returned as it is.

    Raises `CheckpointError` when it is not there, with those that are.
    """
    folder = Path(folder)
    if step is None and (folder / MANIFEST).is_file():
        return folder
    there = steps(folder)
    if not there or (step is not None and step not in there):
        shown = ", ".join(map(str, there)) or "none"
        raise CheckpointError(
            f"{folder}: no whole checkpoint{'' if step is None else f' of step {step}'}; steps: {shown}"
        )
    return step_folder(folder, there[-1] if step is None else step)


def new_token() -> str:
    """Return the word of a new save."""
    return secrets.token_hex(4)


def saving_folder(folder: Path, step: int, token: str) -> Path:
    """Return where a save writes."""
    return folder / f"{step_folder(folder, step).name}.{token}.saving"


def prepare(folder: Path, step: int, token: str) -> StepLock:
    """Take the step's lock, and remove what interrupted saves left; return the lock.

    Raises `CheckpointError` if the step is saved already, or being saved by a job that lives.
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
    """Remove locks of dead jobs but our `own`, and directories of saves that no lock is held for."""
    paths = sorted(folder.iterdir())
    for path in (path for path in paths if _LOCK.fullmatch(path.name) and path != own):
        told = read(path)
        if told is not None and is_left(path, told, own):
            take_away(path, told, token)
    for path in paths:
        match = _UNFINISHED.fullmatch(path.name)
        if match is None:
            continue
        told = read(folder / f"{match[1]}.lock")
        holder = owner_of(told) if told is not None else None
        if match[3] == "removing" or holder is None or holder.token != match[2]:
            _remove(path)


def complete(
    saving: Path,
    target: Path,
    about: Mapping[str, Any],
    files: Mapping[str, Written],
    metadata: Written,
) -> None:
    """Write the manifest of a save's directory and give it the step's name.

    files, metadata
        Bytes and SHA-256 of each file, and of the metadata, as they were written.

    Raises `CheckpointError` when a rank's file is not in it, as when the ranks' hosts do not share the file system,
    and when another job's save got the name first.
    """
    written = {**files, METADATA: metadata}
    lost = [f"{name}: {size} bytes written" for name, (size, _) in written.items() if _size(saving / name) != size]
    refuse(lost, f"{saving} is not a file system that all ranks share; not there as written")
    told = {"format": FORMAT, **about, "files": written}
    with (saving / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({**told, "digest": _digest(told)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _sync(saving)
    try:
        saving.rename(target)  # onto a directory that holds anything: refused by the system
    except OSError as error:
        raise CheckpointError(f"{target} was saved by another job meanwhile: {error.strerror}") from error
    _sync(target.parent)


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the `keep` last checkpoints."""
    for step in steps(folder)[: -keep if keep is not None else 0]:
        _remove(step_folder(folder, step))


def _remove(path: Path) -> None:
    """Take a directory its name first, so that nobody takes what is half removed for whole; others may be at it too."""
    away = path.with_name(f"{path.name.partition('.')[0]}.{new_token()}.removing")
    with suppress(FileNotFoundError):
        path.rename(away)
        shutil.rmtree(away)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest; raise `CheckpointError` if it, or the metadata, is not what was written."""
    path = checkpoint / MANIFEST
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if not isinstance(told, dict) or "digest" not in told:
        raise CheckpointError(f"{path} is damaged: it is no table with a digest")
    digest = told.pop("digest")
    if digest != _digest(told):
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {told.get('format')!r}, this version reads {FORMAT!r}")
    wrong = [f"{key}={shown(told.get(key))}" for key, fits in _CONTENT.items() if not fits(told.get(key))]
    refuse(wrong, f"{path} is damaged")
    verify(checkpoint, told, [METADATA])
    return {**told, "digest": digest}


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which has its name once it is whole; else nothing is left.

    Raises `CheckpointError` when it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{new_token()}.saving")
    try:
        with unfinished.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(path)
    except CheckpointError:  # of what is read
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    except RuntimeError as error:  # torch.save's for a write that fails, whose own error it swallows
        raise CheckpointError(f"{path} cannot be written, as on a full disk: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _is_files(value: Any) -> bool:
    """Tell whether a manifest's files are bytes and checksums by plain names, the metadata among them."""
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
    """Raise `CheckpointError` naming the files that are missing, or not of the size and checksum written."""
    damaged = []
    for name in names:
        size, written = manifest["files"][name]
        there = _size(checkpoint / name)
        if there != size:
            damaged.append(f"{name}: {'missing' if there is None else f'{there} bytes'}, {size} bytes were written")
        elif checksum(checkpoint / name)[1] != written:
            damaged.append(f"{name}: its checksum differs from the one written")
    refuse(damaged, f"{checkpoint} is damaged")


def checksum(path: Path) -> tuple[int, str]:
    """Return a file's bytes and SHA-256."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
            size += len(block)
    return size, found.hexdigest()


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
