"""Hold what `ascend-parallel audit` foresees by a plain run's profile against what `ascend-parallel try` then measures.

    python benchmarks/audit.py --rate 1gbit      about 5 minutes

The GPT of examples/gpt on two gloo ranks of one machine, in several widths, all-reduce and sequence parallelism. Both
ranks send over one loopback device, which `--rate` limits in a network namespace of its own; without it the loopback
is as fast as memory, and there is little to foresee.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import table

TRAIN = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"
LIMITED = "ip link set lo up; tc qdisc add dev lo root tbf rate {} burst 256kb latency 50ms; exec {}"


def tried(words: list[str], rate: str | None, chunks: str) -> dict[str, Any]:
    """Return the JSON of a trial of examples/gpt with these options."""
    launch = ["torchrun", "--nproc-per-node", "2", str(TRAIN), "--steps", "14", *words]
    command = ["ascend-parallel", "try", "--json", "--steps", "12", "--chunks", chunks, "--", *launch]
    if rate is not None:
        command = ["unshare", "-rn", "sh", "-c", LIMITED.format(rate, " ".join(command))]
    sys.stderr.write(f"{' '.join(words)}\n")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"audit.py: {' '.join(words)}: {ended.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def main() -> None:
    """Run the trials, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of the loopback device, such as 1gbit; needs network namespaces")
    parser.add_argument("--chunks", default="auto", help="COC_PARALLEL_NUM of the overlapped runs")
    parser.add_argument("--hidden-sizes", default="512,1024", help="widths of the GPT, with commas")
    options = parser.parse_args()
    rows = []
    for hidden in options.hidden_sizes.split(","):
        for mode in ([], ["--sequence-parallel"]):
            words = ["--hidden-size", hidden, "--seq-length", "512", *mode]
            found = tried(words, options.rate, options.chunks)
            plain, saved = found["plain_ms"], found["plain_ms"] - found["overlapped_ms"]
            foreseen = found["foreseen_ms"]
            if foreseen is None:
                sys.exit(f"audit.py: {' '.join(words)}: no profile: {found['unprofiled']}")
            name = f"{hidden}, {'sequence' if mode else 'all-reduce'}"
            rows.append((name, f"{plain:.0f}", f"{foreseen:.1f}", f"{saved:.1f}", f"{(foreseen - saved) / plain:+.0%}"))
    heads = ("width, mode", "plain ms", "foreseen", "measured", "difference, of a step")
    sys.stdout.write(table(heads, rows) + "\n")


if __name__ == "__main__":
    main()
