"""``python -m ascend_parallel``: run a script with overlap, or the command line.

``run`` and ``verify`` use only the standard library here, because they run inside training processes, which should not
import the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

HELP = (["-h"], ["--help"], ["--version"])


def main() -> None:
    """Run the command named on the command line."""
    if sys.argv[1:2] not in (["run"], ["verify"]):
        if sys.argv[1:2] == ["try"] and any(word.startswith("--emulated") for word in _own_words()):
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu loads in the emulation alone
        from ascend_parallel.cli.app import app

        app(prog_name="ascend-parallel")
    if sys.argv[2:3] in ([], *HELP):
        _answer()
    _read_environment()
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    else:
        verify(sys.argv[2:])


def _own_words() -> list[str]:
    """Return the words of the command line without those of the user's command."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return sys.argv[2:end]


def _read_environment() -> None:
    """Read the settings, and patch; end with 2 and an error in one line if they are refused."""
    from ascend_parallel.patch_control import CONTROL

    CONTROL.configure_once(os.environ)
    if CONTROL.refused is not None:
        _refuse("ascend-parallel", str(CONTROL.refused))


def _answer() -> NoReturn:
    """Print the help or version of `run` or `verify` as the other commands do; exit with 2 if none was asked for."""
    from ascend_parallel.cli.app import app

    asked = "--version" if sys.argv[2:3] == ["--version"] else "--help"
    with contextlib.suppress(SystemExit):
        app([sys.argv[1], asked], prog_name="ascend-parallel")
    raise SystemExit(0 if sys.argv[2:] else 2)


def _refuse(command: str, message: str) -> NoReturn:
    """End with 2 and an error in one line, as the other commands do."""
    sys.stderr.write(f"{command}: {message}\n")
    raise SystemExit(2)


def _refuse_missing(command: str, script: str, as_module: bool) -> None:
    """End with 2 if a script is not there, or a module, which is looked for in the current folder first."""
    if not as_module:
        if not Path(script).is_file():
            _refuse(command, f"no such file: {script!r}")
        return
    sys.path.insert(0, str(Path.cwd()))  # python -m sets this entry, a console script does not
    if not _is_module(script):
        hint = ": leave out .py, or -m" if script.endswith(".py") else ""
        _refuse(command, f"no module named {script!r}{hint}")


def _is_module(name: str) -> bool:
    """Tell whether there is a module; of what contains it packages alone are imported, as Python does."""
    parts = name.split(".")
    if not all(parts):
        return False
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        try:
            found = importlib.util.find_spec(path)
        except ValueError:
            if path not in sys.modules:  # raised by a package that is there
                raise
            return False  # made by hand, such as __main__
        if found is None or (count < len(parts) and found.submodule_search_locations is None):
            return False
    return True


class _Parser(argparse.ArgumentParser):
    """A parser of the arguments of `verify` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with 2 and the message."""
        _refuse("verify", message)


def run(arguments: list[str]) -> None:
    """Run ``[-m] SCRIPT [ARGUMENT ...]`` as Python would; the patches are applied before the script's first import."""
    as_module = arguments[:1] == ["-m"]
    words = arguments[1:] if as_module else arguments
    if not words:
        _refuse("run", "give a script; --help shows how")
    _find("run", words, as_module)
    _execute(words[0], as_module)


def _find(command: str, words: list[str], as_module: bool) -> None:
    """Give a script its arguments, which its packages may read, and end with 2 if it is not there."""
    sys.argv = ["-m", *words[1:]] if as_module else words  # python -m has this word until it has found the file
    _refuse_missing(command, words[0], as_module)


