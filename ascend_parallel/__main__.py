"""``python -m ascend_parallel``: run a script with overlap, or the command line.

``run`` and ``verify`` use only the standard library here, because they run inside training processes, which should not
import the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

HELP = (["-h"], ["--help"])


def main() -> None:
    """Run the command named on the command line."""
    import ascend_parallel

    refused = ascend_parallel._control.refused
    if refused is not None and sys.argv[1:2] in (["run"], ["verify"], ["status"]):
        sys.stderr.write(f"ascend-parallel: {refused}\n")
        raise SystemExit(2)
    if sys.argv[1:2] in (["run"], ["verify"]) and sys.argv[2:3] in ([], *HELP):
        _help()
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    elif sys.argv[1:2] == ["verify"]:
        verify(sys.argv[2:])
    else:
        from ascend_parallel.cli.app import app

        app(prog_name="ascend-parallel")


def _help() -> NoReturn:
    """Print the help of `run` or `verify` as the other commands print theirs; exit with 2 if it was not asked for."""
    from ascend_parallel.cli.app import app

    with contextlib.suppress(SystemExit):
        app([sys.argv[1], "--help"], prog_name="ascend-parallel")
    raise SystemExit(0 if sys.argv[2:] else 2)


def run(arguments: list[str]) -> None:
    """Run ``[-m] SCRIPT [ARGUMENT ...]`` as Python would; the patches are applied before the script's first import."""
    as_module = arguments[:1] == ["-m"]
    script = arguments[1:2] if as_module else arguments[:1]
    if not script:
        sys.stderr.write("python -m ascend_parallel run: give a script; --help shows how\n")
        raise SystemExit(2)
    import ascend_parallel  # noqa: F401  reads the environment and patches

    sys.argv = arguments[1:] if as_module else arguments
    if as_module:
        sys.path.insert(0, str(Path.cwd()))  # python -m sets this entry, a console script does not
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        return
    if not Path(script[0]).is_file():
        sys.stderr.write(f"python -m ascend_parallel run: no such file: {script[0]!r}\n")
        raise SystemExit(2)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


def verify(arguments: list[str]) -> None:
    """Run ``[--every N] [--json] [-m] SCRIPT [ARGUMENT ...]`` as `run` does, verified; exit with 1 on failure."""
    parser = argparse.ArgumentParser(
        usage="python -m ascend_parallel verify [--help] [--every N] [--json] [-m] SCRIPT [ARGUMENT ...]",
        add_help=False,
    )
    parser.add_argument("--every", metavar="N", help="check the first and then every N-th call (COC_VERIFY, or 1)")
    parser.add_argument("--json", action="store_true", help="rank 0 prints the results as a last line of JSON")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.script:
        parser.error("give a script")
    import ascend_parallel

    os.environ["COC_VERIFY"] = options.every or os.environ.get("COC_VERIFY") or "1"
    try:
        settings = ascend_parallel.configure()
    except ascend_parallel.SettingsError as error:
        parser.error(str(error))
    if not (settings.enabled and settings.verify_every):
        parser.error(
            "nothing to verify: export COC_PARALLEL_NUM=4, for example, and give --every (COC_VERIFY) 1 or more"
        )
    try:
        run(["-m", *options.script] if options.module else options.script)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        results = ascend_parallel.verification()
        if options.json and os.environ.get("RANK", "0") == "0":
            sys.stdout.write(json.dumps(results.as_dict()) + "\n")
            sys.stdout.flush()
        if "RANK" not in os.environ and not results.layers:
            sys.stderr.write(f"{results}\nnote: start it with torchrun, like the training\n")
    raise SystemExit(0 if results.passed else 1)


if __name__ == "__main__":
    main()
