"""Megatron-core's unit tests on 2 ranks, plain and overlapped: `python megatron_core.py <checkout of Megatron-LM>`."""

import sys
from pathlib import Path

from suite import Suite, main

TESTS = "tests/unit_tests"
FILES = (
    "tensor_parallel",
    *(f"transformer/test_{name}.py" for name in ("mlp", "attention", "transformer_layer", "transformer_block")),
)
LAYERS = {"COC_PARALLEL_NUM": "2", "COC_CHUNK_ROWS": "1", "COC_FRAMEWORKS": "megatron"}
REGIONS = {"COC_REGION": "1", "COC_CONFIG": str(Path(__file__).with_name("small_regions.toml").resolve())}

main(
    Suite(
        checkout=Path(sys.argv[1]),
        arguments=(
            *("-p", "two_ranks_on_cpu", "--timeout", "120"),
            *("-o", "addopts=", "--continue-on-collection-errors"),  # Megatron's own options stop at the first failure
            *(sys.argv[2:] or (f"{TESTS}/{file}" for file in FILES)),
        ),
        variants={"layers": LAYERS, "regions": LAYERS | REGIONS},
        ranks=2,
    )
)
