"""The shared-memory kernel: every path against the truth, its bits, groups beside one another, and its choice."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from shm_cases import DTYPES, OPERATORS, check_call, pieces_of, same, segments
from test_linear import SHAPES, check_column, check_row

from ascend_parallel import Settings
from ascend_parallel.ops import COUNTS, Problem, choose, shm
from ascend_parallel.ops.registry import SMALLEST_16_BIT_PRODUCT
from ascend_parallel.ops.rows import ROW_TILE

FUSED = Settings(fused=True, enable_coc_in_column_backward=True)

pytestmark = pytest.mark.skipif(isinstance(shm.extension(), str), reason=str(shm.extension()))


def every_path(group, dtype):
    COUNTS.clear()
    for shape in SHAPES:
        check_column(group, shape, dtype, FUSED, False)
        check_row(group, shape, dtype, FUSED, False)
        if len(shape) > 1:
            rows = (shape[0] * group.size(), *shape[1:])
            check_column(group, rows, dtype, FUSED, True)
            check_row(group, rows, dtype, FUSED, True)
    assert shm.reach(group) is None
    return COUNTS.as_dict()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_path_matches_the_truth(ranks, count, dtype):
    for counts in ranks(count).run(every_path, dtype):
        assert set(counts) == set(OPERATORS)
    assert segments() == []


# Rows per rank, K, N. Few rows, odd ones, one column, no rows; then, for small pieces, rows of several pieces, with and
# without a tail, 16-bit products too small to be cut, and fp32 ones whose bits a cut at such odd rows does change.
FEW_ROWS = [(5, 32, 48), (9, 96, 200), (177, 4, 24), (7, 1, 1), (300, 3, 129), (0, 8, 8), (3, 64, 2048)]
MANY_ROWS = [(1024, 64, 96), (769, 96, 64), (785, 130, 130), (1024, 3, 5), (1023, 2, 40)]
CHANGED_BY_CUTS = [(643, 73, 1), (715, 26, 10), (1217, 114, 10), (1211, 11, 11)]


def bits(group, dtype):
    cases = [*itertools.product(OPERATORS, FEW_ROWS)]
    in_pieces = [*itertools.product(OPERATORS, MANY_ROWS + FEW_ROWS[:3] + 3 * CHANGED_BY_CUTS)]
    for seed, (operator, (rows, k, n)) in enumerate(cases):
        check_call(group, operator, dtype, (group.size() * rows, k, n), seed)
    with pieces_of(group, 1 << 14):
        for seed, (operator, (rows, k, n)) in enumerate(in_pieces):
            check_call(group, operator, dtype, (group.size() * rows, k, n), seed)
        return shm._SHARED[group].half_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_results_are_whole_matmuls_summed_in_rank_order(ranks, count, dtype):
    halves = ranks(count).run(bits, dtype)
    assert halves == [shm.FIRST_BYTES] * count  # pieces: no result was in a stage as a whole


def threaded(group):
    """Sums and copies shared out over threads."""
    torch.set_num_threads(3)
    try:
        for seed, operator in enumerate(OPERATORS):
            check_call(group, operator, torch.float32, (3600, 16, 160), seed)
            check_call(group, operator, torch.bfloat16, (3600, 32, 160), seed)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_may_have_threads(ranks, count):
    ranks(count).run(threaded)


def test_the_rules_for_cuts_are_those_of_the_chunks():
    assert shm.extension().ROW_TILE == ROW_TILE
    assert shm.extension().SMALLEST_16_BIT_PRODUCT == SMALLEST_16_BIT_PRODUCT
    assert shm.extension().MAX_RANKS == shm.MAX_RANKS


def every_value(group, dtype):
    """Sums of every 16-bit value with values of every magnitude; NaNs are compared as such."""
    assert shm.reach(group) is None
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    one = torch.ones(1, 1, dtype=dtype)
    parts = [torch.mm(x, one) for x in (values, shuffled)]
    y = shm.matmul_all_reduce((values, shuffled)[group.rank()], one, group, ()).wait()
    expected = (parts[0].float() + parts[1].float()).to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    same(y.nan_to_num(0.0), expected.nan_to_num(0.0), "every value", dtype)
    return int(expected.isnan().sum()), int(expected.isinf().sum()), len(expected.unique())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_summed_and_rounded_as_by_torch(ranks, dtype):
    for nans, infinities, different in ranks(2).run(every_value, dtype):
        assert nans
        assert infinities
        assert different > 10_000


def grown(group):
    """More than the segment has, then few again, then more still: all ranks make a larger one."""
    shm._SHARED.pop(group, None)
    halves = []
    for seed, m in enumerate((16, 2400, 16, 6000)):  # 4 KiB a row
        check_call(group, "matmul_all_reduce", torch.float32, (m, 8, 1024), seed)
        halves.append(shm._SHARED[group].half_bytes)
    shm._SHARED.pop(group)
    return halves


@pytest.mark.parametrize("count", [2, 3])
def test_the_segment_grows(ranks, count):
    for first, second, third, fourth in ranks(count).run(grown):
        assert first == shm.FIRST_BYTES < second == third < fourth
    assert segments() == []


def mixed(group, rounds, seed):
    """Many small calls of all operators in turn: a stage overwritten too early would show."""
    draw = random.Random(seed)
    for number in range(rounds):
        shape = (group.size() * draw.randint(1, 80), draw.randint(1, 40), draw.randint(1, 60))
        check_call(group, draw.choice(OPERATORS), draw.choice(DTYPES), shape, number)


@pytest.mark.parametrize("count", [2, 4])
def test_calls_in_quick_succession(ranks, count):
    ranks(count).run(mixed, 150, 5)


def groups_in_turn(group):
    """World, its halves, and a group that shares one rank with each half, all in turn."""
    members = [[0, 1, 2, 3], [0, 1], [2, 3], [1, 2], [3, 0, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    own = [(index, made) for index, made in enumerate(groups) if group.rank() in members[index]]
    for round_number in range(6):
        for index, made in own:
            mixed(made, 3, 10 * round_number + index)
    found = sorted({global_rank for _, made in own for global_rank in dist.get_process_group_ranks(made)})
    for _, made in own:
        shm._SHARED.pop(made)
        dist.destroy_process_group(made)
    return found


def test_several_groups_in_turn(ranks):
    assert ranks(4).run(groups_in_turn) == [[0, 1, 2, 3]] * 4
    assert segments() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "shm: dtype torch.float64"),
        ({"ranks": 9}, "shm: 9 ranks, not 2 to 8"),
        ({"device": "npu"}, "shm: device npu, not cpu"),
        ({"shm": "rank 1: cannot open the segment"}, "shm: rank 1: cannot open the segment"),
    ],
)
def test_what_it_cannot_run_takes_chunks_and_says_why(changes, reason):
    values = {"operator": "matmul_all_reduce", "m": 512, "k": 64, "n": 64, "dtype": torch.float32, "device": "cpu"}
    choice = choose(Problem(**{**values, "ranks": 2, "shm": None, **changes}), FUSED)
    assert choice.kernel == "chunked"
    assert reason in choice.reason
    assert choice.reason.endswith(": 4 chunks instead")


def test_the_choice_where_it_can():
    problem = Problem("matmul_all_reduce", 512, 64, 64, torch.float32, "cpu", 2, shm=None)
    assert (choose(problem, FUSED).kernel, choose(problem, FUSED).bit_exact) == ("shm", True)
    assert choose(problem, Settings(num_chunks=4)).kernel == "chunked"
