"""A page of commands, run as a reader does who copies them one after another; what it shows is what they print."""

import os
import re
import subprocess
from pathlib import Path

from launch import COMMON, forked_python

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOSS = re.compile(r"^(step +\d+|eager) +loss (\S+)", re.MULTILINE)
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")


def steps(page):
    """The commands of a page, each with the lines that the page shows below it."""
    found = []
    for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if kind == "sh":
            found.append((text, []))
        else:
            found[-1][1].extend(text.splitlines())
    return found


def run(command, folder, frameworks=()):
    """Run a block of commands as in the root of the repository, what they write in `folder`; return their output.

    frameworks: modules that its programs begin with, beside those of `COMMON`: each would import them anew.
    """
    for name in ("examples", "docs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    silencing = ("OMP_NUM_THREADS", "PYTHONWARNINGS")  # a reader's shell has none of them
    kept = {name: value for name, value in os.environ.items() if "COC_" not in name and name not in silencing}
    kept |= {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    kept["PATH"] = f"{Path(forked_python(*COMMON, *frameworks)).parent}{os.pathsep}{kept['PATH']}"
    kept["XDG_CACHE_HOME"] = str(folder / "cache")
    words = ["bash", "-euo", "pipefail", "-c", command]
    ended = subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, f"{command}{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


def missing(shown, printed):
    """The lines of a page that no line of the output is like: other numbers and spaces are alike, "..." is any text."""
    lines = [_plain(line) for line in printed.splitlines()]
    return [line for line in shown if not any(re.fullmatch(_pattern(line), each) for each in lines)]


def unshown(shown, printed):
    """The lines of the output that no line of a page is like: what scrolls by, and the page does not say so."""
    lines = [line for line in printed.splitlines() if line.strip()]
    return [line for line in lines if not any(re.fullmatch(_pattern(each), _plain(line)) for each in shown)]


def _pattern(line):
    return ".*" if line.strip() == "..." else ".*".join(re.escape(part) for part in _plain(line).split("..."))


def _plain(line):
    return re.sub(r"[\s─━]+", " ", NUMBER.sub("#", line)).strip()


def walk(page, folder, frameworks=()):
    """Run all commands of a page, see that they print what it shows, and return each one's output; as `run`."""
    printed = []
    for command, shown in steps(page):
        printed.append(run(command, folder, frameworks))
        assert missing(shown, printed[-1]) == [], printed[-1]
        assert other_losses(shown, printed[-1]) == [], printed[-1]
    return printed


def other_losses(shown, printed):
    """The lines of a page whose loss is not that of the run: to nine digits, or to those shown before "..."."""
    ran = {name: float(loss) for name, loss in LOSS.findall(printed)}
    wrong = []
    for line in shown:
        found = LOSS.match(line)
        loss = ran.get(found[1]) if found else None
        if found and (loss is None or abs(float(found[2].rstrip(".")) - loss) > _tolerance(found[2]) * abs(loss)):
            wrong.append(line)
    return wrong


def _tolerance(loss):
    return 2e-5 if loss.endswith("...") else 1e-9


def losses(printed):
    """The losses of a run's output, as they were printed: every digit."""
    return re.findall(r"^step +\d+ +loss (\S+)", printed, re.MULTILINE)
