"""`ascend_parallel.explain` with COC_REGION: how a matmul runs inside a region."""

import pytest
import torch

import ascend_parallel
from ascend_parallel import Problem, Settings

SAID = {  # operator, rows, settings, the line about regions
    "chunks": ("matmul_all_reduce", 1024, {}, "COC_REGION=1: rows are waited for where they are read, in 4 chunks"),
    "few rows": (
        "matmul_all_reduce",
        150,
        {},
        "COC_REGION=1: rows are finished in the layer: 150 rows in 4 chunks, at least 64",
    ),
    "too few rows": (
        "matmul_reduce_scatter",
        128,
        {},
        "not in a region: 64 rows, at least 64 in a chunk (region_rows)",
    ),
    "auto": (
        "matmul_reduce_scatter",
        1024,
        {"region": "auto"},
        "COC_REGION=auto: rows are waited for where they are read, in 4 chunks",
    ),
    "deterministic": ("matmul_all_reduce", 1024, {"deterministic": True}, "its kernel has chunks of its own"),
}


@pytest.mark.parametrize("operator, rows, settings, line", SAID.values(), ids=SAID)
def test_the_region_is_explained(operator, rows, settings, line):
    problem = Problem(operator, rows, 1024, 1024, torch.float32, "cpu", 2)
    assert line in str(ascend_parallel.explain(problem, Settings(**{"num_chunks": 4, "region": True, **settings})))
    assert "REGION" not in str(ascend_parallel.explain(problem, Settings(num_chunks=4)))
