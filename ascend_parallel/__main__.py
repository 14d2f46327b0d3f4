"""``python -m ascend_parallel``: runs a script with overlap, or the command line.

``run`` is dealt with here, by the standard library alone: it runs inside training processes, which
should not pay for importing a command line.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m ascend_parallel run [-m] SCRIPT [ARGUMENT ...]

Run a training script, or with -m a module, with overlap as COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL
say, for programs started with TORCH_DEVICE_BACKEND_AUTOLOAD=0:

  COC_PARALLEL_NUM=4 torchrun --nproc-per-node 8 -m ascend_parallel run pretrain_gpt.py --num-layers 32
"""


def main() -> None:
    """Run the command named on the command line."""
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
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


if __name__ == "__main__":
    main()
