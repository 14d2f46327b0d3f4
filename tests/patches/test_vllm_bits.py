"""From how many rows on matmuls keep their bits: with planted kernels, and on two ranks that find different answers."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ascend_parallel.ops import CollectiveError
from ascend_parallel.patches.vllm.bits import LayerMatmul, ask, least_rows, probed_rows
from ascend_parallel.patches.vllm.chunks import ladder_of, token_chunks

CPU = torch.device("cpu")
LADDER = ladder_of("cpu")
WIDE = LayerMatmul(8, 4, torch.float32, False, "UnquantizedLinearMethod")
NARROW = LayerMatmul(4, 8, torch.bfloat16, True, "CompressedTensorsWNA16")


def of_another_routine_below(rows):
    """Return a kernel that rounds otherwise for fewer rows."""
    return lambda x: x * (1 if x.shape[0] >= rows else 1 + 2**-6)


def by_its_largest_row(x):
    return x / x.abs().max()


@pytest.mark.parametrize(
    ("multiply", "least"),
    [
        (of_another_routine_below(0), 128),
        (of_another_routine_below(128), 128),
        (of_another_routine_below(129), 256),
        (of_another_routine_below(194), 256),
        (of_another_routine_below(700), 1024),
        (of_another_routine_below(1600), None),
        (by_its_largest_row, None),
    ],
)
def test_the_first_step_from_which_on_a_row_has_the_same_bits(multiply, least):
    assert least_rows(WIDE, multiply, LADDER, 2304, CPU) == least


@pytest.mark.parametrize("most", [300, 2304, 8192])
def test_every_number_of_rows_is_one_that_chunks_have(most):
    rows = probed_rows(LADDER, most)
    assert min(rows) == LADDER[0] and max(rows) < most
    assert min(min(token_chunks(tokens, 4, "cpu")) for tokens in range(256, most)) == LADDER[0]


def asked(group, below):
    """Return what both ranks take if this one's kernel changes below some rows."""
    matmuls = {WIDE: of_another_routine_below(0), NARROW: of_another_routine_below(below[group.rank()])}
    found = ask(matmuls, LADDER, 2304, group, CPU)
    return found.least, found.others, str(found)


@pytest.mark.parametrize(
    ("below", "least", "others"),
    [
        ((0, 0), 128, ()),
        ((0, 300), 512, ()),
        ((700, 300), 1024, ()),
        ((2000, 300), 128, (str(NARROW),)),  # no chunks keep its bits, so those of every size may run
    ],
)
def test_ranks_take_the_same_chunks(ranks, below, least, others):
    for found in ranks(2).run(asked, below):
        assert found[:2] == (least, others)
        assert f"{2 - len(others)} of 2 matmuls keep their bits in chunks of {least} rows or more" in found[2]


def alone(world):
    """Ask on one rank of two."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if world.rank() == 0:
        with pytest.raises(CollectiveError, match=r"rank 1 .* has not come to the probe of which chunks keep the bits"):
            ask({WIDE: of_another_routine_below(0)}, LADDER, 2304, group, CPU)
    dist.barrier()


def test_a_rank_that_does_not_come_is_named(ranks):
    ranks(2).run(alone)
