"""examples/vllm: both commands of the page print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "vllm" / "README.md"
NUMBER = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")


def run(command, folder):
    """Run a block of the page as in the root of the repository, what it writes in `folder`; return its output."""
    for name in ("examples", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    inherited = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", "-euo", "pipefail", "-c", command]
    ended = subprocess.run(
        words, cwd=folder, env={**inherited, "PATH": path}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def alike(line):
    """A line with its numbers and spaces made alike."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


@pytest.mark.slow
def test_both_commands_print_what_the_page_shows(tmp_path):
    blocks = re.findall(r"```(sh|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands, shown = ([text for kind, text in blocks if kind == one] for one in ("sh", "text"))
    printed = [run(command, tmp_path) for command in commands]
    for lines, output in zip(shown, printed, strict=True):
        made = {alike(line) for line in output.splitlines()}
        assert [line for line in lines.splitlines() if line != "..." and alike(line) not in made] == [], output
    tokens = [re.findall(r"^tokens .*", output, re.MULTILINE) for output in (*printed, *shown)]
    assert all(each == tokens[0] and len(each) == 1 for each in tokens)
