"""Train the same GPT as Megatron-core is and with its linear layers overlapped, and compare every bit.

    python examples/gpt/compare.py
    python examples/gpt/compare.py --sequence-parallel --chunks auto,8 --json

Between the runs nothing differs but one environment variable, COC_PARALLEL_NUM. Exits with 1 if a loss or a
weight differs, if the variable replaced nothing, or if a rank fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")
VARIABLE = "COC_PARALLEL_NUM"
OURS = "ascend_parallel: "  # with which begins what the package says
PREFIXES = ("COC_", "USE_COC_")  # of every variable the package reads; none of the caller's reaches a run
TIME_LIMIT = 300.0  # seconds a run may take; the whole demo needs a minute at most

# Why no run here is to be expected to gain, and what would.
WHY = (
    "On one host the link is as fast as memory and the ranks share its cores: there is next to nothing to hide, and "
    "chunks cost. Overlap gains where moving rows takes about as long as the matmuls: on a link of 1 Gbit/s, which "
    "[bold]make bench[/] measures (as root), or on Ascend, for which "
    "[bold]ascend-parallel predict --model llama2-7b --tp 8 --hardware 910b[/] foresees it."
)

Report = dict[str, Any]
Verdict = dict[str, Any]


class RunFailed(Exception):
    """A rank that ended badly, or too late, with the output of all ranks."""


def main() -> int:
    """Run all, show all, and say by the exit status whether they agree."""
    args = _parse_args()
    status = Console(stderr=True)
    try:
        with _progress(status) as progress:
            plain = train("as it is", {}, args, progress)
            runs = {value: train(f"{VARIABLE}={value}", {VARIABLE: value}, args, progress) for value in args.chunks}
    except RunFailed as failure:
        status.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    verdicts = {value: compare(plain, run) for value, run in runs.items()}
    if args.json:
        print(json.dumps({"verdicts": verdicts, "plain": plain, "runs": runs}, indent=2))
    else:
        show(Console(), plain, runs, verdicts)
    return 0 if all(verdict["equal"] and verdict["patched"] for verdict in verdicts.values()) else 1


def train(title: str, variables: dict[str, str], args: argparse.Namespace, progress: Progress) -> Report:
    """Train on ``args.ranks`` processes with `variables` set, and return the report of rank 0."""
    task = progress.add_task(title, total=args.steps)
    with tempfile.TemporaryDirectory(prefix="gpt-demo-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(TRAIN), "--steps", str(args.steps), "--report", str(report)]
        if args.sequence_parallel:
            command.append("--sequence-parallel")
        environments = [_environment(variables, rank, args.ranks) for rank in range(args.ranks)]
        _share_port(environments)
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(args.ranks)]
        with _processes(command, environments, logs) as processes:
            _wait(processes, logs, title, lambda steps: progress.update(task, completed=steps))
        said = [line.removeprefix(OURS) for line in _lines(logs[0]) if line.startswith(OURS)]
        return {**json.loads(report.read_text(encoding="utf-8")), "said": said}


def compare(plain: Report, overlapped: Report) -> Verdict:
    """Decide what the exit status and the tables say. Losses are compared as hexadecimal text: all their bits."""
    pairs = list(zip(plain["losses"], overlapped["losses"], strict=True))
    differing = [step for step, (one, other) in enumerate(pairs) if one != other]
    weights = plain["weights"] == overlapped["weights"]
    return {
        "equal": not differing and weights,
        "differing_steps": differing,
        "largest_gap": max(abs(float.fromhex(one) - float.fromhex(other)) for one, other in pairs),
        "equal_weights": weights,
        "patched": overlapped["autoloaded"] and any(patch["applied"] for patch in overlapped["status"]["patches"]),
        "median_milliseconds": [statistics.median(report["milliseconds"]) for report in (plain, overlapped)],
    }


def show(console: Console, plain: Report, runs: dict[str, Report], verdicts: dict[str, Verdict]) -> None:
    """Print the tables and the last words."""
    titles = ["as it is", *map(_named, runs)]
    reports = [plain, *runs.values()]
    console.print(_loss_table(titles, reports, verdicts))
    console.print(_summary_table(titles, reports))
    for patch in next(iter(runs.values()))["status"]["patches"]:
        state = "replaced" if patch["applied"] else "not replaced"
        reason = f" ({patch['reason']})" if patch.get("reason") else ""
        console.print(f"{state}: {patch['target']}{reason}", markup=False, highlight=False, soft_wrap=True)
    for line in dict.fromkeys(line for run in runs.values() for line in run["said"] if f"{VARIABLE}=auto: " in line):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for value, verdict in verdicts.items():
        console.print(_last_word(value, len(plain["weights"]), verdict), soft_wrap=True)
    console.print(about_time(verdicts), highlight=False, soft_wrap=True)


def _last_word(value: str, ranks: int, verdict: Verdict) -> str:
    if not verdict["patched"]:
        return (
            f"[red]Nothing was patched[/] by the variable alone: {VARIABLE}={value} needs the entry point that torch "
            f"loads. Is ascend_parallel installed in {sys.prefix}? Ask: ascend-parallel doctor"
        )
    if verdict["equal"]:
        return f"[green]Equal[/]: with {VARIABLE}={value} every loss and every weight is the same, bit for bit."
    if not verdict["differing_steps"]:
        return f"[red]Different[/]: with {VARIABLE}={value} the weights after the last step are, the losses are not."
    step, gap = verdict["differing_steps"][0], verdict["largest_gap"]
    text = f"[red]Different[/]: with {VARIABLE}={value} losses part at step {step}; the largest gap is {gap:.1e}."
    if ranks > 2:
        text += " More than 2 ranks add up in an order that depends on the place in gloo's buffer, chunks on another."
    return text


def about_time(verdicts: dict[str, Verdict]) -> str:
    """Say how long the steps took, why overlap gains next to nothing on one host, and where it does."""
    plain = next(iter(verdicts.values()))["median_milliseconds"][0]
    steps = ", ".join(f"{one['median_milliseconds'][1]:.1f} ms with {_named(value)}" for value, one in verdicts.items())
    return f"A step took {plain:.1f} ms as it is, {steps}, each run by itself. {WHY}"


def _named(value: str) -> str:
    return value if value == "auto" else f"{value} chunks"


def _loss_table(titles: list[str], reports: list[Report], verdicts: dict[str, Verdict]) -> Table:
    table = Table(title=f"Loss of each step, by {VARIABLE}")
    for column in ("step", *titles, "same bits"):
        table.add_column(column, justify="right")
    differing = {step for verdict in verdicts.values() for step in verdict["differing_steps"]}
    for step, losses in enumerate(zip(*(report["losses"] for report in reports), strict=True)):
        shown = (f"{float.fromhex(loss):.7f}" for loss in losses)
        table.add_row(str(step), *shown, "[red]no[/]" if step in differing else "yes")
    return table


def _summary_table(titles: list[str], reports: list[Report]) -> Table:
    table = Table(title=f"What ran, by {VARIABLE}")
    for column in ("", *titles):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("median step", *(f"{statistics.median(report['milliseconds']):.1f} ms" for report in reports))
    table.add_row("half of the steps took", *(_middle_half(report["milliseconds"]) for report in reports))
    coverage = (f"{report['coverage']['covered']} of {report['coverage']['total']}" for report in reports)
    table.add_row("linear layers covered", *coverage)
    counts = [report["status"]["counts"] for report in reports]
    for operator in sorted({name for count in counts for name in count}):
        table.add_row(operator, *(_describe(count.get(operator)) for count in counts))
    return table


def _middle_half(milliseconds: list[float]) -> str:
    """Tell how far steps lie apart: what other programs do to the machine, and to one run more than to another."""
    if len(milliseconds) < 2:
        return "-"
    low, _, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return f"{low:.0f} to {high:.0f} ms"


def _describe(count: dict[str, int] | None) -> str:
    if not count or not count["calls"]:
        return "-"
    return f"{count['calls']} calls, {count['chunks']} chunks, {count['collectives']} collectives"


def _environment(variables: dict[str, str], rank: int, ranks: int) -> dict[str, str]:
    """Return this process's environment without our variables, with `variables` and what a rank needs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    if sys.platform == "linux":  # gloo asks for the host's name otherwise, which a container may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return environment | ours | variables


