"""A command, and the group of all: wrong input is an error of one line, and every command has --version.

A command's module imports what its help needs, and no torch. Its function imports the rest when it runs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ascend_parallel.text import shown

# The class of errors about the command line, which typer does not export.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    """A command that reads the settings of the environment when it runs."""

    def invoke(self, ctx: Any) -> Any:
        """Put the settings in force, and run the command; a refusal is left to the command."""
        from ascend_parallel.patch_control import CONTROL

        CONTROL.configure_once(os.environ)
        return super().invoke(ctx)


class PlainCommand(TyperCommand):
    """A command that calls no layer, and for which the settings of the environment mean nothing: it needs no torch."""


class Commands(TyperGroup):
    """A group of commands."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with the option --version of the whole."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and not any("--version" in param.opts for param in command.params):
            command.params += [
                _unexposed(param) for param in ctx.find_root().command.params if "--version" in param.opts
            ]
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, each with the whole first sentence of its help."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=200)) for name, each in commands.items()])

    def main(self, *args: Any, **named: Any) -> Any:
        """Run the command line; wrong input ends with 2 and a line that names the command and the option."""
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters, such as that of µs
            with suppress(OSError):  # a program may have put a pipe in the place of the file that it was
                sys.stdout.reconfigure(errors="replace")  # stderr escapes them by itself
        named |= zip(("args", "prog_name"), args, strict=False)
        words = list(named["args"]) if named.get("args") is not None else sys.argv[1:]
        standalone = named.pop("standalone_mode", True)
        named |= {"args": words, "standalone_mode": False}
        if not standalone:
            return super().main(**named)
        try:
            code = super().main(**named)
        except USAGE_ERROR as error:
            typer.echo(_line(error, words), err=True)
            code = 2
        except typer.Abort:
            typer.echo("aborted", err=True)
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


def _unexposed(option: Any) -> Any:
    """Return a copy of an option that the command's function does not take."""
    copied = copy(option)
    copied.expose_value = False
    return copied


def _line(error: Any, words: Sequence[str]) -> str:
    """Return an error as a line that begins with the command; the help where a command is missing altogether."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.ctx.get_help())
    message = " ".join(error.format_message().split()).rstrip(".")
    command = words[0] if error.ctx is None else error.ctx.command_path.partition(" ")[2] or error.ctx.info_name
    param = getattr(error, "param", None)
    if param is not None and type(error).__name__ == "MissingParameter" and param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
        return f"{command}: {name} is missing: {param.help.rstrip('.')}; --help shows what is allowed"
    value = _given(param, words)
    return f"{command}: {message}{value}; --help shows what is allowed"


def _given(param: Any, words: Sequence[str]) -> str:
    """Return the value that the words give an option, as the end of a message; "" if they give none."""
    for name in getattr(param, "opts", ()):
        for index, word in enumerate(words):
            if word == name and index + 1 < len(words):
                return f", not {shown(words[index + 1])}"
            if word.startswith(f"{name}="):
                return f", not {shown(word.partition('=')[2])}"
    return ""
