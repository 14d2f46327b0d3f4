"""A project's own tests, plain and overlapped: the outcomes, the calls that ran in chunks, and why outcomes differ.

A run is a `python -m pytest` in the project's checkout, or one for each rank if its tests expect a launcher. Nothing is
fetched, and the checkout is not changed. A suite proves nothing if no call ran in chunks. A difference is explained if
the failure's text matches one of the suite's reasons.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORST = ("failed", "missing", "skipped", "passed")


@dataclass(frozen=True)
class Outcome:
    """What became of a test (a word of `WORST`), and its message."""

    word: str
    message: str = ""


@dataclass(frozen=True)
class Run:
    """The outcomes by test, and the number of calls that ran in chunks, of all ranks."""

    outcomes: Mapping[str, Outcome]
    chunked: int


@dataclass(frozen=True)
class Difference:
    """A test whose outcome is another one than plain; `reason` is None if no reason of the suite fits."""

    test: str
    plain: str
    patched: Outcome
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tests of a project.

    arguments
        Arguments of pytest: files, plugins.
    environment
        Variables of every run, the plain one too.
    variants
        Variables that switch overlap on, by the variant's name.
    reasons
        Regular expressions of a failure's text, each with the reason why overlap changes the outcome.
    ranks
        Processes of pytest that a launcher would start; 1 if the tests start their own ranks.
    limit
        Seconds for a run.
    """

    checkout: Path
    arguments: tuple[str, ...]
    variants: Mapping[str, Mapping[str, str]]
    reasons: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    limit: float = 3600


def outcomes(reports: Iterable[Path]) -> dict[str, Outcome]:
    """Return the outcome of each test: the worst of the ranks' JUnit reports, "missing" if a rank has none."""
    of_ranks = [_report(report) for report in reports]
    tests = sorted(set().union(*of_ranks))
    return {
        test: min((of.get(test, Outcome("missing")) for of in of_ranks), key=lambda outcome: WORST.index(outcome.word))
        for test in tests
    }


def _report(report: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = Outcome("passed")
        for child in case:
            text = f"{child.get('message', '')}\n{child.text or ''}"
            if child.tag in ("failure", "error"):
                outcome = Outcome("failed", text)
            elif child.tag == "skipped":
                outcome = Outcome("skipped", text)
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def differences(plain: Run, patched: Run, reasons: Mapping[str, str]) -> list[Difference]:
    """Return the tests whose outcomes differ, each with the first reason whose pattern its text has."""
    found = []
    for test in sorted({*plain.outcomes, *patched.outcomes}):
        before, after = (run.outcomes.get(test, Outcome("missing")) for run in (plain, patched))
        if before.word != after.word:
            reason = next((reason for pattern, reason in reasons.items() if re.search(pattern, after.message)), None)
            found.append(Difference(test, before.word, after, reason))
    return found


def report(plain: Run, patched: Mapping[str, Run], reasons: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return a Markdown table with the differences below it, and what is wrong: nothing, if overlap changed nothing."""
    lines = ["| run | passed | failed | skipped | calls in chunks |", "|---|---|---|---|---|", _row("plain", plain)]
    lines += [_row(name, run) for name, run in patched.items()]
    wrong = []
    if not any(outcome.word == "passed" for outcome in plain.outcomes.values()):
        wrong.append("plain: no test passed, so there is nothing to compare with")
    if plain.chunked:
        wrong.append(f"plain: {plain.chunked} calls ran in chunks, so this run is not plain")
    for name, run in patched.items():
        if not run.chunked:
            wrong.append(f"{name}: no call ran in chunks, so the suite proves nothing")
        for difference in differences(plain, run, reasons):
            lines.append(f"\n{name}: {difference.test}: {difference.plain} plain, {difference.patched.word}")
            if difference.reason is None:
                wrong.append(
                    f"{name}: {difference.test}: {difference.plain} plain, {difference.patched.word}, no reason known"
                )
                lines.append(difference.patched.message)
            else:
                lines.append(f"reason: {difference.reason}")
    return "\n".join(lines), wrong


def _row(name: str, run: Run) -> str:
    count = Counter(outcome.word for outcome in run.outcomes.values())
    return f"| {name} | {count['passed']} | {count['failed'] + count['missing']} | {count['skipped']} | {run.chunked} |"


def main(suite: Suite) -> None:
    """Run the suite plain and in each variant; print the report, and exit with 1 if something is wrong."""
    plain = run(suite, {})
    patched = {name: run(suite, variables) for name, variables in suite.variants.items()}
    table, wrong = report(plain, patched, suite.reasons)
    print(table)
    if wrong:
        sys.exit("\n".join(wrong))


def run(suite: Suite, variables: Mapping[str, str]) -> Run:
    """Run the tests with these variables. RuntimeError: a rank wrote no report, or ran longer than the limit."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder, "calls")
        counted.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("COC_", "USE_COC_"))}
        path = [str(HERE / "counting"), str(HERE), str(ROOT), str(suite.checkout), environment.get("PYTHONPATH", "")]
        environment |= {**suite.environment, **variables, "COUNTED_CALLS": str(counted)}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(suite.ranks),
        }
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        reports = [Path(folder, f"{rank}.xml") for rank in range(suite.ranks)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    f"--junitxml={reports[rank]}",
                    *suite.arguments,
                ],
                cwd=suite.checkout,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(suite.ranks)
        ]
        _wait(processes, suite.limit)
        for rank, written in enumerate(reports):
            if not written.exists():
                raise RuntimeError(f"rank {rank} wrote no report; pytest ended with {processes[rank].returncode}")
        return Run(outcomes(reports), chunked_calls(counted))


def chunked_calls(folder: Path) -> int:
    """Return how many lines of the folder's files tell of a call in several chunks."""
    return sum(int(line.split()[1]) > 1 for file in folder.iterdir() for line in file.read_text().splitlines())


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> None:
    end = time.monotonic() + limit
    try:
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"rank {rank} ran longer than {limit:g} s") from None
    finally:
        for process in processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