def _execute(script: str, as_module: bool) -> None:
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def verify(arguments: list[str]) -> None:
    """Run ``[--every N] [--json] [-m] SCRIPT [ARGUMENT ...]`` as `run` does, verified; exit with 1 on failure.

    With ``--degrees 1,2,4`` start the script at these degrees instead, and compare their bits; with
    ``--against-server CHECKPOINT`` compare the logprobs of a server and a trainer.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--every")
    parser.add_argument("--degrees")
    for option in ("--against-server", "--prompts", "--tp", "--server-tp", "--new", "--dtype"):
        parser.add_argument(option)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.against_server is not None:
        _compare_with_server(parser, options)
    if not options.script:
        parser.error("give a script; --help shows how")
    if options.degrees is not None:
        _compare_degrees(parser, options)
    import ascend_parallel
    from ascend_parallel.patch_control import CONTROL
    from ascend_parallel.settings import RAREST
    from ascend_parallel.text import parse_int, shown

    if options.every is not None and not 1 <= (parse_int(options.every) or 0) <= RAREST:
        parser.error(f"--every {shown(options.every)}: give a whole number of calls from 1 to {RAREST}")
    os.environ["COC_VERIFY"] = options.every or os.environ.get("COC_VERIFY") or "1"
    try:
        settings = ascend_parallel.configure()
    except ascend_parallel.SettingsError as error:
        parser.error(str(error))
    if not (settings.enabled and settings.verify_every):
        parser.error(
            "nothing to verify: export COC_PARALLEL_NUM=4, for example, and give --every (COC_VERIFY) 1 or more"
        )
    _find("verify", options.script, options.module)
    try:
        _execute(options.script[0], options.module)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        results = CONTROL.report_verification()
        if os.environ.get("RANK", "0") == "0":
            # the report is what the command is for: no log level leaves it out
            report = f"{json.dumps(results.as_dict())}\n" if options.json else f"{results}\n"
            sys.stdout.write(report)
            sys.stdout.flush()
            if options.json:
                sys.stderr.write(f"{results}\n")
        if "RANK" not in os.environ and not results.layers:
            sys.stderr.write("note: start it with torchrun, like the training\n")
    raise SystemExit(0 if results.passed else 1)


def _compare_degrees(parser: _Parser, options: argparse.Namespace) -> NoReturn:
    """Start the script at several degrees; print the first difference and exit with 1, or print the common digest."""
    from ascend_parallel.diagnostics.degrees import DegreesError, compare_degrees, degrees_of

    if options.every is not None or options.json or "RANK" in os.environ:
        parser.error("--degrees starts the ranks itself, and takes no --every and no --json: start it without torchrun")
    try:
        script = ["-m", *options.script] if options.module else options.script
        equal, text = compare_degrees(degrees_of(options.degrees), script)
    except DegreesError as error:
        parser.error(str(error))
    sys.stdout.write(text + "\n")
    raise SystemExit(0 if equal else 1)


def _compare_with_server(parser: _Parser, options: argparse.Namespace) -> NoReturn:
    """Compare the logprobs of a checkpoint in vLLM and in transformers; exit with 1 if bits differ."""
    from dataclasses import asdict

    from ascend_parallel.diagnostics.against_server import Request, ServerError, compare_with_server, prompts_of
    from ascend_parallel.text import parse_int, shown

    if options.script or options.every is not None or options.degrees is not None or "RANK" in os.environ:
        parser.error("--against-server starts the ranks itself, and takes no script, no --every and no --degrees")
    if options.prompts is None:
        parser.error("--against-server: give --prompts FILE, a list of token ids in JSON on each line")
    numbers: dict[str, int] = {}
    for name in ("tp", "server_tp", "new"):
        text = getattr(options, name)
        if text is None:
            continue
        if (number := parse_int(text)) is None:
            parser.error(f"--{name.replace('_', '-')} {shown(text)}: give a whole number")
        numbers[name] = number
    if options.dtype not in (None, "float32", "bfloat16"):
        parser.error(f"--dtype {shown(options.dtype)}: give float32 or bfloat16")
    try:
        request = Request(
            checkpoint=options.against_server,
            prompts=prompts_of(options.prompts),
            dtype=options.dtype or "float32",
            **numbers,
        )
        result = compare_with_server(request)
    except ServerError as error:
        parser.error(str(error))
    sys.stdout.write(f"{json.dumps(asdict(result)) if options.json else result}\n")
    raise SystemExit(1 if result.first else 0)


if __name__ == "__main__":
    main()
