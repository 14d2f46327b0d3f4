"""Installed packages, of which some have builds under other names."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress

from ascend_parallel_autoload.frameworks import FRAMEWORKS

# Package -> the names under which other builds of it are installed.
OTHER_BUILDS = {framework.title: framework.builds for framework in FRAMEWORKS}


def installed_build(package: str) -> tuple[str, str] | None:
    """Return the name under which a package is installed, and its version; None: no build of it is."""
    for name in (package, *OTHER_BUILDS.get(package, ())):
        with suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None
