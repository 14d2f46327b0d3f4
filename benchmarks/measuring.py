"""What the benchmarks share: ranks on a link, timing in turn, medians of ratios, Markdown tables, errors in a line."""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from ascend_parallel.patches.region_choice import TURNS
from ascend_parallel.tuning.bench.results import interval
from ascend_parallel.tuning.launch.ranks import RankError, call_on_ranks, report
from ascend_parallel.tuning.launch.user_namespaces import LinkError

FOLDER = Path(__file__).parent
WORDS: dict[str, dict[str, Any]] = {
    "region": {"region": True},
    "region=auto": {"region": "auto"},
    "split": {"split_weight_gradient": True},
    "keep": {"recompute_all_gather": False},
}
State = list[tuple[Any, str, Any]]
"""What switches a step to a variant: owners, names of their attributes, and the attributes' values or ABSENT."""
ABSENT = object()
VARIANTS = (
    'values of COC_PARALLEL_NUM beside the plain step, with commas; "4 region": in regions; "4 region=auto": the '
    'first steps decide; "4 split": COC_SPLIT_WEIGHT_GRADIENT=1; "4 keep": recompute_all_gather=false'
)


def settings_of(variant: str) -> dict[str, Any]:
    """Return the settings of a variant in words, such as "auto region=auto"."""
    number, *words = variant.split()
    settings: dict[str, Any] = {"auto": True} if number == "auto" else {"num_chunks": int(number)}
    for word in words:
        settings |= WORDS[word]
    return settings


def deciding(variant: str) -> int:
    """Return the number of steps after which COC_REGION=auto has decided; 0 for a variant without it."""
    return len(TURNS) if "region=auto" in variant.split() else 0


def options_of(
    text: str | None, *, link: bool = True, rounds: int | None = None, json: bool = False
) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring, with the options that a benchmark has."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if link:
        parser.add_argument("--link", metavar="RATE", help="between the ranks, such as 1gbit")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    if json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every time to this file too; seconds")
    return parser


def on_ranks(
    target: str, ranks: int, *, link: str | None = None, limit: float = 600, title: str = "", **arguments: Any
) -> Any:
    """Call ``function(group, **arguments)`` of a benchmark on every rank and show its progress; see `call_on_ranks`."""
    folders = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    with Console(stderr=True).status(title or "starting", refresh_per_second=2) as status:

        def show(line: str) -> None:
            status.update(f"{title} {line}".replace("[", r"\["))

        return call_on_ranks(target, ranks, link=link, limit=limit, on_progress=show, **arguments)


def in_turn(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time all of `runs` once a round, after `warm_up` rounds; return the slowest rank's seconds by name and round.

    Every round has a random order, the same on all ranks, and a barrier stands before every call.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(-warm_up, rounds):
        report(f"round {index + 1} of {rounds}")
        gc.collect()
        gc.disable()
        for name in random.Random(index).sample(list(runs), len(runs)):
            dist.barrier()
            start = clock()
            kept = runs[name]()
            took = clock() - start
            del kept  # freed outside the timed part
            if index >= 0:
                times[name].append(took)
        gc.enable()
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def with_state(state: State, step: Callable[[], object]) -> None:
    """Run a step in `state`; what a setting has found out stays with the state's values."""
    for owner, name, value in state:
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
    step()


def gain(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median(their / our for their, our in zip(theirs, ours, strict=True))


def ratio(plain: Sequence[float], times: Sequence[float]) -> tuple[str, str]:
    """Return the median of plain / times by round, and its bootstrap interval, as two cells; "1" for plain itself."""
    if times is plain:
        return "1", ""
    low, high = interval(np.array(plain) / np.array(times))
    return f"{gain(plain, times):.3f}", f"{low:.3f}-{high:.3f}"


def milliseconds(times: Sequence[float], digits: int = 1) -> str:
    """Return the median of seconds as milliseconds."""
    return f"{1e3 * median(times):.{digits}f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def run(main: Callable[[], object]) -> None:
    """Run a benchmark; print an error as one line, and exit with 2, or with 1 if a rank failed."""
    try:
        main()
    except (LinkError, ValueError, RankError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RankError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
