import collections
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import settings
from pool import RankPool

# make test draws the same examples on every machine and every day; make stress draws others, and more.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Files of few tests that take 15 seconds or more, each or together.
LONG = (
    "examples/test_walkthroughs.py",
    "patches/test_compiled.py",
    "patches/test_symm_mem_example.py",
    "patches/test_symm_mem_llama.py",
    "training/test_checkpoint_strategies.py",
    "tuning/test_published_runs.py",
)
gc.disable()  # until the tests are collected: hardly any of what that imports and makes is garbage
CROWD = 16  # threads of a process, of which gloo has three for each group
_pools = {}


def megatron_version():
    megatron = Path(importlib.util.find_spec("megatron.core").origin).with_name("package_info.py").read_text()
    numbers = {line.split(" = ")[0]: line.split(" = ")[1] for line in megatron.splitlines() if " = " in line}
    return [int(numbers[part].strip("'\"")) for part in ("MAJOR", "MINOR", "PATCH")]


def pytest_report_header():
    """Name the versions that a result holds for."""
    version = ".".join(map(str, megatron_version()))
    return f"torch {importlib.metadata.version('torch')}, megatron-core {version}"


def pytest_addoption(parser):
    parser.addoption("--promise", metavar="name", help="run the tests of one row of docs/promises.md")
    parser.addoption("--part", default="1/1", metavar="k/n", help="run the k-th of n parts of the chosen tests")
    parser.addoption("--until", type=float, metavar="seconds", help="start no test after this time (of `date +%%s`)")
    parser.addoption("--order", metavar="text", help="shuffle the files by this text, such as a commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of each test marked ``sample``, mark as slow all parameter sets but so many, evenly spread, or those named."""
    for _, sets in itertools.groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        sets = list(sets)
        mark = sets[0].get_closest_marker("sample")
        if mark is None:
            continue
        if mark.args and isinstance(mark.args[0], int):
            (count,) = mark.args
            timely = [index for index, item in enumerate(sets) if item.get_closest_marker("stress") is None]
            kept = {timely[index * len(timely) // count] for index in range(count)} if timely else set()
        else:
            kept = {index for index, item in enumerate(sets) if item.callspec.id in mark.args}
            if len(kept) < len(mark.args) and not any("::" in argument for argument in config.args):
                raise pytest.UsageError(f"{sets[0].nodeid}: {mark} names a parameter set that there is not")
        for index in set(range(len(sets))) - kept:
            sets[index].add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Leave what was collected out of every later search for garbage."""
    gc.enable()
    gc.freeze()


class Promise:
    """Keep the tests that are marked with one promise."""

    @staticmethod
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(config, items):
        name = config.getoption("promise")
        kept = [item for item in items if any(name in mark.args for mark in item.iter_markers("promise"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


class Part:
    """Keep one of several parts of the chosen tests: whole files, about as many tests in each part.

    Processes that share the files (``--no-loadscope-reorder``) take them in this order: first the long ones, so that
    no process is left with one at the end while the others have nothing to do, then by their numbers of tests. With
    ``--order`` the files are shuffled: a run that its clock cuts off leaves out other files at another commit.
    """

    @staticmethod
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(config, items):
        part, parts = map(int, config.getoption("part").split("/"))
        counts = collections.Counter(item.path for item in items)
        sizes, kept = [0] * parts, set()
        for path in sorted(counts, key=lambda path: (-counts[path], path)):
            smallest = sizes.index(min(sizes))
            sizes[smallest] += counts[path]
            kept |= {path} if smallest == part - 1 else set()
        config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
        items[:] = [item for item in items if item.path in kept]
        if order := config.getoption("order"):
            files = sorted({str(item.path) for item in items})
            random.Random(order).shuffle(files)
            items.sort(key=lambda item: files.index(str(item.path)))
        elif hasattr(config, "workerinput"):
            items.sort(key=lambda item: (not str(item.path).endswith(LONG), -counts[item.path], str(item.path)))


class Clock:
    """Skip what is left once the time is over, and list in the summary how many tests of which file that are."""

    LEFT_OUT = "the time of this run was over"

    def __init__(self, until):
        self.until = until

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.time() > self.until:
            pytest.skip(self.LEFT_OUT)

    def pytest_terminal_summary(self, terminalreporter):
        skipped = terminalreporter.stats.get("skipped", [])
        files = [report.nodeid.partition("::")[0] for report in skipped if self.LEFT_OUT in str(report.longrepr)]
        if files:
            terminalreporter.section(f"{len(files)} tests were not run: {self.LEFT_OUT}")
        for name, count in sorted(collections.Counter(files).items()):
            terminalreporter.write_line(f"{count:5} {name}")


def pytest_configure(config):
    if config.getoption("until"):
        config.pluginmanager.register(Clock(config.getoption("until")))
    if config.getoption("promise"):
        config.pluginmanager.register(Promise())
    config.pluginmanager.register(Part())


@pytest.fixture(scope="session")
def ranks():
    """Give ``ranks(n)``, a pool of n gloo processes."""

    def pool(count):
        if count not in _pools or not _pools[count].alive:
            _pools[count] = RankPool(count)
        return _pools[count]

    yield pool
    for made in _pools.values():
        made.close()
    _pools.clear()


@pytest.fixture(autouse=True, scope="module")
def _no_idle_crowd():
    """End a module's processes with it if they are many, or have many groups, whose threads wake up again and again."""
    yield
    for count in [count for count, pool in _pools.items() if count >= 8 or pool.threads > CROWD]:
        _pools.pop(count).close()
