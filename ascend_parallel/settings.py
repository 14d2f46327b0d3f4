"""What the user asked for: one frozen value, read once from the environment and an optional file.

The published switches (MindSpeed, "Communication Over Computation") keep their names: the
environment variables COC_PARALLEL_NUM, USE_COC_FUSED_KERNEL and COC_MODE, and the keys of
``coc_cfgs``, which here stand in a TOML or JSON file named by COC_CONFIG. Nothing is evaluated as
code, and nothing is read after the value has been made.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_CHUNKS = 64
ORDERS = ("auto", "compute_first", "communicate_first")
MODES = (-1, 0, 1, 2)

# Field of Settings -> environment variable that sets it.
VARIABLES = {"num_chunks": "COC_PARALLEL_NUM", "fused": "USE_COC_FUSED_KERNEL", "mode": "COC_MODE"}
CONFIG_VARIABLE = "COC_CONFIG"
KNOWN_VARIABLES = (*VARIABLES.values(), CONFIG_VARIABLE)

Shape = tuple[int, int, int]


class SettingsError(ValueError):
    """A setting that is not allowed; the message names the option, its value and what is allowed."""


class ShapeTable(Mapping[Shape, int]):
    """Chunk counts by matmul shape ``(m, k, n)``: an immutable, hashable mapping."""

    def __init__(self, entries: Mapping[Any, Any] | None = None) -> None:
        """Check every entry; keys are triples or the published strings such as ``"[16384, 5120, 1920]"``."""
        checked = {_shape_key(key): _whole_number(f"customized_coc[{key!r}]", value) for key, value in _items(entries)}
        self._entries = tuple(sorted(checked.items()))

    def __getitem__(self, key: Shape) -> int:
        """Return the chunk count of one shape."""
        return dict(self._entries)[key]

    def __iter__(self) -> Iterator[Shape]:
        """Walk over the shapes in order."""
        return (key for key, _ in self._entries)

    def __len__(self) -> int:
        """Return how many shapes have a chunk count of their own."""
        return len(self._entries)

    def __hash__(self) -> int:
        """Hash the entries, so that a choice made from them can be remembered."""
        return hash(self._entries)

    def __eq__(self, other: object) -> bool:
        """Compare as mappings do."""
        return isinstance(other, Mapping) and dict(self._entries) == dict(other)

    def __repr__(self) -> str:
        """Show the entries as the published dictionary would."""
        return repr({str(list(key)): value for key, value in self._entries})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides how a linear layer runs; the same on every rank of a group.

    num_chunks
        How many chunks a matmul next to a collective is cut into, 1 (off) to 64. COC_PARALLEL_NUM.
    fused
        Prefer a fused operator; wins over ``num_chunks``. USE_COC_FUSED_KERNEL.
    mode
        0 the original layers, 1 our autograd functions without chunks (to debug), 2 overlapped,
        -1 chooses 0 or 2 by the two settings above. COC_MODE.
    matmul_soc_friendly, k_min, k_max
        Bring matmul operands to 512-byte rows on Ascend; ``k_min <= K <= k_max`` is the window, in
        elements of K, in which padding is worth it.
    customized_coc
        Chunk counts for single matmul shapes ``(m, k, n)``; m is the gathered M where the layer gathers.
    enable_coc_in_column_backward
        Fused operators also in the column layer's backward; of no effect before a fused operator exists.
    recompute_all_gather
        Gather the column layer's input again in backward instead of keeping the gathered copy.
    order
        Which of two independent steps a path starts first where it allows either (the column layer's
        sequence-parallel backward): the input gradient, or the gather. "auto" is "communicate_first".

    Source of names and meaning: MindSpeed, communication-over-computation.md.
    """

    num_chunks: int = 1
    fused: bool = False
    mode: int = -1
    matmul_soc_friendly: bool = True
    customized_coc: Mapping[Shape, int] = field(default_factory=ShapeTable)
    enable_coc_in_column_backward: bool = False
    recompute_all_gather: bool = True
    k_min: int = 1024
    k_max: int = 4096
    order: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what is not allowed with a `SettingsError`."""
        _whole_number("num_chunks", self.num_chunks)
        for name in ("fused", "matmul_soc_friendly", "enable_coc_in_column_backward", "recompute_all_gather"):
            _require(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        _require("mode", self.mode, type(self.mode) is int and self.mode in MODES, "-1, 0, 1 or 2")
        _require("order", self.order, self.order in ORDERS, "one of " + ", ".join(ORDERS))
        for name in ("k_min", "k_max"):
            value = getattr(self, name)
            _require(name, value, type(value) is int and value >= 1, "a whole number of elements, 1 or more")
        _require("k_min", self.k_min, self.k_min <= self.k_max, f"at most k_max ({self.k_max})")
        if not isinstance(self.customized_coc, ShapeTable):
            object.__setattr__(self, "customized_coc", ShapeTable(self.customized_coc))

    @property
    def effective_mode(self) -> int:
        """0, 1 or 2: what -1 comes to."""
        if self.mode != -1:
            return self.mode
        return 2 if self.fused or self.num_chunks > 1 else 0

    @property
    def enabled(self) -> bool:
        """Whether any layer is to be replaced."""
        return self.effective_mode != 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values under the names a configuration file uses."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["customized_coc"] = {str(list(key)): chunks for key, chunks in self.customized_coc.items()}
        return values


def read_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Make the settings from the environment, the file it names, and `overrides`, later ones winning.

    File below variables below `overrides`: a variable exported for one run beats the file that many
    runs share. Raises `SettingsError` for a bad value, an unknown key, or a file that cannot be read;
    warns of variables whose name nearly is one of ours.
    """
    environ = os.environ if environ is None else environ
    warn_of_near_misses(environ)
    values: dict[str, Any] = {}
    if CONFIG_VARIABLE in environ:
        values.update(read_file(environ[CONFIG_VARIABLE]))
    values.update(_read_variables(environ))
    values.update(_known(overrides, "configure()"))
    return Settings(**values)


