"""The shared-memory kernel: every path against the truth, its bits, several groups, and its choice."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from marks import promise
from pairwise import base_choice
from pool import on_ranks
from shm_cases import DTYPES, OPERATORS, check_call, cut, operands, pieces_of, rank_order_sum, same, segments
from test_linear import SHAPES, check_column, check_row

from ascend_parallel import Settings
from ascend_parallel.ops import COUNTS, Matmul, choose, shm

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


@pytest.mark.sample("4-torch.float32")
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (3, torch.float32)), ids=str)
def test_every_path_matches_the_truth(ranks, count, dtype):
    for counts in ranks(count).run(every_path, dtype):
        assert set(counts) == set(OPERATORS)
    assert segments() == []


# Rows per rank, K, N. Few rows, odd numbers of rows, one column, no rows; then, for small pieces, several pieces with
# and without a remainder, small 16-bit products, and fp32 products whose bits a cut at odd rows does change.
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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (3, torch.float32)), ids=str)
def test_results_are_the_pieces_matmuls_summed_in_rank_order(ranks, count, dtype):
    halves = ranks(count).run(bits, dtype)
    assert halves == [shm.FIRST_BYTES] * count  # pieces: no result was in a stage as a whole


@pytest.mark.sample("3")
@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_a_rank_may_have_threads(group):
    """Sums and copies on several threads."""
    torch.set_num_threads(3)
    try:
        for seed, operator in enumerate(OPERATORS):
            check_call(group, operator, torch.float32, (3600, 16, 160), seed)
            check_call(group, operator, torch.bfloat16, (3600, 32, 160), seed)
    finally:
        torch.set_num_threads(1)


def test_the_largest_number_of_ranks_is_that_of_the_extension():
    assert shm.extension().MAX_RANKS == shm.MAX_RANKS


@pytest.mark.parametrize(("m", "n"), [(100_000, 4096), (100_003, 4096), (65536, 100_000), (256, 8), (0, 8)])
@pytest.mark.parametrize("tiled", [False, True])
def test_pieces_fit_a_stage_and_are_cut_at_tiles(m, n, tiled):
    sizes, tile = cut("matmul_all_reduce", torch.float32, m, 8, n, 2, tiled)
    tile = tile or 16
    assert sum(sizes) == m
    assert all(size % tile == 0 for size in sizes[:-1])
    assert max(sizes) <= max(shm.PIECE_BYTES // (4 * n), shm.PIECE_ROWS, tile) + tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(2)
def test_every_16_bit_value_is_summed_and_rounded_as_by_torch(group, dtype):
    """Sums of every 16-bit value with values of every magnitude; NaNs are compared as such."""
    assert shm.reach(group) is None
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    w = torch.ones(1, 1, dtype=dtype)
    parts = [torch.mm(x, w) for x in (values, shuffled)]
    y = shm.matmul_all_reduce((values, shuffled)[group.rank()], w, group, (len(values),)).wait()
    expected = (parts[0].float() + parts[1].float()).to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    same(y.nan_to_num(0.0), expected.nan_to_num(0.0), "every value", dtype)
    nans, infinities, different = int(expected.isnan().sum()), int(expected.isinf().sum()), len(expected.unique())
    assert nans
    assert infinities
    assert different > 10_000


def grown(group):
    """More rows than the segment holds, then few, then still more: all ranks make a larger segment."""
    shm._SHARED.pop(group, None)
    halves = []
    for seed, m in enumerate((16, 2400, 16, 6000)):  # 4 KiB a row
        check_call(group, "matmul_all_reduce", torch.float32, (m, 8, 1024), seed)
        halves.append(shm._SHARED[group].half_bytes)
    shm._SHARED.pop(group)
    return halves


@pytest.mark.sample(1)
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


@pytest.mark.sample("4")
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


def bits_of_many(group):
    for seed, (operator, dtype) in enumerate(itertools.product(OPERATORS, DTYPES)):
        check_call(group, operator, dtype, (group.size() * 5, 32, 48), seed)  # summed by every rank
        check_call(group, operator, dtype, (group.size() * 48, 16, 160), seed)  # and in parts


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, 16])
def test_many_ranks_have_the_bits_of_matmuls_in_rank_order(ranks, count):
    ranks(count).run(bits_of_many)
    assert segments() == []


@on_ranks(3)
def test_inner_dimensions_and_gathered_columns_may_differ(group):
    """Inner dimensions of a sum, and columns of a gather's result, that differ from rank to rank."""
    assert shm.reach(group) is None
    for dtype, rows in itertools.product((torch.float32, torch.bfloat16), (12, 600)):
        every = [operands(rows, rank, dtype, rows, 100 + 3 * rank, 40) for rank in range(group.size())]
        y = shm.matmul_all_reduce(*every[group.rank()], group, (rows,)).wait()
        same(y, rank_order_sum([torch.mm(x, w) for x, w in every]), "uneven sum", dtype, rows)
        every = [operands(rows, rank, dtype, rows, 100, 40 + 3 * rank) for rank in range(group.size())]
        y, gathered = shm.all_gather_matmul(*every[group.rank()], group, (rows,))
        same(gathered, torch.cat([x for x, _ in every]), "uneven gather", dtype, rows)
        same(y, torch.mm(gathered, every[group.rank()][1]), "uneven gather", dtype, rows)


def more_than_it_takes(group):
    COUNTS.clear()
    check_column(group, (2 * group.size(), 16), torch.float32, FUSED, True)
    check_row(group, (4 * group.size(), 16), torch.float32, FUSED, False)
    return shm.reach(group), group in shm._SHARED, COUNTS.as_dict()[OPERATORS[0]]["calls"]


@promise("rank-counts")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, shm.MAX_RANKS + 1])
def test_layers_of_too_few_or_too_many_ranks_run_without_it(ranks, count):
    expected = (f"{count} ranks, not 2 to {shm.MAX_RANKS}", False, 1)
    assert ranks(count).run(more_than_it_takes) == [expected] * count


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "shm: dtype torch.float64"),
        ({"ranks": 17}, "shm: 17 ranks, not 2 to 16"),
        ({"device": "npu", "m": 65536}, "shm: device npu, not cpu"),  # rows enough to fill it in chunks
        ({"shm": "rank 1: cannot open the segment"}, "shm: rank 1: cannot open the segment"),
    ],
)
def test_what_it_cannot_run_takes_chunks_and_says_why(changes, reason):
    values = {"operator": "matmul_all_reduce", "m": 512, "k": 64, "n": 64, "dtype": torch.float32, "device": "cpu"}
    choice = choose(Matmul(**{**values, "ranks": 2, "shm": None, **changes}), FUSED)
    assert (choice.kernel, choice.code, len(choice.sizes)) == ("chunked", "not_fused", 4)
    assert reason in choice.reason


def test_the_choice_where_it_can():
    problem = Matmul("matmul_all_reduce", 512, 64, 64, torch.float32, "cpu", 2, shm=None)
    assert (choose(problem, FUSED).kernel, choose(problem, FUSED).exact) == ("shm", True)
    assert choose(problem, Settings(num_chunks=4)).kernel == "chunked"
