"""Replace numbers of a hardware file by measured numbers, and write them as a new hardware file."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.tables import Sourced, require

# Field of Calibration -> the hardware number that the field replaces.
NUMBERS = {
    "macs_per_second": "matmul.frequency",
    "link_rate": "link.rate",
    "link_efficiency": "link.efficiency",
    "processor": "link.processor",
    "all_reduce": "collectives.all_reduce",
    "all_gather": "collectives.all_gather",
    "reduce_scatter": "collectives.reduce_scatter",
    "whole_gather": "collectives.whole_gather",
    "launch": "host.launch",
    "memory_bandwidth": "memory.bandwidth",
}
FIXED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Numbers measured on one machine; None keeps the number of the hardware file.

    measured           where and how the numbers were measured, in a few words; their source
    macs_per_second    multiply-adds of one rank's matmul, in the dtype measured
    link_rate          bits a second of a rank's link
    link_efficiency    payload share of these bits
    processor          processor seconds per byte moved, which the rank's matmuls lose
    all_reduce, all_gather, reduce_scatter
                       seconds of the smallest collective
    whole_gather       factor on the wire time of an all-gather in one piece
    launch             host seconds per matmul or collective issued
    memory_bandwidth   bytes a second
    """

    measured: str
    macs_per_second: float | None = None
    link_rate: float | None = None
    link_efficiency: float | None = None
    processor: float | None = None
    all_reduce: float | None = None
    all_gather: float | None = None
    reduce_scatter: float | None = None
    whole_gather: float | None = None
    launch: float | None = None
    memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        """Refuse negative numbers and shares above 1."""
        for name, value in self.numbers().items():
            require(f"calibration: {name}", value, value >= 0, "0 or more")
        efficiency = self.link_efficiency
        require("calibration: link_efficiency", efficiency, efficiency is None or efficiency <= 1, "at most 1")

    def numbers(self) -> dict[str, float]:
        """Return the measured numbers by field."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "measured"}
        return {name: value for name, value in values.items() if value is not None}

    def apply(self, hardware: Hardware) -> Hardware:
        """Return `hardware` with the measured numbers; `hardware` needs a [link], as cpu-gloo has."""
        require(
            "calibration: hardware",
            hardware.name,
            hardware.link is not None,
            "hardware with a [link], such as cpu-gloo",
        )
        tables: dict[str, dict[str, Any]] = {}
        numbers = dict(hardware.numbers)
        for name, value in self.numbers().items():
            table, key = NUMBERS[name].split(".")
            number = ((float("inf"), value, 0.0, 0.0),) if name in FIXED else value
            tables.setdefault(table, {})[key] = number
            numbers[NUMBERS[name]] = Sourced(number, self.measured, "")
        changed = {table: replace(getattr(hardware, table), **values) for table, values in tables.items()}
        result = replace(hardware, **changed, numbers=numbers)
        assert result.link is not None
        return replace(result, network=replace(result.network, bandwidth=1 / result.link.seconds_per_byte))

    def write(self, path: Path, base: str = "cpu-gloo") -> None:
        """Write a hardware file on top of `base`, for ``predict --hardware-file``."""
        tables: dict[str, list[str]] = {}
        for name, value in self.numbers().items():
            table, key = NUMBERS[name].split(".")
            number = f"[[inf, {value!r}, 0.0, 0.0]]" if name in FIXED else repr(value)
            tables.setdefault(table, []).append(f'{key} = {{ value = {number}, source = "calibration" }}')
        words = self.measured.replace("\\", "\\\\").replace('"', '\\"')
        lines = [f'base = "{base}"', f'name = "{base}, calibrated"', "", "[sources]", f'calibration = "{words}"']
        for table, entries in tables.items():
            lines += ["", f"[{table}]", *entries]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
