"""Measured numbers in place of a file's: what a tuning step fills in, and keeps as a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.tables import Sourced, require

# Field of Calibration -> the number of the hardware it replaces.
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
    """What was measured on one machine; None keeps the file's number.

    measured           where and how, in a few words: the source of every number here
    macs_per_second    multiply-adds of one rank's matmul, in the dtype measured
    link_rate          bits a second of a rank's link
    link_efficiency    share of them that is payload
    processor          processor seconds a rank spends per byte it moves, which its matmuls lack
    all_reduce, all_gather, reduce_scatter
                       seconds of the smallest collective
    whole_gather       factor on the wire's time of an all-gather in one piece
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
        """Return what was measured, by field."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "measured"}
        return {name: value for name, value in values.items() if value is not None}

    def apply(self, hardware: Hardware) -> Hardware:
        """Return `hardware`, one with links such as cpu-gloo, with the measured numbers and their source."""
        require(
            "calibration: hardware", hardware.name, hardware.link is not None, "hardware with a [link], as cpu-gloo"
        )
        tables: dict[str, dict[str, Any]] = {}
        numbers = dict(hardware.numbers)
        for name, value in self.numbers().items():
            table, key = NUMBERS[name].split(".")
            kept = ((float("inf"), value, 0.0, 0.0),) if name in FIXED else value
            tables.setdefault(table, {})[key] = kept
            numbers[NUMBERS[name]] = Sourced(kept, self.measured, "")
        changed = {table: replace(getattr(hardware, table), **values) for table, values in tables.items()}
        result = replace(hardware, **changed, numbers=numbers)
        assert result.link is not None
        return replace(result, network=replace(result.network, bandwidth=1 / result.link.seconds_per_byte))

    def write(self, path: Path, base: str = "cpu-gloo") -> None:
        """Write a hardware file that builds on `base`: what ``predict --hardware-file`` reads."""
        tables: dict[str, list[str]] = {}
        for name, value in self.numbers().items():
            table, key = NUMBERS[name].split(".")
            kept = f"[[inf, {value!r}, 0.0, 0.0]]" if name in FIXED else repr(value)
            tables.setdefault(table, []).append(f'{key} = {{ value = {kept}, source = "calibration" }}')
        words = self.measured.replace("\\", "\\\\").replace('"', '\\"')
        lines = [f'base = "{base}"', f'name = "{base}, calibrated"', "", "[sources]", f'calibration = "{words}"']
        for table, entries in tables.items():
            lines += ["", f"[{table}]", *entries]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
