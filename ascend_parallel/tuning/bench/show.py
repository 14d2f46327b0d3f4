"""Print and draw the figures of `bench`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ascend_parallel.tuning.bench.results import Row


def show(rows: list[Row], conditions: str, console: Console, *, every: bool = False, kept: bool = False) -> None:
    """Print a table with one line per pass: the best variant.

    every
        Print one line per variant instead.
    kept
        Add a column with the number of chunks in the plan. This number may differ from the best variant: a second
        comparison of fewer variants decides the plan, and a small gain is enough in that comparison.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "pass", "[M, K] x [K, N]"):
        table.add_column(column)
    for column in ("T_matmul", "T_comm", "bound", "serial", "best", "ms", "speedup", "95 %", "E_bound"):
        table.add_column(column, justify="right")
    if kept:
        table.add_column("kept", justify="right")
    for row in rows:
        best = row.best
        last = [f"{len(row.kept)} chunks" if len(row.kept) > 1 else "serial"] if kept else []
        variants = row.variants if every else [best] if best else []
        head = [row.layer, row.run, f"{row.m},{row.k},{row.n}"]
        head += [f"{1e3 * value:.2f}" for value in (row.matmul, row.comm, row.bound, row.serial)]
        if not variants:
            table.add_row(*head, "serial", f"{1e3 * row.serial:.2f}", "1.00", "", "", *last)
        for variant in variants:
            between = f"{variant.low:.2f}-{variant.high:.2f}"
            e_bound = "" if variant.e_bound is None else f"{variant.e_bound:.2f}"
            figures = [f"{1e3 * variant.seconds:.2f}", f"{variant.speedup:.2f}", between, e_bound]
            table.add_row(*head, variant.name, *figures, *last)
    console.print(table)
    console.print(conditions, markup=False, highlight=False)


def plot(rows: list[Row], conditions: str, path: Path) -> None:
    """Draw one bar per pass and variant, and the bound; the suffix of `path` is the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.5 * len(rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(["serial", *(variant.name for row in rows for variant in row.variants)]))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        values = [
            row.serial if name == "serial" else next((v.seconds for v in row.variants if v.name == name), float("nan"))
            for row in rows
        ]
        colour = "0.6" if name == "serial" else None
        offsets = [index + (place + 0.5) * width - 0.4 for index in range(len(rows))]
        axes.bar(offsets, [1e3 * value for value in values], width, label=name, color=colour)
    for index, row in enumerate(rows):
        axes.hlines(1e3 * row.bound, index - 0.42, index + 0.42, color="black", linewidth=1.5)
    axes.hlines([], 0, 0, color="black", label="bound: max(T_matmul, T_comm)")
    axes.set_xticks(range(len(rows)), [f"{row.layer}\n{row.run}\n{row.m},{row.k},{row.n}" for row in rows], fontsize=8)
    axes.set_ylabel("ms, median")
    axes.legend(fontsize=8)
    axes.set_title(conditions, fontsize=8)
    figure.savefig(path, dpi=130)
