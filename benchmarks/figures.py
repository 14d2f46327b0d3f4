"""Run the benchmarks behind the README's figure and docs/measured.md, and write the figures between their markers.

    python benchmarks/figures.py                    all, about ten minutes; `make figures`
    python benchmarks/figures.py --only gpt-512     one of them; the other rows keep their machine, date and commit
    python benchmarks/figures.py --write            run nothing, write the pages from data/figures.json

Every row of data/figures.json has what was measured, with its machine, date and commit. The pages' figures are made
of these rows alone: tests/docs/test_figures.py compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import FOLDER, gain, run, table
from moe import CASES

from ascend_parallel.diagnostics.doctor import commit
from ascend_parallel.tuning.bench.results import interval
from ascend_parallel.tuning.launch.process_tree import process_tree
from ascend_parallel.tuning.measured.chunk_plan import this_machine

DATA = FOLDER / "data" / "figures.json"
PLAIN, LAYERS, REGION = "plain", "4", "4 region"
HEADLINE = "gpt-768, sequence parallel"  # the row of the README's first number
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words around the figures in one language. labels: of rows; a row without one has the English label."""

    headline: str
    heads: tuple[str, ...]
    place: str
    labels: dict[str, str]


ENGLISH, CHINESE = (
    Words(
        headline=(
            "**{gain:.2f} times as fast** is a whole training step of a Megatron-core GPT with sequence parallelism: "
            "{ms} ms in place of {plain}, in 4 chunks, on two CPU\nranks with a link of 1 Gbit/s "
            "(paired rounds; [all figures](docs/measured.md)). "
            "Tests run on CPUs with gloo, and on the real torch_npu over an emulated CANN; "
            "nothing has been run on an NPU yet."
        ),
        heads=("", "plain", "overlapped", "95 %", "with `COC_REGION=1`", "95 %", "measured"),
        place="{letter}: {machine}; {date}, commit {commit}.",
        labels={},
    ),
    Words(
        headline=(
            "**提速至 {gain:.2f} 倍**：开启序列并行的 Megatron-core GPT，一个完整的训练 step "
            "从 {plain} ms 降到 {ms} ms，"
            "切成 4 份，两个 CPU rank 之间是 1 Gbit/s 的链路\n"
            "（比值是逐对 step 的中位数；[全部数字](docs/measured.zh.md)）。"
            "测试在 CPU 上用 gloo 运行，也在真实的 torch_npu 配模拟的 CANN 上运行；尚未在 NPU 上运行过。"
        ),
        heads=("", "原样", "掩盖", "95 %", "`COC_REGION=1`", "95 %", "测量"),
        place="{letter}：{machine}；{date}，提交 {commit}。",
        labels={
            **{f"Megatron-core GPT, hidden {hidden}": f"Megatron-core GPT，宽度 {hidden}" for hidden in (512, 768)},
            "transformers, Llama, hidden 576": "transformers，Llama，宽度 576",
            "torch, hidden 576": "torch，宽度 576",
            "DeepSpeed AutoTP, Llama, hidden 576": "DeepSpeed AutoTP，Llama，宽度 576",
            "with sequence parallelism": "开启序列并行",
            "a layer of 8 experts and a shared one, 400 Mbit/s": "一层 8 个专家加共享专家，400 Mbit/s",
            "a layer of 8 experts, 400 Mbit/s": "一层 8 个专家，400 Mbit/s",
        },
    ),
)
# The pages, with their language and the figures that they have.
PAGES = {
    "README.md": (ENGLISH, "headline"),
    "README.zh.md": (CHINESE, "headline"),
    "docs/measured.md": (ENGLISH, "steps"),
    "docs/measured.zh.md": (CHINESE, "steps"),
}


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A command whose results are rows of the README. rows: the label by the name of the result."""

    script: str
    options: tuple[str, ...]
    rows: dict[str, str]


def _gpt(hidden: int, rounds: int) -> Benchmark:
    options = ("--link", "1gbit", "--chunks", f"{LAYERS},{REGION}", "--hidden", str(hidden), "--rounds", str(rounds))
    labels = {"all-reduce": f"Megatron-core GPT, hidden {hidden}", "sequence parallel": "with sequence parallelism"}
    return Benchmark(script="training.py", options=options, rows=labels)


def _framework(name: str, label: str) -> Benchmark:
    options = ("--link", "1gbit", "--rounds", "11", "--hidden", "576", "--chunks", LAYERS, "--frameworks", name)
    return Benchmark(script="frameworks.py", options=options, rows={name: label})


def _experts(number: int, rounds: int, label: str) -> Benchmark:
    options = ("--link", "400mbit", "--rounds", str(rounds), "--case", str(number))
    return Benchmark(script="moe.py", options=options, rows={str(CASES[number]): label})


BENCHMARKS = {
    "gpt-768": _gpt(768, 7),
    "gpt-512": _gpt(512, 9),
    "transformers": _framework("transformers", "transformers, Llama, hidden 576"),
    "torch": _framework("torch", "torch, hidden 576"),
    "torch-sequence": _framework("torch, sequence parallel", "with sequence parallelism"),
    "deepspeed": _framework("deepspeed", "DeepSpeed AutoTP, Llama, hidden 576"),
    "experts-shared": _experts(0, 15, "a layer of 8 experts and a shared one, 400 Mbit/s"),
    "experts": _experts(1, 15, "a layer of 8 experts, 400 Mbit/s"),
}


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--write", action="store_true", help="run nothing, write the pages from the stored rows")
    options = parser.parse_args()
    stored = json.loads(DATA.read_text())
    for name in [] if options.write else options.only:
        measured = measure(BENCHMARKS[name])
        if not measured:
            print(f"{name}: not measured here, its rows keep their date", file=sys.stderr)
        stored |= {f"{name}, {result}": row for result, row in measured.items()}
        DATA.write_text(json.dumps(stored, indent=1) + "\n")
    for page in PAGES:
        path = FOLDER.parent / page
        path.write_text(with_figures(page, path.read_text(encoding="utf-8"), stored), encoding="utf-8")


def measure(benchmark: Benchmark) -> dict[str, Row]:
    """Run a benchmark and return its rows by the name of the result; none if its framework is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [sys.executable, str(FOLDER / benchmark.script), *benchmark.options, "--json", str(file)]
        with process_tree(command, patience=10) as process:
            code = process.wait()
        if code:
            raise SystemExit(f"{' '.join(command)} ended with {code}")
        results = json.loads(file.read_text())
    here = this_machine(2, torch.device("cpu"), "gloo")
    where = {
        "machine": f"{here.hardware}, torch {here.torch}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(60) or "",
    }
    return {name: {**figures(variants), **where} for name, variants in results.items()}


