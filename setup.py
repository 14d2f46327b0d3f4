"""Where the packages lie: ops/ and patches/ stand at the top of the tree, next to ascend_parallel/.

All other metadata is in pyproject.toml.
"""

from setuptools import find_packages, setup

ROOMS = {"ascend_parallel": "ascend_parallel", "ascend_parallel.ops": "ops", "ascend_parallel.patches": "patches"}


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


setup(packages=packages(), package_dir=ROOMS, py_modules=["ascend_parallel_autoload"])