def read_file(name: str) -> dict[str, Any]:
    """Read a TOML or JSON configuration file into keyword arguments of `Settings`."""
    path = Path(name)
    parsers: dict[str, Callable[[str], Any]] = {".toml": _parse_toml, ".json": json.loads}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} is not allowed: give the path of a .toml or .json file")
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # both parsers' errors, and text that is not UTF-8
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{CONFIG_VARIABLE}={name!r} must hold a table of keys, not a {type(values).__name__}")
    return _known(values, f"{CONFIG_VARIABLE}={name!r}")


def warn_of_near_misses(environ: Mapping[str, str]) -> None:
    """Warn of each variable that is not ours but looks like a misspelt one of ours."""
    for name, meant in near_misses(environ).items():
        warnings.warn(f"the environment has {name}, which nothing reads; did you mean {meant}?", stacklevel=3)


def near_misses(environ: Mapping[str, str]) -> dict[str, str]:
    """Map each variable whose name nearly is one of ours to the one that was likely meant."""
    found = {}
    for name in environ:
        close = difflib.get_close_matches(name.upper(), KNOWN_VARIABLES, n=1, cutoff=0.85)
        if close and name not in KNOWN_VARIABLES:
            found[name] = close[0]
    return found


def option_name(field_name: str) -> str:
    """Name an option as the user would set it: the variable where there is one, else the key."""
    return VARIABLES.get(field_name, field_name)


def _read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if (text := environ.get(VARIABLES["num_chunks"])) is not None:
        values["num_chunks"] = _whole_number(VARIABLES["num_chunks"], int(text) if _is_integer(text) else text)
    if (text := environ.get(VARIABLES["fused"])) is not None:
        _require(VARIABLES["fused"], text, text.strip() in ("0", "1"), "0 or 1")
        values["fused"] = text.strip() == "1"
    if (text := environ.get(VARIABLES["mode"])) is not None:
        allowed = _is_integer(text) and int(text) in MODES
        _require(
            VARIABLES["mode"], text, allowed, "-1 (the other two decide), 0 (original), 1 (no chunks) or 2 (overlapped)"
        )
        values["mode"] = int(text)
    return values


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text) is not None


def _known(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(Settings)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}" if close else ""
            raise SettingsError(f"{place} has the unknown key {name!r}{hint}? Known keys: {', '.join(names)}")
    return dict(values)


def _require(option: str, value: object, allowed: bool, what: str) -> None:
    if not allowed:
        raise SettingsError(f"{option}={value!r} is not allowed: give {what}")


def _whole_number(option: str, value: object) -> int:
    allowed = type(value) is int and 1 <= value <= MAX_CHUNKS
    _require(option, value, allowed, f"a whole number of chunks from 1 (off) to {MAX_CHUNKS}, such as 1, 2, 4 or 8")
    assert isinstance(value, int)
    return value


def _items(entries: object) -> list[tuple[Any, Any]]:
    if entries is None:
        return []
    if not isinstance(entries, Mapping):
        what = 'a table of shapes and chunk counts such as {"[16384, 5120, 1920]": 8}'
        raise SettingsError(f"customized_coc={entries!r} is not allowed: give {what}")
    return list(entries.items())


def _shape_key(key: object) -> Shape:
    shape = key
    if isinstance(key, str):
        try:
            shape = json.loads(key)
        except ValueError:
            shape = None
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise SettingsError(f'customized_coc key {key!r} is not allowed: give "[m, k, n]", three whole numbers above 0')
    return sizes[0], sizes[1], sizes[2]


def _parse_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
