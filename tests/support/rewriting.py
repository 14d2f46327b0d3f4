"""Test files imported in other processes with their assertions rewritten, as pytest does in its own."""

import ast
import functools
import importlib.util
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

TESTS = Path(__file__).parents[1]


class Loader(SourceFileLoader):
    """Compiles a file with its assertions rewritten, and caches that beside what Python caches of the file."""

    def source_to_code(self, data, path, *, _optimization=-1):
        tree = ast.parse(data)
        rewrite_asserts(tree, data, path, None)
        return compile(tree, path, "exec", dont_inherit=True)

    def get_data(self, path):
        return super().get_data(_own_cache(path))

    def set_data(self, path, data, **options):
        super().set_data(_own_cache(path), data, **options)


def _own_cache(path):
    return f"{path.removesuffix('.pyc')}-ranks-{pytest.__version__}.pyc" if path.endswith(".pyc") else path


class Finder:
    """Finds what `sys.path` has below tests/."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or TESTS not in Path(spec.origin).parents:
            return None
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=Loader(fullname, spec.origin))


def install():
    """Rewrite the assertions of every test file that is imported from now on."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


@functools.cache
def compiled(file):
    """Compile a test file, unless that is cached: several processes are about to load it at the same time."""
    return Loader(Path(file).stem, file).get_code(Path(file).stem)


def load(file):
    """Import a test file by its path."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
