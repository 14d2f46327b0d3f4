"""What is known of a framework before it is imported stands in one table, ascend_parallel_autoload/frameworks.py."""

import ast

import pytest
from messages import ROOT, files

from ascend_parallel.patches.applied import FRAMEWORK_PATCHES
from ascend_parallel_autoload.frameworks import FRAMEWORKS, MINDSPEED_COC

TABLE = ROOT / "ascend_parallel_autoload" / "frameworks.py"
MODULES = {module for framework in FRAMEWORKS for module in (framework.module, *framework.before)} | {*MINDSPEED_COC}
NAMES = [{framework.name for framework in FRAMEWORKS}, {framework.title for framework in FRAMEWORKS}]


def texts(node):
    return {each.value for each in node if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def doubles(source):
    """Yield the lines that name the module of a framework's layers, or list frameworks."""
    for node in ast.walk(ast.parse(source)):
        listed = texts(node.elts) if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else set()
        listed |= texts(node.keys) if isinstance(node, ast.Dict) else set()
        alone = texts([node])
        if alone & MODULES or any(len(listed & names) > 1 for names in NAMES):
            yield f"{node.lineno}: {sorted(alone | listed)}"


def test_every_framework_of_the_table_has_patches_and_no_other():
    assert [patch.name for patch in FRAMEWORK_PATCHES] == [framework.name for framework in FRAMEWORKS]
    assert [patch.module for patch in FRAMEWORK_PATCHES] == [framework.module for framework in FRAMEWORKS]


def test_no_other_file_lists_frameworks_or_names_the_modules_of_their_layers():
    found = {str(file): [*doubles(file.read_text(encoding="utf-8"))] for file in files() if file != TABLE}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["KNOWN = ('vllm', 'torch')", "BUILDS = {'megatron-core': 1, 'vllm': 2}", f"M = '{FRAMEWORKS[0].module}'"]
)
def test_a_second_list_is_seen(line):
    assert [*doubles(line)]
