"""DeepSpeed's tests of AutoTP, plain and overlapped: `python deepspeed_autotp.py <checkout of DeepSpeed>`."""

import sys
from pathlib import Path

from suite import Suite, main

main(
    Suite(
        checkout=Path(sys.argv[1], "tests"),
        arguments=(
            *("--timeout", "300"),
            *(sys.argv[2:] or ["unit/model_parallelism/test_tp_plan_e2e.py"]),
        ),
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DS_DISABLE_REUSE_DIST_ENV": "1"},
        variants={"overlapped": {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "deepspeed"}},
    )
)
