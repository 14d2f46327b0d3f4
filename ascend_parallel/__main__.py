"""``python -m ascend_parallel``: runs a script with overlap, or the command line.

``run`` and ``verify`` are dealt with here, by the standard library alone: they run inside training
processes, which should not pay for importing a command line.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m ascend_parallel run [-m] SCRIPT [ARGUMENT ...]

Run a training script, or with -m a module, with overlap as COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL
say, for programs started with TORCH_DEVICE_BACKEND_AUTOLOAD=0:

  COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel run pretrain_gpt.py --num-layers 32
"""

VERIFY = """Run a training script, or with -m a module, with overlap, and check its layers against Megatron-core's own.

Ends with 0 if something was checked and nothing was over the limit, else with 1; a table of the largest
errors goes to the log of rank 0. Start it as the training is started, on every rank:

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
    """Run ``[-m] SCRIPT [ARGUMENT ...]`` as if Python had been given it; overlap is on from the first import."""
    as_module = arguments[:1] == ["-m"]
    script = arguments[1:2] if as_module else arguments[:1]
    if not script or script[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        raise SystemExit(0 if script else 2)
    import ascend_parallel  # noqa: F401  reads the environment and patches

    sys.argv = arguments[1:] if as_module else arguments
    if as_module:
        sys.path.insert(0, str(Path.cwd()))  # as python -m has it, and a console script has not
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    if not Path(script[0]).is_file():
        sys.stderr.write(f"python -m ascend_parallel run: there is no file {script[0]!r}\n")
        raise SystemExit(2)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


def verify(arguments: list[str]) -> None:
    """Run ``[--every N] [--json] [-m] SCRIPT [ARGUMENT ...]`` as `run` does, verified; end with 1 if that fails."""
    parser = argparse.ArgumentParser(
        usage="python -m ascend_parallel verify [-h] [--every N] [--json] [-m] SCRIPT [ARGUMENT ...]",
        description=VERIFY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--every", metavar="N", help="check the first and then every N-th call (COC_VERIFY, or 1)")
    parser.add_argument("--json", action="store_true", help="rank 0 prints what was found as a last line of JSON")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if not asked.script:
        parser.error("which script?")
    import ascend_parallel

    os.environ["COC_VERIFY"] = asked.every or os.environ.get("COC_VERIFY") or "1"
    try:
        settings = ascend_parallel.configure()
    except ascend_parallel.SettingsError as error:
        parser.error(str(error))
    if not (settings.enabled and settings.verify_every):
        parser.error("nothing to verify: export COC_PARALLEL_NUM=4, say, and let --every (COC_VERIFY) be 1 or more")
    try:
        run(["-m", *asked.script] if asked.module else asked.script)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        found = ascend_parallel.verification()
        if asked.json and os.environ.get("RANK", "0") == "0":
            sys.stdout.write(json.dumps(found.as_dict()) + "\n")
            sys.stdout.flush()
        if "RANK" not in os.environ and not found.layers:
            sys.stderr.write(f"{found}\nnote: start it with torchrun, as the training is started\n")
    raise SystemExit(0 if found.passed else 1)


if __name__ == "__main__":
    main()
