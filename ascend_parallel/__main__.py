"""``python -m ascend_parallel``: run a script with overlap, or the command line.

``run`` and ``verify`` run inside training processes, so this module handles them with the standard library and does
not import the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m ascend_parallel run [-m] SCRIPT [ARGUMENT ...]

Run a training script, or with -m a module, with the overlap that COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL
set, for programs started with TORCH_DEVICE_BACKEND_AUTOLOAD=0:

  COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel run pretrain_gpt.py --num-layers 32
"""

VERIFY = """Run a training script, or with -m a module, with overlap, and check its layers against Megatron-core's own.

Exits with 0 if at least one call was checked and no error was over the limit, else with 1. Rank 0 logs a table of
the largest errors. Start it on every rank, in the same way as the training:

  COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel verify --every 10 pretrain_gpt.py --num-layers 32
"""


def main() -> None:
    """Run the command named on the command line."""
    import ascend_parallel

    refused = ascend_parallel._control.refused
    if refused is not None and sys.argv[1:2] in (["run"], ["verify"], ["status"]):
        sys.stderr.write(f"ascend-parallel: {refused}\n")
        raise SystemExit(2)
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    elif sys.argv[1:2] == ["verify"]:
        verify(sys.argv[2:])
    else:
        from ascend_parallel.cli.app import app

        app(prog_name="ascend-parallel")


def run(arguments: list[str]) -> None:
    """Run ``[-m] SCRIPT [ARGUMENT ...]`` as ``python`` would; overlap is on from the first import."""
    as_module = arguments[:1] == ["-m"]
    script = arguments[1:2] if as_module else arguments[:1]
    if not script or script[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        raise SystemExit(0 if script else 2)
    import ascend_parallel  # noqa: F401  reads the environment and patches

    sys.argv = arguments[1:] if as_module else arguments
    if as_module:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does and a console script does not
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    if not Path(script[0]).is_file():
        sys.stderr.write(f"python -m ascend_parallel run: there is no file {script[0]!r}\n")
        raise SystemExit(2)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


def verify(arguments: list[str]) -> None:
    """Run ``[--every N] [--json] [-m] SCRIPT [ARGUMENT ...]`` like `run`, with checks; exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(
        usage="python -m ascend_parallel verify [-h] [--every N] [--json] [-m] SCRIPT [ARGUMENT ...]",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", metavar="N", help="check the first and then every N-th call (COC_VERIFY, or 1)")
    parser.add_argument("--json", action="store_true", help="rank 0 prints the results as a last line of JSON")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.script:
        parser.error("which script?")
    import ascend_parallel

    os.environ["COC_VERIFY"] = options.every or os.environ.get("COC_VERIFY") or "1"
    try:
        settings = ascend_parallel.configure()
    except ascend_parallel.SettingsError as error:
        parser.error(str(error))
    if not (settings.enabled and settings.verify_every):
        parser.error("nothing to verify: export COC_PARALLEL_NUM=4, say, and let --every (COC_VERIFY) be 1 or more")
    try:
        run(["-m", *options.script] if options.module else options.script)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        result = ascend_parallel.verification()
        if options.json and os.environ.get("RANK", "0") == "0":
            sys.stdout.write(json.dumps(result.as_dict()) + "\n")
            sys.stdout.flush()
        if "RANK" not in os.environ and not result.layers:
            sys.stderr.write(f"{result}\nnote: start it with torchrun, as the training is started\n")
    raise SystemExit(0 if result.passed else 1)


if __name__ == "__main__":
    main()
