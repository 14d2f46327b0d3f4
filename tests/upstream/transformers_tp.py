"""transformers' tests of tensor-parallel models, plain and overlapped: `python transformers_tp.py <checkout>`."""

import sys
from pathlib import Path

from suite import Suite, main

MODELS = ("qwen2", "qwen3", "qwen3_moe", "glm4_moe")

main(
    Suite(
        checkout=Path(sys.argv[1]),
        arguments=(
            "-k",
            "test_tp_",
            *(sys.argv[2:] or [f"tests/models/{model}/test_modeling_{model}.py" for model in MODELS]),
        ),
        environment={"RUN_TENSOR_PARALLEL_TESTS": "1"},
        variants={"overlapped": {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "transformers"}},
    )
)
