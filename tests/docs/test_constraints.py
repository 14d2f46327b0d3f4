"""constraints.txt pins everything that `make` installs: what pyproject.toml names, and what that brings with it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Devices' libraries, which torch's wheel with CUDA brings; the wheel for CPUs brings none of them.
OF_DEVICES = ("nvidia-", "cuda-", "triton")


def applies(requirement, extras=()):
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def pinned():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = [requirement for requirement in map(Requirement, filter(None, lines)) if applies(requirement)]
    assert all(str(one.specifier).startswith("==") for one in found)
    return [canonicalize_name(one.name) for one in found]


def named(asked=("megatron", "transformers", "plot", "sharding", "test", "docs", "dev")):
    """The requirements of the package with these extras, by default all that `make` asks for, but for itself."""
    tomllib = pytest.importorskip("tomllib", reason="Python is older than 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in asked for text in extras[extra])]
    return [one for one in map(Requirement, texts) if canonicalize_name(one.name) != "ascend-parallel" and applies(one)]


def brought(requirements):
    """These packages and all that they bring here, as far as they are installed."""
    found, left = set(), [(one.name, tuple(sorted(one.extras))) for one in requirements]
    while left:
        name, extras = left.pop()
        key = (canonicalize_name(name), extras)
        if key in found:
            continue
        found.add(key)
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = [one for one in map(Requirement, texts) if applies(one, extras)]
        left += [(one.name, tuple(sorted(one.extras))) for one in needs]
    return {name for name, _ in found}


def test_every_package_that_is_installed_is_pinned():
    wanted = brought(named())
    assert len(wanted) > 60
    assert sorted(name for name in wanted - set(pinned()) if not name.startswith(OF_DEVICES)) == []


def test_no_package_is_pinned_twice():
    pins = pinned()
    assert sorted(pins) == sorted(set(pins))


ABSENT = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in names else self.finder.find_spec(name, path, target)
names = set(sys.argv.pop(1).split(","))
sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.slow
def test_the_demo_runs_with_what_make_demo_installs(tmp_path):
    """Its comparison is imported and predicts, its training takes a step, where every other package is missing."""
    (extra,) = re.findall(r'--editable "\.\[(\w+)\]"', (ROOT / "Makefile").read_text())
    installed = {*brought(named([extra])), "setuptools", "ascend-parallel", "pip"}
    homes = importlib.metadata.packages_distributions()
    for copied in (Path(setuptools.__file__).parent / "_vendor").iterdir():  # setuptools has its own of these
        homes.pop(copied.name.removesuffix(".py"), None)
    absent = [name for name, all_ in homes.items() if not installed & {canonicalize_name(one) for one in all_}]
    assert {"scipy", "transformers", "matplotlib"} <= {*absent} and not {"torch", "megatron", "rich"} & {*absent}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {
        **os.environ,
        **rank,
        "GLOO_SOCKET_IFNAME": "lo",
        "COC_PARALLEL_NUM": "4",
        "PYTHONPATH": str(ROOT / "examples/gpt"),
    }
    for code in ("import compare; print(compare.predicted_gain())", "import train; train.main()"):
        words = [sys.executable, "-c", ABSENT + code, ",".join(absent), "--steps", "1"]
        ended = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        assert "Predicted" in ended.stdout or "step   0" in ended.stdout
