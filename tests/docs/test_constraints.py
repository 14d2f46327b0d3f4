"""constraints.txt pins everything that `make` installs: what pyproject.toml names, and what that brings with it."""

import importlib.metadata
from pathlib import Path

import pytest
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


def named():
    """The requirements of the package with all that `make` asks for, but for the package itself."""
    tomllib = pytest.importorskip("tomllib", reason="Python is older than 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = ("megatron", "transformers", "plot", "sharding", "test", "docs", "dev")
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
