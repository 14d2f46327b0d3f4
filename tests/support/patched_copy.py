"""A copy of an installed file with a `change.diff` of contrib/ applied."""

import re
import subprocess
from pathlib import Path


def patched(change: Path, installed: Path, folder: Path) -> Path:
    """Copy `installed` into `folder` under the path that the diff names, apply the diff there, and return the file."""
    (name,) = re.findall(r"^\+\+\+ b/(.+)$", change.read_text(), flags=re.MULTILINE)
    file = folder / name
    file.parent.mkdir(parents=True)
    file.write_bytes(installed.read_bytes())
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "--unidiff-zero", "--whitespace=error", str(change)], cwd=folder, check=True)
    return file
