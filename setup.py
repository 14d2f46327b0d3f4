"""Where the packages lie, the C++ extension, and the README of a package index: what pyproject.toml cannot say.

ops/ and patches/ stand at the top of the tree, next to ascend_parallel/, and install below it.
"""

import re
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

HERE = Path(__file__).parent
ROOMS = {
    "ascend_parallel": "ascend_parallel",
    "ascend_parallel.ops": "ops",
    "ascend_parallel.patches": "patches",
    "ascend_parallel_autoload": "ascend_parallel_autoload",
}
SOURCES = ("sum", "segment", "communicator", "products", "chunk_loop", "module")


def packages() -> list[str]:
    """Name every package once, below the name it is imported by.

    ascend_parallel/ops and ascend_parallel/patches are symbolic links for in-tree tools; the
    packages are found through the real folders so that a checkout without links builds too.
    """
    found = set()
    for name, folder in ROOMS.items():
        found.add(name)
        found.update(f"{name}.{sub}" for sub in find_packages(folder))
    return sorted(found)


def readme() -> str:
    """Return README.md with its relative links made absolute: a package index shows neither images nor pages of a tree.

    They lead to the repository that pyproject.toml names, at the tag of this version.
    """
    home = re.search(r'^Repository = "(.+)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    version = runpy.run_path(str(HERE / "ascend_parallel" / "version.py"))["__version__"]
    assert home is not None

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({home[1]}/{kind}/v{version}/{link['target']})"

    relative = r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<target>[^)]+)\)"
    return re.sub(relative, absolute, (HERE / "README.md").read_text(encoding="utf-8"))


class Wheel(bdist_wheel):
    """A wheel whose name says against which torch its C++ extension was compiled: the build tag ``1torch2.13``.

    A wheel without the extension, because no compiler was found, is one of pure Python by its name too.
    """

    def run(self) -> None:
        """Build the wheel."""
        self.run_command("build")
        extensions = self.get_finalized_command("build_ext")
        if self.distribution.ext_modules and not any(Path(path).exists() for path in extensions.get_outputs()):
            self.distribution.ext_modules = []
            self.build_number, self.root_is_pure = None, True
            self.data_dir = f"{self.wheel_dist_name}.data"
        super().run()


def extension() -> dict[str, object]:
    """Build the C++ extension where torch and a compiler are at hand; go without it where not.

    It has the shared-memory kernel and the loop of chunks.

    It is compiled against the torch that is installed (--no-build-isolation): an isolated build sees
    none, or another one. Its name has the version of that torch, whose C++ interface may change with each minor
    version; `ops/shm.py` loads the one of the torch that runs. `ascend_parallel.status()` says when it is missing.
    """
    if not sys.platform.startswith("linux"):
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        sys.stderr.write("ascend_parallel: torch is not to be seen while building, so the C++ extension is left out\n")
        return {}
    major, minor = torch.__version__.split(".")[:2]
    shm = CppExtension(
        f"ascend_parallel.ops._shm_torch_{major}_{minor}",
        [f"ops/csrc/{name}.cpp" for name in SOURCES],
        depends=[f"ops/csrc/{name}.h" for name in SOURCES[:-1]],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden"],
        libraries=["rt"],
        optional=True,
    )

    class Build(BuildExtension):
        """Build with the compiler alone: ninja is not asked for. No options are passed on; setuptools 77 takes none."""

        def __init__(self, distribution: Distribution) -> None:
            super().__init__(distribution)
            self.use_ninja = False

    return {
        "ext_modules": [shm],
        "cmdclass": {"build_ext": Build, "bdist_wheel": Wheel},
        "options": {"bdist_wheel": {"build_number": f"1torch{major}.{minor}"}},
    }


setup(
    packages=packages(),
    package_dir=ROOMS,
    long_description=readme(),
    long_description_content_type="text/markdown",
    **extension(),
)
