"""Write a report as Markdown, made to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ascend_parallel.text import size_of
from ascend_parallel.text.tables import markdown_table

Values = dict[str, Any]


def markdown(report: Values) -> str:
    """Return the page of a report; a section that failed has its error in place of tables."""
    quick = ", `--quick`: sizes too small to judge by" if report["quick"] else ""
    lines = [
        f"# Report of {report['date']}, {report['ranks']} ranks on {report['device']}{quick}",
        "",
        f"ascend_parallel {report['version']}. Times are medians, of the slowest rank.",
    ]
    for name, section in report["sections"].items():
        lines += ["", f"## {name}", ""]
        if "error" in section:
            lines += [f"**This section failed** after {section['seconds']} s:", "", "```text", section["error"], "```"]
        elif "skipped" in section:
            lines += [f"Not measured: {section['skipped']}."]
        else:
            lines += [*TABLES.get(name, _texts)(section), "", f"{section['seconds']} s."]
    return "\n".join(lines) + "\n"


def _texts(section: Values) -> Iterator[str]:
    yield "\n\n".join(section["texts"])


def _doctor(section: Values) -> Iterator[str]:
    yield from markdown_table(["", "found"], [[each["name"], each["found"]] for each in section["findings"]])
    if "error" in section["tried"]:
        yield from ("", "**No kernel was tried**:", "", "```text", section["tried"]["error"], "```")
        return
    names, calls = ("operator", "dtype", "kernel", "chunks"), section["tried"]["calls"]
    rows = [
        [*(call[name] for name in names), f"{call['error']:.1e}", *(_yes(call[name]) for name in ("bits", "again"))]
        for call in calls
        if "refused" not in call
    ]
    yield ""
    yield from markdown_table([*names, "error against float64", "bits of `reference`", "same bits again"], rows)
    yield ""
    yield f"Rows of a rank, K, N: {_sizes(section['tried']['operand'])}. The error is a share of the largest value."
    refused = sorted({(call["kernel"], call["refused"]) for call in calls if "refused" in call})
    yield from (f"`{kernel}` refuses: {reason}." for kernel, reason in refused)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _sizes(sizes: list[int]) -> str:
    return ",".join(map(str, sizes))


def _bench(section: Values) -> Iterator[str]:
    alone = [row for mode in section["modes"].values() for row in mode["collectives"]]
    rows = [
        [row["collective"], size_of(row["bytes"]), _ms(row["seconds"], 3), f"{row['bus'] / 1e9:.3f}"]
        for row in sorted(alone, key=lambda row: (row["collective"], row["bytes"]))
    ]
    yield from markdown_table(["collective", "whole tensor", "ms", "sent by a rank, GB/s"], rows)
    yield ""
    yield "The smallest sizes show the latency. A rank sends (R - 1) / R of the tensor; twice that in an all-reduce."
    for name, mode in section["modes"].items():
        yield from ("", f"### {name}", "")
        yield f"{mode['conditions']}. In brackets: serial / it, and predicted / measured, as `auto` predicts:"
        yield ""
        yield from _passes(mode)


def _passes(mode: Values) -> Iterator[str]:
    """Yield the table of the passes; where the cost model has data of the hardware, its parts stand at the end."""
    passes = mode["passes"]
    names = list(dict.fromkeys(variant["name"] for row in passes for variant in row["variants"]))
    heads = ["layer", "pass", "M,K,N", "T_matmul", "T_comm", "serial", *names, "best"]
    if mode["hardware"] is not None:
        heads += [f"matmul, of the data of `{mode['hardware']}`", "collective"]
    rows = []
    for row in passes:
        by_name = {variant["name"]: variant for variant in row["variants"]}
        times = [_variant(by_name.get(name), row["predicted"].get(name)) for name in names]
        serial = f"{_ms(row['serial'])} ({row['predicted']['serial'] / row['serial']:.2f})"
        parts = [_ms(part) for part in (row["predicted_parts"] or {}).values()]
        place = [row["layer"], row["run"], _sizes([row["m"], row["k"], row["n"]])]
        rows.append([*place, _ms(row["matmul"]), _ms(row["comm"]), serial, *times, row["best"], *parts])
    yield from markdown_table(heads, rows)


def _variant(variant: Values | None, predicted: float | None) -> str:
    if variant is None:
        return ""
    ratio = "" if predicted is None else f"; {predicted / variant['seconds']:.2f}"
    return f"{_ms(variant['seconds'])} ({variant['speedup']:.2f}{ratio})"


def _try(section: Values) -> Iterator[str]:
    yield from ("```text", *section["lines"], "```")


def _ms(seconds: float, digits: int = 2) -> str:
    return f"{1e3 * seconds:.{digits}f}"


TABLES: dict[str, Callable[[Values], Iterator[str]]] = {"doctor": _doctor, "bench": _bench, "try": _try}
