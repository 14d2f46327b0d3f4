"""What the commands share: consoles, and errors in one line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console

from ascend_parallel.tuning.launch.ranks import RankError

Value = TypeVar("Value")


def console(width: int, *, highlight: bool = True) -> Console:
    """Return a console for stdout; output that is not a terminal has `width` columns."""
    found = Console(highlight=highlight)
    if not found.is_terminal:
        found.width = width
    return found


def progress_console(as_json: bool) -> Console:
    """Return the console of progress lines, on stderr: silent without a terminal, and for output in JSON."""
    return Console(stderr=True, quiet=as_json)


def needs_folder(option: str, file: Path) -> None:
    """Raise `ValueError` if the folder of a file to write does not exist: before the work, not after it."""
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}")


def needed(option: str, value: Value | None, instead: str) -> Value:
    """Return the value of an option; raises `ValueError` if neither it nor what `instead` reads gives one."""
    if value is None:
        raise ValueError(f"{option} is missing: give it, or {instead} with a file that has it")
    return value


@contextmanager
def errors(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Print a `ValueError`, `OSError` or one of `kinds` as one line; exit with 2, or with 1 if a rank failed."""
    caught: tuple[type[Exception], ...] = (ValueError, OSError, RankError, *kinds)
    try:
        yield
    except caught as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, RankError) else 2) from error


def needs_sharding(command: str) -> None:
    """Exit with one line if ascend_parallel.sharding cannot be imported: scipy is missing."""
    with errors(command, ImportError):
        importlib.import_module("ascend_parallel.sharding")
