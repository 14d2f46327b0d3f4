"""Fresh environments that borrow what is installed here: nothing is downloaded, and torch is not installed again."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def environment(folder, without=()):
    """Make a virtual environment in `folder` that has what this one has, but for what begins with one of `without`.

    Returns its Python. What is borrowed are links; what is installed into it stays in `folder`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    bases = {"base": str(folder), "platbase": str(folder)}
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10 has no scheme "venv"
    site = Path(sysconfig.get_path("purelib", scheme, bases))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lstrip("_").startswith(tuple(without)):
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def call(python, *arguments, timeout=120, cwd=None, **variables):
    """Run `python` with `arguments`, none of our variables set but `variables`; return the ended process.

    It finds what its environment has: PYTHONPATH, which may name this tree, is not handed on.
    """
    environ = {name: value for name, value in os.environ.items() if "COC" not in name and name != "PYTHONPATH"}
    environ |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