def _share_port(environments: list[dict[str, str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for environment in environments:
        environment["MASTER_PORT"] = port


@contextlib.contextmanager
def _processes(
    command: list[str], environments: list[dict[str, str]], logs: list[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process per environment, its output in its log; none outlives the context."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(
    processes: list[subprocess.Popen[bytes]], logs: list[Path], title: str, show_steps: Callable[[int], None]
) -> None:
    """Wait until all have ended well, reporting the steps done; raise `RunFailed` as soon as one has not."""
    start = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        show_steps(sum(line.startswith("step") for line in _lines(logs[0])))
        if any(codes):
            time.sleep(1)  # let the others say what they saw of it
            raise RunFailed(_failure(title, [process.poll() for process in processes], logs))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() - start > TIME_LIMIT:
            raise RunFailed(_failure(f"{title}: no end after {TIME_LIMIT:.0f} s", codes, logs))
        time.sleep(0.1)


def _failure(title: str, codes: list[int | None], logs: list[Path]) -> str:
    lines = [f"The run «{title}» failed."]
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        lines += [f"--- rank {rank}: {_ending(code)}, its last lines:", *_lines(log)[-25:]]
    return "\n".join(lines)


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _ending(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8), help="processes; 2 unless said otherwise")
    parser.add_argument(
        "--chunks", type=_values, default="auto,4", help=f"values of {VARIABLE}, a run for each: auto,4"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be 1 or more")
    return args


def _values(text: str) -> list[str]:
    return list(dict.fromkeys(value.strip() for value in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
