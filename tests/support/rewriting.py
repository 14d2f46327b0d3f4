"""Test files imported in other processes with their assertions rewritten, as pytest does in its own."""

import ast
import importlib.util
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from _pytest.assertion.rewrite import rewrite_asserts

TESTS = Path(__file__).parents[1]


class Loader(SourceFileLoader):
    """Compiles a file with its assertions rewritten; caches nothing."""

    def get_code(self, fullname):
        source = self.get_data(self.path)
        tree = ast.parse(source)
        rewrite_asserts(tree, source, self.path, None)
        return compile(tree, self.path, "exec", dont_inherit=True)


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


def load(file):
    """Import a test file by its path."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
