"""The installed torch_npu wheel: its version, the aclnn functions it names, the functions it leaves undefined.

Nothing of the wheel is imported: its ELF files are read.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from .argument_lists import OP_PLUGIN

VERSIONS = tuple(OP_PLUGIN)


class Unusable(Exception):
    """Why the emulation cannot start here."""


class Wheel:
    """The torch_npu of this environment.

    folder   its package
    version  as its metadata says
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch_npu")
        if spec is None or spec.origin is None:
            raise Unusable(f"torch_npu is not installed in this environment: pip install torch_npu=={VERSIONS[-1]}")
        self.folder = Path(spec.origin).parent
        self.version = importlib.metadata.version("torch_npu")
        if self.version not in VERSIONS:
            raise Unusable(
                f"torch_npu is {self.version}; emulated_ascend knows the argument lists of {', '.join(VERSIONS)} alone"
            )
        for tool in ("g++", "nm"):
            if shutil.which(tool) is None:
                raise Unusable(f"no {tool} on the path: the emulated libraries are compiled where they are used")

    @property
    def headers(self) -> list[Path]:
        """Folders of the wheel's public headers of acl and HCCL."""
        return [self.folder / "include/third_party" / part for part in ("acl/inc", "hccl/inc")]

    @property
    def libraries(self) -> list[Path]:
        """The wheel's ELF files."""
        return [*self.folder.glob("_C*.so"), *sorted(self.folder.glob("lib/*.so"))]

    def operators(self) -> list[str]:
        """Name the aclnn functions that the wheel can call, without those that only size a workspace."""
        names: set[str] = set()
        for library in self.libraries:
            names |= {word.decode() for word in re.findall(rb"\0(aclnn[A-Za-z0-9]+)(?=\0)", library.read_bytes())}
        return sorted(name for name in names if f"{name}GetWorkspaceSize" in names)

    def undefined(self) -> list[str]:
        """Name the functions that the wheel leaves to CANN: undefined in it, defined neither in it nor in torch."""
        torch_spec = importlib.util.find_spec("torch")
        assert torch_spec is not None and torch_spec.origin is not None
        torch_libraries = sorted((Path(torch_spec.origin).parent / "lib").glob("*.so*"))
        wanted = _symbols("--undefined-only", self.libraries)
        defined = _symbols("--defined-only", [*self.libraries, *torch_libraries])
        return sorted(name for name in wanted - defined if name.startswith(("acl", "rt", "Hccl", "Msprof", "_ZN3atb")))


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, *map(str, libraries)], capture_output=True, text=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return {row[-1].partition("@")[0] for row in rows if len(row) >= 2 and row[-2] not in "wv"}
