"""Remove what names a machine or a person from texts: paths, addresses, host names and user names."""

from __future__ import annotations

import getpass
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")
HOST_VARIABLES = ("HOSTNAME", "HOST", "COMPUTERNAME", "MASTER_ADDR", "SLURMD_NODENAME")
LEAST_NAME = 3  # a shorter name occurs in ordinary words
LEAST_VALUE = 6  # of a variable, in a text that may quote it
QUOTING = ("error", "said", "log", "lines")  # keys of texts that may quote any variable: errors, lines of a log
BAD = "bad"  # the verdict of a finding of doctor
LAST_LINES = 3  # of what each rank printed, in an error
PATTERNS = (
    (re.compile(r"\b[a-zA-Z][\w+.-]*://\S+"), "<url>"),
    (re.compile(r"[\w.+-]+@[\w.-]+"), "<address>"),
    (re.compile(r"(?<![\w/.])[~.]{0,2}/(?=[\w.~])[^\s:;,'\"()\[\]<>]*"), "<path>"),
    (re.compile(r"\b[A-Za-z]:\\[^\s:;,'\"]*"), "<path>"),
    (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])|(?<![\w:])::1\b"), "<address>"),
)


@dataclass(frozen=True)
class Redaction:
    """What stands in place of names.

    names: pairs of a pattern and what stands in its place. values: of environment variables, removed from `QUOTING`.
    """

    names: tuple[tuple[re.Pattern[str], str], ...]
    values: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Redaction:
        """Return the redaction of this machine, of its user and of the variables of an environment."""
        found = [(name, "<user>") for name in _users(environment)] + [(name, "<host>") for name in _hosts(environment)]
        found.sort(key=lambda pair: -len(pair[0]))  # a name may be a part of a longer one
        names = tuple((_whole_word(name), instead) for name, instead in found if len(name) >= LEAST_NAME)
        values = sorted({value for value in environment.values() if len(value) >= LEAST_VALUE}, key=len, reverse=True)
        return cls(names, tuple(values))

    def text(self, text: str) -> str:
        """Return a text without paths, addresses and names."""
        for pattern, instead in (*PATTERNS, *self.names):
            text = pattern.sub(instead, text)
        return text

    def quoting(self, values: Any) -> Any:
        """Return a text, or texts, that may quote any variable, also without the values of variables."""
        if isinstance(values, list | tuple):
            return [self.quoting(value) for value in values]
        if not isinstance(values, str):
            return values
        text = _shortened(values)
        for value in self.values:
            text = text.replace(value, "<value>")
        return self.text(text)

    def everywhere(self, values: Any) -> Any:
        """Return values for JSON without names in any string; keys are this package's own words."""
        if isinstance(values, str):
            return self.text(values)
        if isinstance(values, Mapping):
            quoting = QUOTING if values.get("verdict") != BAD else (*QUOTING, "found")
            return {
                key: self.quoting(value) if key in quoting else self.everywhere(value) for key, value in values.items()
            }
        if isinstance(values, list | tuple):
            return [self.everywhere(value) for value in values]
        return values


def _shortened(error: str) -> str:
    """Return the error of a process with the last lines of what each rank printed, instead of whole tracebacks."""
    first, *ranks = error.split("\n---- ")
    return "\n".join([first, *(f"---- {_ends(text.splitlines())}" for text in ranks)])


def _ends(lines: list[str]) -> str:
    return "\n".join([*lines[:1], *lines[1:][-LAST_LINES:]])


def _whole_word(name: str) -> re.Pattern[str]:
    """Return the pattern of a name, with the domain that may follow a host's name."""
    return re.compile(rf"(?<![a-zA-Z0-9]){re.escape(name)}(?![a-zA-Z0-9])(?:\.[a-zA-Z][\w-]*)*", re.IGNORECASE)


def _users(environment: Mapping[str, str]) -> Iterator[str]:
    yield from (environment[name] for name in USER_VARIABLES if environment.get(name))
    yield Path(environment.get("HOME", "")).name
    try:
        yield getpass.getuser()
    except (KeyError, OSError):  # a container's user need not be in the list of users
        return


def _hosts(environment: Mapping[str, str]) -> Iterator[str]:
    for name in (
        *(environment.get(variable, "") for variable in HOST_VARIABLES),
        socket.gethostname(),
        platform.node(),
    ):
        if name not in ("", "localhost", "127.0.0.1"):
            yield name
            yield name.partition(".")[0]