def figures(variants: dict[str, list[float]]) -> Row:
    """Return the milliseconds of a plain step; of the variants also the ratio to plain, with its interval."""
    plain, row = variants[PLAIN], {}
    for name, times in variants.items():
        row[name] = {"ms": round(1e3 * median(times))}
        if name != PLAIN:
            low, high = interval(np.array(plain) / np.array(times))
            row[name] |= {"gain": round(gain(plain, times), 3), "interval": [round(low, 3), round(high, 3)]}
    return row


def with_figures(page: str, text: str, stored: dict[str, Row]) -> str:
    """Return the text of a page with the figures of the stored rows between its markers."""
    words, name = PAGES[page]
    figure = {"headline": headline, "steps": steps}[name](words, stored)
    begin, end = f"<!-- figures: {name} -->\n", f"\n<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page}: the figures {name!r} have no place between {begin.strip()} and {end.strip()}")
    before, _, rest = text.partition(begin)
    return before + begin + figure + end + rest.partition(end)[2]


def headline(words: Words, stored: dict[str, Row]) -> str:
    """Return the sentence of the first screen."""
    row = stored[HEADLINE]
    return words.headline.format(gain=row[LAYERS]["gain"], ms=row[LAYERS]["ms"], plain=row[PLAIN]["ms"])


def steps(words: Words, stored: dict[str, Row]) -> str:
    """Return the table of training steps, and where and when each row was measured."""
    places: dict[tuple[str, str, str], str] = {}
    rows = []
    for name, benchmark in BENCHMARKS.items():
        for result, label in benchmark.rows.items():
            row = stored[f"{name}, {result}"]
            place = (row["machine"], row["date"], row["commit"])
            letter = places.setdefault(place, chr(ord("a") + len(places)))
            cells = [f"{row[PLAIN]['ms']} ms", *_cells(row, LAYERS), *_cells(row, REGION)]
            rows.append([words.labels.get(label, label), *cells, letter])
    lines = [
        words.place.format(letter=letter, machine=machine, date=date, commit=of)
        for (machine, date, of), letter in places.items()
    ]
    return f"{table(words.heads, rows)}\n\n" + "\n".join(lines)


def _cells(row: Row, name: str) -> list[str]:
    """Return a variant's milliseconds with its gain, and the interval; empty cells if it was not measured."""
    if name not in row:
        return ["", ""]
    low, high = row[name]["interval"]
    return [f"{row[name]['ms']} ms, {row[name]['gain']:.2f} x", f"{low:.2f}-{high:.2f}"]


if __name__ == "__main__":
    run(main)
