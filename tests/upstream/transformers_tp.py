"""transformers' tests of tensor-parallel models, plain and overlapped: `python transformers_tp.py <checkout>`."""

import sys
from pathlib import Path

from suite import Suite, main

main(
    Suite(
        checkout=Path(sys.argv[1]),
        arguments=(
            "-k",
            "test_tp_",
            *(sys.argv[2:] or ["tests/models/qwen3/test_modeling_qwen3.py"]),
        ),
        environment={"RUN_TENSOR_PARALLEL_TESTS": "1"},
        variants={"overlapped": {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "transformers"}},
    )
)
