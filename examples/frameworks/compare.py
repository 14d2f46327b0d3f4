"""Run an example of this folder plain and with overlap, and compare the losses and every gradient.

    python examples/frameworks/compare.py transformers_tp
    python examples/frameworks/compare.py torch_tp --ranks 4 --set COC_PARALLEL_NUM=8 -- --sequence-parallel --fsdp

Between the two runs nothing differs but the environment. Exits with 1 if a run fails, if a loss or a gradient differs
by more than --limit, or if no layer was overlapped. Equal bits are promised unless the log says of a shape that chunks
change the bits of its matmul on this machine, as in 16 bits on some processors. A timeline of the overlapped run tells
how much of the communication it hid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.table import table
from ascend_parallel.tuning.launch.process_tree import process_tree

FOLDER = Path(__file__).parent
SCRIPTS = ("transformers_tp", "torch_tp", "deepspeed_tp", "megatron_moe", "megatron_compiled", "long_sequence")
CHANGED = ("every cut changes the matmul's bits", "these chunks change the matmul's bits")  # in the log
TIME_LIMIT = 600.0  # seconds of a run; DeepSpeed compiles its communication in its first


def main() -> int:
    """Run both, show what differs, and return the exit status."""
    own, script = _split(sys.argv[1:])
    args = _parse(own)
    variables = dict(each.split("=", 1) for each in args.set or ["COC_PARALLEL_NUM=4"])
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = _run(args, script, {}, f"{folder}/plain")
        times = variables.get("COC_TIMELINE", f"{folder}/times")
        overlapped, log = _run(args, script, {**variables, "COC_TIMELINE": times}, f"{folder}/overlapped")
        hidden = _hidden(Path(times))
    announced = [line for line in log.splitlines() if "overlap is on" in line]
    found = _compare(plain, overlapped) | {"variables": variables, "overlapped": bool(announced), **hidden}
    found["bits_promised"] = not any(text in log for text in CHANGED)
    found["agree"] = bool(announced) and found["worst"] <= args.limit
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(args, found, announced)
    return 0 if found["agree"] else 1


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and behind a lone "--"."""
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS, help="its own options follow a lone --")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--set", action="append", metavar="COC_...=VALUE", help="default: COC_PARALLEL_NUM=4")
    parser.add_argument("--limit", type=float, default=1e-5, help="largest difference, of the largest magnitude (1e-5)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def _run(args: Any, script: list[str], variables: dict[str, str], out: str) -> tuple[list[dict[str, Any]], str]:
    """Return what every rank wrote, and the run's output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COC_", "USE_COC_"))}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    words += [str(FOLDER / f"{args.script}.py"), "--out", out, *script]
    environ |= {"OMP_NUM_THREADS": "1", "COC_LOG_LEVEL": "info", **variables}
    with process_tree(words, patience=5, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        said = process.communicate(timeout=TIME_LIMIT)[0].decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{said[-8000:]}")
    return [torch.load(f"{out}.{rank}") for rank in range(args.ranks)], said


def _hidden(folder: Path) -> dict[str, Any]:
    """Return the milliseconds in which a step communicates, and the share of them beside a computation.

    Medians over the steps, of each pass of a layer on its slowest rank.
    """
    recorded = read_run(folder)[0] if folder.is_dir() and any(folder.iterdir()) else []  # nothing ran with overlap
    rows = [row for row in table(recorded) if row.comm]
    communication = sum(row.comm or 0 for row in rows)
    hidden = sum((row.comm or 0) * (row.hidden or 0) for row in rows)
    return {"communication_ms": communication, "hidden": hidden / communication if communication else None}


def _compare(plain: list[dict[str, Any]], overlapped: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many tensors of all ranks are equal, and the largest difference, by name.

    A gradient differs by a share of its own largest magnitude, or of 1e-4 of the largest gradient's if that is more.
    """
    equal = total = 0
    apart: dict[str, float] = {}
    for rank, (left, right) in enumerate(zip(plain, overlapped, strict=True)):
        for kind in ("losses", "gradients", "generated"):
            if left[kind].keys() != right[kind].keys():
                raise SystemExit(f"rank {rank} has other {kind} in the two runs")
            least = 1e-4 * max((_largest(each) for each in left[kind].values()), default=0.0)
            for name, one in left[kind].items():
                other = right[kind][name]
                apart[f"{name} on rank {rank}"] = _apart(one, other, 0.0 if kind == "generated" else least)
                if kind == "gradients":
                    equal, total = equal + torch.equal(one, other), total + 1
    where = max(apart, key=lambda name: apart[name])
    losses = [[loss.item() for loss in ranks[0]["losses"].values()] for ranks in (plain, overlapped)]
    return {
        "losses": losses,
        "losses_equal": losses[0] == losses[1],
        "gradients_equal": equal,
        "gradients": total,
        "worst": apart[where],
        "where": where if apart[where] else "",
    }


def _apart(one: torch.Tensor, other: torch.Tensor, least: float) -> float:
    """Return the largest difference as a share of the largest magnitude of `one`; infinity if it is no number."""
    if one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    found = float((one.double() - other.double()).abs().max()) / max(_largest(one), least, 1e-300)
    return found if math.isfinite(found) else math.inf


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _show(args: Any, found: dict[str, Any], announced: list[str]) -> None:
    console = Console()
    table = Table(title=f"{args.script} on {args.ranks} ranks")
    for heading in ("step", "loss, plain", "loss, overlapped"):
        table.add_column(heading)
    for step, (left, right) in enumerate(zip(*found["losses"], strict=True)):
        table.add_row(str(step), f"{left:.9g}", f"{right:.9g}")
    console.print(table)
    console.print(f"losses equal bit for bit: {'yes' if found['losses_equal'] else 'no'}")
    differs = f"; the largest difference is {found['worst']:.1e}, {found['where']}" if found["worst"] else ""
    console.print(f"gradients equal bit for bit: {found['gradients_equal']} of {found['gradients']}{differs}")
    if not found["bits_promised"]:
        console.print("the log names shapes whose bits chunks change on this machine: equal bits are not promised")
    if found["hidden"] is not None:
        share = f"{found['hidden']:.0%} of {found['communication_ms']:.1f} ms"
        console.print(f"hidden: {share} of communication in a step ran beside computation")
    console.print(announced[0] if announced else "nothing was overlapped", markup=False, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
