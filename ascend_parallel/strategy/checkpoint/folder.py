"""A folder of checkpoints: which are whole, what each file has to be, and what an interrupted save left.

    step-00000010/           whole: renamed to this name when all else was written
        .metadata            torch.distributed.checkpoint's: which box of which tensor is in which file
        __0_0.distcp ...     each rank's file
        manifest.json        step, ranks, bytes and SHA-256 of each file, and of itself
    step-00000020.saving/    a save under way, or interrupted
    step-00000005.removing/  one of more than are kept, on its way out

A directory's name changes at once or not at all, so that whatever is killed when, the names that mean whole are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ascend_parallel.strategy.checkpoint.differences import CheckpointError, refuse

FORMAT = "ascend_parallel checkpoint 1"
MANIFEST = "manifest.json"
METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"step-\d{8,}\.(saving|removing)")
_BLOCK = 1 << 20


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def steps(folder: str | Path) -> list[int]:
    """Return the steps of the checkpoints of a folder that were saved wholly, rising; none if there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir())
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


def prepare(folder: Path, step: int) -> None:
    """Remove what interrupted saves left; raise `CheckpointError` if the step is saved already."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _LEFT.fullmatch(path.name):
            shutil.rmtree(path)
    target = step_folder(folder, step)
    if target.exists():
        raise CheckpointError(f"{target} is there already: remove it, or save to another folder")


def complete(saving: Path, about: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> None:
    """Write the manifest of a `.saving` directory and give it its name.

    Raises `CheckpointError` when a rank's file is not in it, as when the ranks' hosts do not share the file system.
    """
    lost = [f"{name}: {size} bytes written" for name, (size, _) in files.items() if _size(saving / name) != size]
    refuse(lost, f"{saving} is not a file system that all ranks share; not there as written")
    told = {"format": FORMAT, **about, "files": {**files, METADATA: checksum(saving / METADATA)}}
    with (saving / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({**told, "digest": _digest(told)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _sync(saving)
    saving.rename(saving.with_suffix(""))
    _sync(saving.parent)


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the `keep` last checkpoints."""
    for step in steps(folder)[: -keep if keep is not None else 0]:
        path = step_folder(folder, step)
        away = path.with_suffix(".removing")
        path.rename(away)
        shutil.rmtree(away)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest; raise `CheckpointError` if it, or the metadata, is not what was written."""
    path = checkpoint / MANIFEST
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest = told.pop("digest")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if digest != _digest(told):
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {told.get('format')!r}, this version reads {FORMAT!r}")
    verify(checkpoint, told, [METADATA])
    return {**told, "digest": digest}


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
