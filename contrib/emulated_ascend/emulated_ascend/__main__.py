"""The commands of emulated_ascend.

python -m emulated_ascend run --ranks 2 train.py ...     the script on two ranks, each with an emulated NPU
python -m emulated_ascend run -- torchrun ... train.py   any command, in the emulation's environment
python -m emulated_ascend operators                      the operators that have kernels, and those that have none
python -m emulated_ascend build                          compile the libraries, print their folder
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .build import built
from .devices import DEVICES, device_of
from .environment import environment
from .launch import launch
from .probe import host_factor
from .records import Record, said, summary
from .wheel import Unusable, Wheel


def main() -> int:
    """Run a command; what cannot be used is a sentence and exit status 2."""
    parser = argparse.ArgumentParser(
        "emulated_ascend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script or a command on emulated NPUs")
    run.add_argument("--ranks", type=int, help="start a Python script on so many ranks")
    run.add_argument("--seed", type=int, help="of the random delays")
    run.add_argument("--delay-us", type=int, help="the longest random delay, in microseconds")
    run.add_argument("--memory-mb", type=int, help="memory of a device (65536)")
    run.add_argument("--devices", type=int, help="devices of the machine (8, or as many as ranks)")
    run.add_argument("--soc", help="the name of the device (Ascend910B1)")
    run.add_argument("--races", action="store_true", help="find accesses to memory that nothing orders; status 3 then")
    run.add_argument("--clock", action="store_true", help="time the run: the host's own time, a table's for the device")
    run.add_argument("--device", default="910B1", help=f"whose table: {', '.join(DEVICES)} (910B1)")
    run.add_argument("--host", default="1", help="factor on the host's time, or probe: as on the reference machine (1)")
    run.add_argument("--lanes", help="with --clock: write the lanes of all ranks here, a trace for Perfetto")
    run.add_argument("--summary", help="with --clock: write the figures here as JSON")
    run.add_argument("words", nargs=argparse.REMAINDER, help="a script with its arguments, or -- and a command")
    commands.add_parser("operators", help="list the operators of the wheel: with a kernel, and without")
    commands.add_parser("build", help="compile the libraries and print their folder")
    asked = parser.parse_args()
    try:
        return {"run": run_words, "operators": list_operators, "build": print_folder}[asked.command](asked)
    except Unusable as why:
        print(f"emulated_ascend: {why}", file=sys.stderr)
        return 2


def run_words(asked: argparse.Namespace) -> int:
    """Run a script on ranks, or any command."""
    is_command = asked.words[:1] == ["--"]
    words = asked.words[1:] if is_command else asked.words
    if asked.ranks is None and not is_command:
        asked.ranks = 1  # a script alone
    if not words:
        raise Unusable("run needs a script, or -- and a command")
    if asked.ranks is not None and asked.ranks < 1:
        raise Unusable(f"--ranks is {asked.ranks}; it has to be 1 or more")
    devices = asked.devices or (max(8, asked.ranks) if asked.ranks else None)
    plain = environment(asked.seed, asked.delay_us, asked.memory_mb, devices, asked.soc, asked.races)
    if not asked.clock:
        return started(words, asked, plain)
    if asked.races:
        raise Unusable("--clock and --races exclude each other: under the clock kernels touch no memory")
    device, host = device_of(asked.device), host_factor(asked.host)
    variables = environment(None, None, asked.memory_mb, devices, asked.soc, clock=device, host=host)
    with tempfile.TemporaryDirectory() as folder:
        status = started(words, asked, {**variables, "EMULATED_ASCEND_CLOCK_FOLDER": folder})
        report(Path(folder), device.name, asked)
    return status


def started(words: list[str], asked: argparse.Namespace, variables: dict[str, str]) -> int:
    """Start the script on its ranks, or the command."""
    if asked.ranks is None:
        try:
            return subprocess.run(words, env=variables).returncode
        except OSError as why:
            raise Unusable(f"{words[0]} cannot be started: {why.strerror}") from why
    return launch(words, asked.ranks, variables)


def report(folder: Path, device: str, asked: argparse.Namespace) -> None:
    """Print a timed run; write its lanes and figures where they are wanted."""
    result = summary(folder)
    print("\n".join(said(result, device)))
    if asked.summary:
        Path(asked.summary).write_text(json.dumps({"device": device, **result}))
    if asked.lanes:
        records = {int(path.stem.partition("-")[2]): Record.read(path) for path in sorted(folder.glob("rank-*.json"))}
        events = [event for rank, record in records.items() for event in record.lanes(rank)]
        Path(asked.lanes).write_text(json.dumps({"traceEvents": events}))


def list_operators(asked: argparse.Namespace) -> int:
    """Print the wheel's operators; those without a kernel with a minus."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu cannot be imported outside `run`
    from .kernels import KERNELS

    names = [name.removeprefix("aclnn") for name in Wheel().operators()]
    for name in names:
        print(f"{'+' if name in KERNELS else '-'} {name}")
    print(f"{sum(name in KERNELS for name in names)} of {len(names)} have a kernel", file=sys.stderr)
    return 0


def print_folder(asked: argparse.Namespace) -> int:
    """Print where the libraries are."""
    print(built())
    return 0


if __name__ == "__main__":
    sys.exit(main())
