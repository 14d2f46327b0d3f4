"""torch's tests of tensor parallelism, plain and overlapped: `python torch_tp.py <checkout of pytorch>`."""

import sys
from pathlib import Path

from suite import Suite, main

FOLDER = "test/distributed/tensor/parallel"
FILES = ("test_tp_examples", "test_tp_style", "test_parallelize_api")

main(
    Suite(
        checkout=Path(sys.argv[1]),
        arguments=tuple(sys.argv[2:] or (f"{FOLDER}/{file}.py" for file in FILES)),
        variants={"overlapped": {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "torch"}},
        reasons={
            r"get_comm_counts\(\)|get_total_counts\(\)|_comm_counts": "the test counts DTensor's "
            "collectives; an overlapped layer calls its own, one for each chunk",
        },
    )
)
