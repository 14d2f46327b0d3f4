"""Hardware as data: costs of matmuls, collectives and the host, from TOML files with a source for every number.

The files are in data/hardware/; a file whose name begins with an underscore is a base of other files. Units are
seconds, bytes and multiply-adds. docs/predict.md says how the numbers enter the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from math import isnan
from pathlib import Path
from statistics import NormalDist
from typing import Any

from ascend_parallel.devices import DEVICES, NPU
from ascend_parallel.text import bits_per_second
from ascend_parallel.tuning.cost_model.tables import (
    PlanningError,
    SourcedValue,
    lookup,
    merged,
    parse_toml,
    read_text,
    require,
    sourced_numbers,
)

# The hardware of every prediction and plan, in Python and of the commands, if none is named.
DEFAULT_HARDWARE = NPU.hardware
TOPOLOGIES = ("mesh", "ring")
MOST_BITS = 1e15
Steps = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class MatmulUnit:
    """The matmul unit: `cores` cores, each with `macs_per_cycle * frequency` multiply-adds per second.

    variation: the standard deviation of the cards' speeds, as a share of their mean.
    """

    macs_per_cycle: float
    frequency: float
    cores: int
    block_m: int
    block_n: int
    utilisation: Steps
    k_multiple: int
    k_unaligned: float
    share_32_bit: float
    launch: float
    variation: float = 0.0

    def __post_init__(self) -> None:
        """Refuse steps whose last limit is not inf."""
        _check_steps("matmul.utilisation", self.utilisation, 2)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Device memory: peak bytes per second, the share that kernels reach, and capacity in bytes (0: unknown)."""

    bandwidth: float
    efficiency: float
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The share of the matmul peak that a fused attention kernel reaches.

    Heads smaller than `least_head` take as long as heads of this size: the softmax sets the pace.
    """

    utilisation: float
    least_head: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Times of collectives of `fitted_ranks` ranks by the bytes of the whole tensor.

    A step is (limit in bytes, seconds, seconds per byte, seconds per byte squared). An all-gather or reduce-scatter
    without steps takes `gather_share` of an all-reduce. `whole_gather` multiplies the wire time of an all-gather in one
    piece.
    """

    fitted_ranks: int
    domain: int
    all_reduce: Steps
    all_gather: Steps = ()
    reduce_scatter: Steps = ()
    gather_share: float = 1.0
    whole_gather: float = 1.0

    def __post_init__(self) -> None:
        """Refuse steps whose last limit is not inf."""
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            if name == "all_reduce" or getattr(self, name):
                _check_steps(f"collectives.{name}", getattr(self, name), 4)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of each rank: bits per second, the payload share, and processor seconds per byte moved."""

    rate: float
    efficiency: float
    processor: float

    @property
    def seconds_per_byte(self) -> float:
        """Seconds of one byte on the wire, or in the processor if the processor is slower."""
        return max(8 / (self.rate * self.efficiency), self.processor)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between domains: bytes per second of each rank, and seconds per step."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Slowdown factors: of a collective beside a matmul, of a matmul beside a collective."""

    collective: float
    compute: float


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host seconds per launch; inline: the computing thread issues the launch, so the seconds add to its time."""

    launch: float
    inline: int = 0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of rank, and how the ranks are connected."""

    name: str
    title: str
    device: str
    dtype: str
    topology: str
    matmul: MatmulUnit
    memory: Memory
    attention: Attention
    collectives: Collectives
    network: Network
    contention: Contention
    host: Host
    link: Link | None = None
    aliases: tuple[str, ...] = ()
    numbers: Mapping[str, SourcedValue] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a type of device that is not known."""
        require("device", self.device, self.device in DEVICES, " or ".join(DEVICES))

    def with_link(self, rate: str) -> Hardware:
        """Return this hardware with links of `rate`, such as ``1gbit``; raises `PlanningError` if it has no [link]."""
        if self.link is None:
            raise PlanningError(f"--link={rate!r} is not allowed with {self.name}: its links are part of its data")
        bits = bits_per_second(rate) or 0.0
        require("--link", rate, 0 < bits <= MOST_BITS, "a rate up to 1000000gbit, such as 500mbit, 1gbit or 10gbit")
        link = replace(self.link, rate=bits)
        return replace(self, link=link, network=replace(self.network, bandwidth=1 / link.seconds_per_byte))

    def of_slowest(self, ranks: int) -> Hardware:
        """Return the hardware of the slowest of so many ranks, which the others wait for: its cores are slower."""
        slower = 1 + self.matmul.variation * expected_maximum(ranks)
        return replace(self, matmul=replace(self.matmul, frequency=self.matmul.frequency / slower))

    def with_launch(self, seconds: float) -> Hardware:
        """Return this hardware with another host time per launch."""
        require("--launch-us", seconds * 1e6, 0 <= seconds <= 1, "microseconds from 0 to 1000000")
        return replace(self, host=replace(self.host, launch=seconds))


def expected_maximum(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers (Blom 1958; within 0.03)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


TABLES: dict[str, type[Any]] = {
    "matmul": MatmulUnit,
    "memory": Memory,
    "attention": Attention,
    "collectives": Collectives,
    "network": Network,
    "contention": Contention,
    "host": Host,
    "link": Link,
}


@lru_cache(maxsize=1)
def all_hardware() -> Mapping[str, Hardware]:
    """Return the hardware of every file of the package, by name."""
    texts = _texts()
    return {name: _hardware(texts[name], name, texts) for name in sorted(texts) if not name.startswith("_")}


def find_hardware(name: str | Hardware) -> Hardware:
    """Return the hardware of a name or alias, or of a user's file (`read_hardware`) if the name ends in ``.toml``.

    A relative path counts from the working directory. Raises `PlanningError` with the known names and the nearest.
    """
    if isinstance(name, Hardware):
        return name
    if name.endswith(".toml"):
        return read_hardware(Path(name))
    known = dict(all_hardware())
    for hardware in all_hardware().values():
        known.update(dict.fromkeys(hardware.aliases, hardware))
    result: Hardware = lookup("hardware", name, known)
    return result


def read_hardware(path: Path) -> Hardware:
    """Read a user's hardware file, which may build on a file of the package (``base = "ascend-910b2"``)."""
    text = read_text(path, str(path))
    try:
        return _hardware(text, str(path), _texts())
    except (AttributeError, TypeError) as error:
        raise PlanningError(f"{path}: a value has the wrong type: {error}") from error


