"""The shared-memory kernel for longer than CI has time for: random calls, and ranks killed at random moments."""

import random

import pytest
import torch
from launch import launch
from shm_cases import DTYPES, OPERATORS, check_call, pieces_of, segments

from ascend_parallel.ops import shm

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(isinstance(shm.extension(), str), reason=str(shm.extension())),
]

PARTS, ROUNDS, SHAPES = (
    10,
    10,
    50,
)  # 100 rounds of 50 shapes for each number of ranks, in parts that a pool has time for
KILLS = 20


def many(group, part):
    draw = random.Random(part)
    calls = 0
    for _ in range(ROUNDS):
        with pieces_of(group, draw.choice([1 << 14, 1 << 17, shm.PIECE_BYTES])):
            for _ in range(SHAPES):
                operator, dtype = draw.choice(OPERATORS), draw.choice(DTYPES)
                m = draw.choice([draw.randint(1, 5000), draw.randint(1, 100), 16 * draw.randint(1, 312)])
                if operator != "matmul_all_reduce":
                    m = -(-m // group.size()) * (group.size() if operator == "matmul_reduce_scatter" else 1)
                # torch's fp16 matmul is slow on CPUs without fp16 arithmetic.
                widest = 5 if dtype == torch.float16 else 7
                k, n = (round(2 ** draw.uniform(0, widest)) for _ in range(2))
                check_call(group, operator, dtype, (m, k, n), draw.randint(0, 1 << 20))
                calls += 1
    return calls


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("count", [2, 4])
def test_random_calls_have_the_bits_of_matmuls_in_rank_order(ranks, count, part):
    assert ranks(count).run(many, part) == [ROUNDS * SHAPES] * count
    assert segments() == []


KILLED = """
import datetime, os, random, signal, sys, threading, time, torch, torch.distributed as dist
import ascend_parallel as ap
from ascend_parallel.ops import shm
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank, group, draw = dist.get_rank(), dist.group.WORLD, random.Random({seed})
victim, moment, growing = draw.randrange(group.size()), draw.uniform(0, 0.4), draw.random() < 0.3
shm.FIRST_BYTES = 1 << 12 if growing else shm.FIRST_BYTES
x, w = torch.randn(2000, 16), torch.randn(16, 64)
dist.barrier()
if rank == victim:
    threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
try:
    shm.reach(group, time_limit=10)
    for number in range(1000000):
        m = draw.randint(1, 2000) // group.size() * group.size()
        operator = draw.choice(["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"])
        rows = m // group.size() if operator == "matmul_reduce_scatter" else m
        getattr(shm, operator)(x[:m], w, group, (rows,), time_limit=10)
        if growing and number % 10 == 9:
            shm._SHARED.pop(group)
            shm.reach(group, time_limit=10)
except ap.CollectiveError as error:
    print("raised in call", number, error) if "number" in globals() else print("raised", error)
    sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_a_random_moment_is_noticed_by_all_others(seed):
    count = 2 + seed % 2
    finished = launch(KILLED.replace("{seed}", str(seed)), [{}] * count, timeout=60)
    assert sorted(rank.returncode for rank in finished) == [-9] + [0] * (count - 1)
    for rank in finished:
        if rank.returncode == 0:
            assert rank.stdout.startswith("raised"), rank.stdout + rank.stderr
    assert segments() == []
