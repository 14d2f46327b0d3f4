"""Train the same GPT as Megatron-core is and with its linear layers overlapped, and compare every bit.

    python examples/gpt/compare.py
    python examples/gpt/compare.py --link none --sequence-parallel --chunks auto,8 --json

Between the runs nothing differs but one environment variable, COC_PARALLEL_NUM. The ranks talk over a link of 1 Gbit/s
if this machine allows its user to build one, and else over the loopback. Exits with 1 if a loss or a weight differs,
if the variable replaced nothing, or if a rank fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from runs import Report, RunFailed, Setup, train
from showing import VARIABLE, Verdict, predicted_gain, show, sketch, typical_pass

from ascend_parallel.diagnostics.timeline.files import Pass, read_run
from ascend_parallel.tuning.launch.link import LinkEndpoint, shaped_link
from ascend_parallel.tuning.launch.user_namespaces import LinkError

RATE, NO_LINK = "1gbit", "none"
WIDE = ("--hidden-size", "512", "--seq-length", "256")  # 1024 rows in every matmul


def main() -> int:
    """Run all, show all, and say by the exit status whether they agree."""
    args = _parse_args()
    status = Console(stderr=True)
    try:
        with contextlib.ExitStack() as stack:
            ends, refused = _link(stack, args)
            link = args.link if ends else None
            setup = Setup(ranks=args.ranks, steps=args.steps, flags=_flags(args, link), ends=ends)
            chunks = args.chunks or (["4"] if link else ["auto"])
            progress = stack.enter_context(_progress(status, silent=args.json))
            plain = train("as it is", {}, setup, progress)
            runs = {value: train(f"{VARIABLE}={value}", {VARIABLE: value}, setup, progress) for value in chunks}
            drawn = _drawn(chunks[-1], setup, progress) if link and not args.json else {}
    except (RunFailed, LinkError, ValueError) as failure:
        status.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    verdicts = {value: compare(plain, run) for value, run in runs.items()}
    if args.json:
        print(json.dumps({"link": link, "verdicts": verdicts, "plain": plain, "runs": runs}, indent=2))
    else:
        _show(Console(), plain, runs, verdicts, drawn, link, refused)
    return 0 if all(verdict["equal"] and verdict["patched"] for verdict in verdicts.values()) else 1


def _link(stack: contextlib.ExitStack, args: argparse.Namespace) -> tuple[list[LinkEndpoint], str]:
    """Return the ranks' places on the link, or none and why; a link that was asked for by its rate must be built."""
    if args.link == NO_LINK:
        return [], "--link none"
    try:
        return stack.enter_context(shaped_link(args.link or RATE, args.ranks)), ""
    except LinkError as error:
        if args.link:
            raise
        return [], str(error)
    finally:
        args.link = args.link or RATE


def _flags(args: argparse.Namespace, link: str | None) -> list[str]:
    """Return the model's flags: over a link, layers whose matmuls take about as long as the transfers."""
    parallel = args.sequence_parallel if args.sequence_parallel is not None else link is not None
    return [*(WIDE if link else ()), *(["--sequence-parallel"] if parallel else [])]


def _drawn(value: str, setup: Setup, progress: Progress) -> dict[str, Pass]:
    """Record short runs, serial and overlapped, and return a layer's pass of each."""
    passes = {}
    short = replace(setup, steps=min(3, setup.steps))
    # COC_MODE=1 runs the package's layers without chunks: what Megatron-core's own do, with a record of the times.
    for title, variables in {"serial": {"COC_MODE": "1"}, f"{value} chunks": {VARIABLE: value}}.items():
        with tempfile.TemporaryDirectory(prefix="gpt-demo-") as folder:
            train(f"timeline, {title}", {**variables, "COC_TIMELINE": folder}, short, progress)
            passes[title] = typical_pass(read_run(Path(folder))[0])
    return passes


def _show(
    console: Console,
    plain: Report,
    runs: dict[str, Report],
    verdicts: dict[str, Verdict],
    drawn: dict[str, Pass],
    link: str | None,
    refused: str,
) -> None:
    if refused:
        console.print(f"No slow link: {refused}. The loopback stands in.", markup=False, soft_wrap=True)
    show(console, plain, runs, verdicts, link)
    for line in ["", *sketch(drawn), ""] if drawn else []:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(predicted_gain(), markup=False, highlight=False, soft_wrap=True)


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


def _progress(console: Console, *, silent: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=silent)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8), help="processes; 2 unless said otherwise")
    parser.add_argument("--link", metavar="RATE", help=f"{NO_LINK}: the loopback; default: {RATE} if allowed")
    parser.add_argument("--chunks", type=_values, help=f"values of {VARIABLE}, a run for each: 4 on a link, else auto")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, help="default: on a link, not on the loopback"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be 1 or more")
    return args


def _values(text: str) -> list[str]:
    return list(dict.fromkeys(value.strip() for value in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
