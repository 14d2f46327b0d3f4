"""What the commands share: consoles, and errors in one line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ascend_parallel.cli.options import UNREAD_BY
from ascend_parallel.tuning.launch.ranks import RankError

Value = TypeVar("Value")

WIDTH = 80  # of output that is not a terminal


def console(width: int = WIDTH, *, highlight: bool = True) -> Console:
    """Return a console for stdout; output that is not a terminal has `width` columns, or those of COLUMNS."""
    found = Console(highlight=highlight)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = width
    return found


def progress_console(as_json: bool) -> Console:
    """Return the console of progress lines, on stderr: silent without a terminal, and for output in JSON."""
    return Console(stderr=True, quiet=as_json)


@contextmanager
def progress_lines(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress on stderr: in the place of the last one on a terminal.

    Elsewhere, as in a log of hours, each line stays; beside JSON there is none.
    """
    console = progress_console(as_json)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda line: status.update(escape(line))
    else:
        yield lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def needs_file(option: str, file: Path, *, made: bool = False) -> None:
    """Raise `ValueError` if a file cannot be written: before the work, not after it.

    made: the command makes the folders that are missing.
    """
    parents = file.absolute().parents
    folder = next(parent for parent in parents if parent.exists()) if made else parents[0]
    if not folder.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {folder}")
    if file.is_dir():
        raise ValueError(f"{option} {file}: that is a folder; give a file")
    _needs_right(option, file, file if file.exists() else folder)


def needs_folder(option: str, folder: Path) -> None:
    """Raise `ValueError` if files cannot be written to a folder, which may be missing in one that is there."""
    if not folder.exists():
        needs_file(option, folder)
    elif not folder.is_dir():
        raise ValueError(f"{option} {folder}: that is a file; give a folder")
    else:
        _needs_right(option, folder, folder)


def _needs_right(option: str, named: Path, written: Path) -> None:
    if not os.access(written, os.W_OK):
        raise ValueError(f"{option} {named}: this user may not write to {written}")


def refuse_given(ctx: typer.Context, option: str, names: Container[str], why: str) -> None:
    """Raise `ValueError` for parameters of the command that were given, and have no meaning beside `option`."""
    given = []
    for param in ctx.command.params:
        source = None if param.name not in names else ctx.get_parameter_source(str(param.name))
        if source is not None and source.name == "COMMANDLINE":
            off = param.secondary_opts if ctx.params[str(param.name)] is False else []
            given.append((off or param.opts)[0])
    if given:
        raise ValueError(f"{option}: leave out {', '.join(given)}, {why}")


def refuse_unread(ctx: typer.Context, option: str, *others: str) -> None:
    """Raise `ValueError` for parameters that the layers of `option` do not read, by `UNREAD_BY`, and others."""
    refuse_given(ctx, option, (*UNREAD_BY[option], *others), "which it does not know")


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
    except BrokenPipeError:  # who reads the output has gone, as `head` does: the parser ends without a word
        raise
    except caught as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, RankError) else 2) from error


def needs_sharding(command: str) -> None:
    """Exit with one line if ascend_parallel.sharding cannot be imported: scipy is missing."""
    with errors(command, ImportError):
        importlib.import_module("ascend_parallel.sharding")
