"""Random shapes, chunk counts and dtypes, for longer than CI has time for: make stress."""

import random

import pytest
import torch
from test_linear import check_column, check_row

from ascend_parallel import Settings

pytestmark = pytest.mark.stress


def many(group, seed, rounds):
    draw = random.Random(seed)
    for _ in range(rounds):
        leading = [draw.randint(1, 200)] + [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
        dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
        settings = Settings(
            num_chunks=draw.randint(1, 12),
            mode=2,
            recompute_all_gather=draw.random() < 0.5,
            order=draw.choice(["auto", "compute_first", "communicate_first"]),
        )
        sequence_parallel = draw.random() < 0.5
        if sequence_parallel:
            leading[0] *= group.size()
        check = draw.choice([check_column, check_row])
        check(group, (*leading, draw.randint(1, 300)), dtype, settings, sequence_parallel)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_random_layers_match_the_truth(ranks, count, seed):
    ranks(count).run(many, seed, 60)
