"""Read settings from the environment and the configuration file that it names.

No value is evaluated as code. Later changes of the environment or the file have no effect.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ascend_parallel.settings import (
    COMPILED,
    CONFIG_VARIABLE,
    KNOWN_VARIABLES,
    LOG_LEVELS,
    ROWS_TOO,
    TP,
    VARIABLES,
    Settings,
    SettingsError,
    require,
    whole_number,
)
from ascend_parallel.text import BLANKS, file_text, nearest, parse_int, toml

log = logging.getLogger("ascend_parallel")


def read_settings(
    environ: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None, **overrides: Any
) -> Settings:
    """Return the settings from `defaults`, the configuration file, the environment and `overrides`.

    `overrides` override variables, variables the file, and the file `defaults`: a variable exported for one run
    overrides the file that many runs share. Raises `SettingsError` for a bad value, an unknown key, or a file that
    cannot be read; warns of misspelt variables.
    """
    environ = os.environ if environ is None else environ
    warn_of_near_misses(environ)
    values: dict[str, Any] = dict(defaults or {})
    if CONFIG_VARIABLE in environ:
        values.update(_with_auto(read_file(environ[CONFIG_VARIABLE])))
    values.update(_with_auto(_read_variables(environ)))
    values.update(_with_auto(_known(overrides, "configure()")))
    for name in ("frameworks", "stream_limit"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return Settings(**_with_plan(values))


def read_settings_of_rank(
    environ: Mapping[str, str], defaults: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> Settings:
    """Return `read_settings`; where this is one of several ranks and cannot read COC_PLAN, with an `UnreadPlan`.

    The other ranks may have read theirs: all ranks compare what they read at their first overlapped layer, and raise
    there together. This rank logs its reason at once. A plan among the `overrides` is read as ever.
    """
    from ascend_parallel.tuning.measured.chunk_plan import PlanError, UnreadPlan  # imports operators, so not at the top

    try:
        return read_settings(environ, defaults, **overrides)
    except PlanError as error:
        ranks = dist.get_world_size() if dist.is_initialized() else parse_int(environ.get("WORLD_SIZE", "1"))
        if "plan" in overrides or ranks in (None, 1):
            raise
        log.error("%s; every rank will raise an error at its first overlapped layer", error)
        return read_settings(environ, defaults, **overrides, plan=UnreadPlan(str(error)))


def unread_plan(settings: Settings) -> SettingsError | None:
    """Return the error of the plan that `settings` could not read, for a command that reports it; or None."""
    from ascend_parallel.tuning.measured.chunk_plan import PlanError, UnreadPlan  # imports operators, so not at the top

    return PlanError(settings.plan.reason) if isinstance(settings.plan, UnreadPlan) else None


def read_file(name: str) -> dict[str, Any]:
    """Read a TOML or JSON configuration file into keyword arguments of `Settings`."""
    path = Path(name)
    parsers: dict[str, Callable[[str], Any]] = {".toml": toml, ".json": json.loads}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} is not allowed: give the path of a .toml or .json file")
    try:
        values = parse(file_text(path))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} is nested too deeply to be read") from error
    except ValueError as error:  # both parsers' errors, and text that is not UTF-8
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} must hold a table of keys, not a {type(values).__name__}")
    return _known(values, f"{CONFIG_VARIABLE}={name!r}")


def warn_of_near_misses(environ: Mapping[str, str]) -> None:
    """Warn of each unknown variable whose name resembles a variable of this package."""
    for name, meant in near_misses(environ).items():
        warnings.warn(f"the environment has {name}, which nothing reads; did you mean {meant}?", stacklevel=3)


def near_misses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return unknown variables whose names resemble a variable of this package, with the likely correct name."""
    likely = {}
    for name in environ:
        close = difflib.get_close_matches(name.upper(), KNOWN_VARIABLES, n=1, cutoff=0.85)
        if close and name not in KNOWN_VARIABLES:
            likely[name] = close[0]
    return likely


def _with_auto(values: dict[str, Any]) -> dict[str, Any]:
    """Replace ``num_chunks="auto"`` by ``auto=True``; a number of chunks cancels an "auto" from a lower source."""
    chunks = values.get("num_chunks")
    if isinstance(chunks, str) and chunks.strip(BLANKS).lower() == "auto":
        return {**values, "num_chunks": 1, "auto": True}
    return values if chunks is None else {"auto": False, **values}


def _with_plan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the path of a plan by the plan."""
    if not isinstance(values.get("plan"), str):
        return values
    from ascend_parallel.tuning.measured.chunk_plan import load_plan  # imports operators, so not at the top

    return {**values, "plan": load_plan(values["plan"])}


def _read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {name: environ[variable] for name, variable in VARIABLES.items() if variable in environ}
    return {name: _parse(VARIABLES[name], name, text) for name, text in values.items()}


def _parse(variable: str, name: str, text: str) -> Any:
    """Return the value of the field `name` from the text of its variable."""
    word, number = text.strip(BLANKS), parse_int(text)
    if name in Settings.switches():
        require(variable, text, word in ("0", "1"), "0 or 1")
        return word == "1"
    if name == "deterministic":
        require(variable, text, word.lower() in ("0", "1", TP, ROWS_TOO), "0, 1, tp or invariant")
        return word == "1" if word in ("0", "1") else word.lower()
    if name == "region":
        require(variable, text, word.lower() in ("0", "1", "auto"), "0, 1 or auto")
        return "auto" if word.lower() == "auto" else word == "1"
    if name == "compiled":
        require(variable, text, word.lower() in COMPILED, "one of " + ", ".join(COMPILED))
        return word.lower()
    if name == "frameworks":
        return tuple(dict.fromkeys(each.strip(BLANKS).lower() for each in text.split(",")))
    if name in ("plan", "tune", "timeline", "digests"):
        require(variable, text, name not in ("timeline", "digests") or text.strip() != "", "the folder to write to")
        return text
    if name == "log_level":
        require(variable, text, word.lower() in LOG_LEVELS, "debug, info, warning or error")
        return word.lower()
    if name == "num_chunks":
        return "auto" if word.lower() == "auto" else whole_number(variable, text if number is None else number)
    least, most, what = Settings.NUMBERS[name]
    require(variable, text, number is not None and least <= number <= most, what)
    return number


def _known(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(Settings)]
    for name in values:
        if name not in names:
            raise SettingsError(
                f"{place} has the unknown key {name!r}{nearest(name, names)} Known keys: {', '.join(names)}"
            )
    return dict(values)
