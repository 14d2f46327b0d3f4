"""Write a report as Markdown, made to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
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
        f"ascend_parallel {report['version']}, `ascend-parallel report`. Times are medians, of the slowest rank.",
    ]
    for name, section in report["sections"].items():
        lines += ["", f"## {TITLES[name]}", ""]
        if "error" in section:
            lines += [f"**This section failed** after {section['seconds']} s:", "", "```text", section["error"], "```"]
        elif "skipped" in section:
            lines += [f"Not measured: {section['skipped']}."]
        else:
            lines += [*TABLES[name](section), "", f"{section['seconds']} s."]
    return "\n".join(lines) + "\n"


def _versions(section: Values) -> Iterator[str]:
    rows = [[name, found] for part in ("versions", "devices", "kernels") for name, found in section[part].items()]
    rows += [["commit", section["commit"] or "not a checkout"], *section["machine"].items()]
    yield from markdown_table(["", "found"], rows)


def _links(section: Values) -> Iterator[str]:
    rows = [
        [row["collective"], size_of(row["bytes"]), _ms(row["seconds"], 3), f"{row['bus'] / 1e9:.3f}"]
        for row in section["collectives"]
    ]
    yield from markdown_table(["collective", "whole tensor", "ms", "sent by a rank, GB/s"], rows)
    yield ""
    yield "The smallest size is the latency. A rank sends (R - 1) / R of the tensor; twice that in an all-reduce."


def _operators(section: Values) -> Iterator[str]:
    ran = [row for row in section["kernels"] if "refused" not in row]
    names = ("operator", "dtype", "kernel", "chunks")
    rows = [
        [*(row[name] for name in names), f"{row['error']:.1e}", *(_yes(row[name]) for name in ("bits", "again"))]
        for row in ran
    ]
    heads = ["operator", "dtype", "kernel", "chunks", "error against float64", "bits of `reference`", "same bits again"]
    yield from markdown_table(heads, rows)
    yield ""
    yield f"Rows of a rank, K, N: {', '.join(map(str, section['operand']))}. The error is a share of the largest value."
    refused = {(row["kernel"], row["refused"]) for row in section["kernels"] if "refused" in row}
    yield from (f"`{kernel}` refuses: {reason}." for kernel, reason in sorted(refused))
    yield f"Exchange of experts, uneven, in 2 groups: {section['experts']}."


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _bench(section: Values) -> Iterator[str]:
    passes, names = section["passes"], []
    for row in passes:
        names += [variant["name"] for variant in row["variants"] if variant["name"] not in names]
    heads = ["layer", "pass", "M,K,N", "T_matmul", "T_comm", "serial", *names, "best"]
    rows = []
    for row in passes:
        by_name = {variant["name"]: variant for variant in row["variants"]}
        times = [_variant(by_name.get(name)) for name in names]
        shape = f"{row['m']},{row['k']},{row['n']}"
        parts = [_ms(row[name]) for name in ("matmul", "comm", "serial")]
        rows.append([row["layer"], row["run"], shape, *parts, *times, row["best"]])
    yield f"{section['dtype']}, {section['rounds']} rounds; ms, and serial / variant in brackets:"
    yield ""
    yield from markdown_table(heads, rows)
    yield ""
    yield from _predictions(section)


def _variant(variant: Values | None) -> str:
    return "" if variant is None else f"{_ms(variant['seconds'])} ({variant['speedup']:.2f})"


def _predictions(section: Values) -> Iterator[str]:
    """Write predicted / measured of each variant, and of matmul and collective where the hardware is known."""
    yield "Predicted / measured, from the matmul and the collective timed alone (the model of `auto`):"
    yield ""
    rows = []
    for row in section["passes"]:
        measured = {"serial": row["serial"], **{each["name"]: each["seconds"] for each in row["variants"]}}
        ratios = {name: row["predicted"][name] / measured[name] for name in row["predicted"] if name in measured}
        cells = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        none = ", ".join(name for name in measured if name not in ratios)
        rows.append([row["layer"], row["run"], f"{row['m']},{row['k']},{row['n']}", cells, none])
    yield from markdown_table(["layer", "pass", "M,K,N", "predicted / measured", "no prediction"], rows)
    yield ""
    if section["hardware"] is None:
        yield "From the data of a hardware: no prediction, the cost model has none of this device."
        return
    yield f"Predicted / measured from the data of `{section['hardware']}`, which know nothing of this machine:"
    yield ""
    known = [
        [
            f"{row['layer']} {row['run']} {row['m']},{row['k']},{row['n']}",
            *(f"{_ms(row['predicted_parts'][part])} / {_ms(row['parts'][part])}" for part in ("matmul", "collective")),
        ]
        for row in section["passes"]
    ]
    yield from markdown_table(["pass", "matmul, ms", "collective, ms"], known)


def _step(section: Values) -> Iterator[str]:
    model = section["model"]
    yield (
        f"A Llama of transformers {section['transformers']} with its `tp_plan`: {model['layers']} layers, hidden "
        f"{model['hidden']}, {model['tokens']} tokens; forward, backward and AdamW, in turn:"
    )
    yield ""
    plain = section["times"]["plain"]
    rows = []
    for name, times in section["times"].items():
        ratio = median(theirs / ours for theirs, ours in zip(plain, times, strict=True))
        losses = section["losses"][name]
        apart = max(abs(own - theirs) for own, theirs in zip(losses, section["losses"]["plain"], strict=True))
        rows.append(
            [name, _ms(median(times)), f"{ratio:.3f}", ", ".join(f"{loss:.6f}" for loss in losses), f"{apart:g}"]
        )
    heads = ["", "step, ms", "plain / variant", "losses of 3 steps", "largest difference from plain"]
    yield from markdown_table(heads, rows)
    yield ""
    calls = ", ".join(
        f"{counts['calls']} of {operator} in {counts['chunks']} chunks"
        for operator, counts in section["counts"].items()
    )
    yield f"Calls of a step in chunks: {calls or 'none, so the rows above compare nothing'}."


def _ms(seconds: float, digits: int = 2) -> str:
    return f"{1e3 * seconds:.{digits}f}"


TITLES = {
    "versions": "Versions and devices",
    "links": "Links",
    "operators": "Operators",
    "bench": "Layers, predicted and measured",
    "step": "Training steps",
}
TABLES: dict[str, Callable[[Values], Iterator[str]]] = {
    "versions": _versions,
    "links": _links,
    "operators": _operators,
    "bench": _bench,
    "step": _step,
}
