"""Megatron-core's unit tests on 2 ranks, plain and overlapped: `python megatron_core.py <checkout of Megatron-LM>`."""

import sys
from pathlib import Path

from suite import Suite, main

LAYERS = {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "megatron"}

main(
    Suite(
        checkout=Path(sys.argv[1]),
        arguments=(
            "-p",
            "two_ranks_on_cpu",
            "--timeout",
            "120",
            *(
                sys.argv[2:]
                or (
                    "tests/unit_tests/tensor_parallel",
                    "tests/unit_tests/transformer",
                    "tests/unit_tests/models",
                    "--ignore",
                    "tests/unit_tests/transformer/moe",
                )
            ),
        ),
        variants={"layers": LAYERS, "regions": LAYERS | {"COC_REGION": "1"}},
        ranks=2,
    )
)
