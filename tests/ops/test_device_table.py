"""What differs between types of devices stands in one table, ascend_parallel/devices.py; backends in backend.py."""

import ast

import pytest
from messages import ROOT, files

from ascend_parallel.devices import DEVICES, device_type
from ascend_parallel.process_groups.backend import ROWS, usual_backend
from ascend_parallel.tuning.cost_model.hardware import all_hardware, find_hardware

TABLES = {ROOT / "ascend_parallel" / "devices.py", ROOT / "ascend_parallel" / "process_groups" / "backend.py"}
NAMES = [{*DEVICES}, {row.backend for row in DEVICES.values()}]


def doubles(source):
    """Yield the lines that list types of devices, or their backends."""
    for node in ast.walk(ast.parse(source)):
        listed = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else ()
        listed = node.keys if isinstance(node, ast.Dict) else listed
        texts = {each.value for each in listed if isinstance(each, ast.Constant) and isinstance(each.value, str)}
        if any(len(texts & names) > 1 for names in NAMES):
            yield f"{node.lineno}: {sorted(texts)}"


def test_no_other_file_has_a_table_by_type_of_device_or_by_backend():
    found = {str(file): [*doubles(file.read_text(encoding="utf-8"))] for file in files() if file not in TABLES}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["UNITS = {'cuda': 132, 'npu': 32}", "IN_PLACE = ('cpu', 'npu')", "A = ['gloo', 'hccl']"]
)
def test_a_second_table_is_seen(line):
    assert [*doubles(line)]


def test_every_device_has_a_backend_and_hardware_of_its_own():
    for name, row in DEVICES.items():
        assert usual_backend(name) is ROWS[row.backend, name]
        assert find_hardware(row.hardware).device == name
    assert {hardware.device for hardware in all_hardware().values()} == {*DEVICES}


def test_a_device_that_is_not_known_is_taken_for_an_accelerator():
    unknown = device_type("xpu")
    assert not unknown.is_host and unknown.backend == "" and unknown.chunk_rows == DEVICES["npu"].chunk_rows
    assert device_type("meta").is_host
