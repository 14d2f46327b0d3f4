"""`ascend_parallel.explain` with COC_REGION: how a matmul runs inside a region."""

import pytest
import torch

import ascend_parallel
from ascend_parallel import Matmul, Settings

FINISHED = "COC_REGION=1: rows are finished in the layer: "
WAITED = "rows are waited for where they are read, in 4 chunks"
SAID = {  # operator, rows, settings, the line about regions
    "chunks": ("matmul_all_reduce", 1024, {}, f"COC_REGION=1: {WAITED}"),
    "few rows": ("matmul_all_reduce", 150, {}, f"{FINISHED}150 rows in 4 chunks, at least 64 in each (region_rows)"),
    "one chunk": ("matmul_reduce_scatter", 16, {}, f"{FINISHED}its kernel has no chunks that can be waited for"),
    "auto": ("matmul_reduce_scatter", 1024, {"region": "auto"}, f"COC_REGION=auto: {WAITED}"),
    "deterministic": ("matmul_all_reduce", 1024, {"deterministic": True}, f"COC_REGION=1: {WAITED}"),
}


@pytest.mark.parametrize("operator, rows, settings, line", SAID.values(), ids=SAID)
def test_the_region_is_explained(operator, rows, settings, line):
    problem = Matmul(operator, rows, 1024, 1024, torch.float32, "cpu", 2)
    assert line in str(ascend_parallel.explain(problem, Settings(**{"num_chunks": 4, "region": True, **settings})))
    assert "REGION" not in str(ascend_parallel.explain(problem, Settings(num_chunks=4)))
