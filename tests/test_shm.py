"""The shared-memory kernel: every path against the truth, its bits, and what happens when ranks end."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import launch
from test_linear import SHAPES, check_column, check_row
from test_megatron_training import both
from truth import close

from ascend_parallel import Settings
from ascend_parallel.ops import COUNTS, Problem, choose, shm
from ascend_parallel.ops.operators import (
    run_all_gather_matmul,
    start_matmul_all_reduce,
    start_matmul_reduce_scatter,
)

FUSED = Settings(fused=True, enable_coc_in_column_backward=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(isinstance(shm.extension(), str), reason=str(shm.extension()))


def segments():
    return sorted(path.name for path in Path("/dev/shm").glob("ascend_parallel-*"))


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
        assert set(counts) == {"matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"}
    assert segments() == []


def rank_order_sum(group, y):
    """Every rank's y, added in rank order in fp32."""
    parts = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(parts, y, group=group)
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(y.dtype)


def bits(group):
    found = []
    for dtype, (m, k, n) in itertools.product(DTYPES, [(64, 32, 48), (1, 64, 2048), (1024, 96, 256), (96, 64, 48)]):
        torch.manual_seed(group.rank())
        x, w = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        expected = rank_order_sum(group, torch.mm(x, w))
        for _ in range(3):
            y = start_matmul_all_reduce(x, w, group, FUSED).wait()
            found.append(torch.equal(y, expected))
        if m % (16 * group.size()) == 0:
            y = start_matmul_reduce_scatter(x, w, group, FUSED).wait()
            found.append(torch.equal(y, expected.chunk(group.size())[group.rank()]))
    return all(found), len(found)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_are_taken_in_rank_order(ranks, count):
    for right, checks in ranks(count).run(bits):
        assert right
        assert checks >= 36


def grown(group):
    """A problem that needs more than the segment has: all ranks make a larger one."""
    torch.manual_seed(group.rank())
    x, w = torch.randn(3000, 8), torch.randn(8, 1024)
    found = []
    for rows in (3000, 16):  # twelve megabytes, then few again
        y = start_matmul_all_reduce(x[:rows], w, group, FUSED).wait()
        found.append(torch.equal(y, rank_order_sum(group, torch.mm(x[:rows], w))))
    return found


def test_the_segment_grows(ranks):
    assert ranks(2).run(grown) == [[True, True]] * 2
    assert segments() == []


def mixed(group):
    """Many small calls of all operators in turn: a stage overwritten too early would show."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(60):
        m = int(torch.randint(1, 80, (1,), generator=generator)) * group.size()
        torch.manual_seed(m)
        x, w = torch.randn(m, 24), torch.randn(24, 40)
        expected = torch.mm(x, w)
        close(start_matmul_all_reduce(x, w, group, FUSED).wait(), group.size() * expected.double(), torch.float32)
        scattered = start_matmul_reduce_scatter(x, w, group, FUSED).wait()
        own = group.size() * expected.double().chunk(group.size())[group.rank()]
        close(scattered, own, torch.float32)
        y, gathered = run_all_gather_matmul(x, w, group, FUSED)
        assert torch.equal(gathered, torch.cat([x] * group.size()))
        close(y, torch.cat([expected] * group.size()).double(), torch.float32)


@pytest.mark.parametrize("count", [2, 4])
def test_calls_in_quick_succession(ranks, count):
    ranks(count).run(mixed)


def trained(group):
    return both(group, {"settings": {"fused": True, "num_chunks": 1}, "sequence_parallel": True})


def trained_all_reduce(group):
    return both(group, {"settings": {"fused": True, "num_chunks": 1, "enable_coc_in_column_backward": True}})


@pytest.mark.parametrize("train", [trained, trained_all_reduce])
def test_a_gpt_trains_with_megatrons_bits_on_two_ranks(ranks, train):
    for found in ranks(2).run(train):
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        assert found["counts"]


@pytest.mark.parametrize("count", [3, 4])
def test_two_runs_are_alike_on_more_ranks(ranks, count):
    first, second = ranks(count).run(bits_of_a_run), ranks(count).run(bits_of_a_run)
    assert first == second
    assert len(set(first)) == 1  # and alike on all ranks


def bits_of_a_run(group):
    torch.manual_seed(group.rank())
    x, w = torch.randn(200, 32), torch.randn(32, 64)
    return start_matmul_all_reduce(x, w, group, FUSED).wait().double().sum().item().hex()


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


START = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
import ascend_parallel as ap
from ascend_parallel.ops.operators import start_matmul_all_reduce
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank, group, settings = dist.get_rank(), dist.group.WORLD, ap.Settings(fused=True)
x, w = torch.randn(256, 64), torch.randn(64, 64)
"""

KILLED = """
for call in range(100000):
    if rank == 1 and call == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        start_matmul_all_reduce(x, w, group, settings).wait()
    except ap.CollectiveError as error:
        print(call, error)
        break
os._exit(0)
"""

RAISES = """
mm_out_fails = torch.randn(7, 3)  # its rows do not fit w, which only the extension finds out
from ascend_parallel.ops import shm
start_matmul_all_reduce(x, w, group, settings).wait()
try:
    shm.matmul_all_reduce(mm_out_fails if rank == 1 else x, w, group, ())
except ap.CollectiveError as error:
    print(error)
os._exit(0)
"""


@pytest.mark.parametrize("count", [2, 3])
def test_a_killed_rank_is_named_and_nothing_is_left_behind(count):
    ranks = launch(START + KILLED, [{}] * count, timeout=60)
    for survivor in (rank for number, rank in enumerate(ranks) if number != 1):
        assert "50 shm matmul_all_reduce on group" in survivor.stdout, survivor.stderr
        assert f"rank 1 of {count} has ended" in survivor.stdout
    assert segments() == []


def test_a_rank_that_raises_is_named():
    first, second = launch(START + RAISES, [{}] * 2, timeout=60)
    assert "rank 1 of 2 left the operator by an error of its own" in first.stdout, first.stderr
    assert "shm matmul_all_reduce" in second.stdout
    assert segments() == []