def _texts() -> dict[str, str]:
    """Return the texts of the package's files by file name without ``.toml``."""
    folder = resources.files("ascend_parallel.tuning.cost_model") / "data" / "hardware"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in files}


def _hardware(text: str, place: str, bases: Mapping[str, str]) -> Hardware:
    values = parse_toml(text, place)
    while "base" in values:
        base = values.pop("base")
        values = merged(parse_toml(lookup(f"{place}: base", base, bases), base), values)
    sources = values.pop("sources", {})
    words = {key: values.pop(key) for key in list(values) if not isinstance(values[key], Mapping)}
    unknown = [key for key in values if key not in TABLES]
    require(f"{place}: table", unknown, not unknown, f"only {', '.join(TABLES)}")
    require(f"{place}: topology", words.get("topology"), words.get("topology") in TOPOLOGIES, " or ".join(TOPOLOGIES))
    numbers = sourced_numbers(values, sources, place)
    words["aliases"] = tuple(words.get("aliases", ()))
    tables = {table: _table(table, entries, place) for table, entries in values.items()}
    try:
        return Hardware(**words, **tables, numbers=numbers)
    except TypeError as error:
        raise PlanningError(f"{place}: {str(error).replace('Hardware.__init__()', 'the file')}") from error


def _table(table: str, entries: Mapping[str, Any], place: str) -> Any:
    values = {key: _frozen(entry["value"]) for key, entry in entries.items()}
    for key, value in values.items():
        fits = _is_number(value) and value >= 0
        fits = fits or (isinstance(value, tuple) and all(isinstance(step, tuple) for step in value))
        require(f"{place}: {table}.{key}", value, fits, "a number of 0 or more, or a list of steps")
    try:
        return TABLES[table](**values)
    except TypeError as error:
        raise PlanningError(f"{place}: {str(error).replace('__init__()', f'[{table}]')}") from error


def _check_steps(name: str, steps: Steps, width: int) -> None:
    limits = [step[0] for step in steps if len(step) == width and all(map(_is_number, step))]
    fits = len(limits) == len(steps) > 0 and limits == sorted(limits) and limits[-1] == float("inf")
    require(name, steps, fits, f"steps of {width} numbers, by rising limits, the last of them inf")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not isnan(value)


def _frozen(value: Any) -> Any:
    """Return lists as tuples, so that hardware can be compared and hashed."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
