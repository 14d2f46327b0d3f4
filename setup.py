"""Where the packages lie, and the C++ extension: what pyproject.toml cannot say.

ops/ and patches/ stand at the top of the tree, next to ascend_parallel/, and install below it.
"""

import sys

from setuptools import find_packages, setup

ROOMS = {"ascend_parallel": "ascend_parallel", "ascend_parallel.ops": "ops", "ascend_parallel.patches": "patches"}
SOURCES = ("sum", "segment", "communicator", "module")


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


def extension() -> dict[str, object]:
    """Build the shared-memory kernel where torch and a compiler are at hand; go without it where not.

    It is compiled against the torch that is installed (--no-build-isolation): an isolated build sees
    none, or another one. `ascend_parallel.status()` says when it is missing.
    """
    if not sys.platform.startswith("linux"):
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        sys.stderr.write("ascend_parallel: torch is not to be seen while building, so the C++ extension is left out\n")
        return {}
    shm = CppExtension(
        "ascend_parallel.ops._shm",
        [f"ops/csrc/{name}.cpp" for name in SOURCES],
        depends=[f"ops/csrc/{name}.h" for name in SOURCES[:-1]],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden"],
        libraries=["rt"],
        optional=True,
    )
    return {"ext_modules": [shm], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)}}


setup(packages=packages(), package_dir=ROOMS, py_modules=["ascend_parallel_autoload"], **extension())
