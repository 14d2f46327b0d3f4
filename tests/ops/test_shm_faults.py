"""The shared-memory kernel when ranks die, fork, raise, or do not come: errors name the rank, no file is left."""

import pytest
from launch import launch
from marks import promise
from shm_cases import segments

from ascend_parallel.ops import shm

pytestmark = pytest.mark.skipif(isinstance(shm.extension(), str), reason=str(shm.extension()))

START = """
import datetime, os, signal, sys, threading, time, torch, torch.distributed as dist
import ascend_parallel as ap
from ascend_parallel.ops import shm
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank, group = dist.get_rank(), dist.group.WORLD
x, w = torch.randn(256, 64), torch.randn(64, 64)
def call(group, x=x, **options):
    try:
        return shm.matmul_all_reduce(x, w, group, (len(x),), **options).wait()
    except ap.CollectiveError as error:
        print(error, flush=True)
def leave():
    sys.stdout.flush()
    os._exit(0)
"""

KILLED = """
shm.reach(group)
for number in range(100000):
    if rank == 1 and number == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    if call(group) is None:
        print("in call", number)
        leave()
"""


@promise("dead-rank")
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 3])
def test_a_killed_rank_is_named_and_nothing_is_left_behind(count):
    ranks = launch(START + KILLED, [{}] * count, timeout=60)
    for survivor in (rank for number, rank in enumerate(ranks) if number != 1):
        assert "shm matmul_all_reduce on group" in survivor.stdout, survivor.stderr
        assert "rank 1 has ended" in survivor.stdout
        assert "in call 50" in survivor.stdout
    assert segments() == []


FORKED = """
shm.reach(group)
call(group)
if rank == 1:
    if os.fork() == 0:  # as a worker of a data loader, which outlives its parent here
        call(group)
        os.close(1), os.close(2)
        time.sleep(30)
        os._exit(0)
    call(group), time.sleep(2), call(group)  # the child did not disturb
    os.kill(os.getpid(), signal.SIGKILL)
call(group), call(group)
print("two more calls were right")
call(group)
leave()
"""


@pytest.mark.slow
def test_a_forked_child_neither_takes_part_nor_hides_that_its_parent_died():
    first, second = launch(START + FORKED, [{}] * 2, timeout=25)  # less than the child lives
    assert "two more calls were right\nshm matmul_all_reduce on group" in first.stdout, first.stdout + first.stderr
    assert "rank 1 has ended" in first.stdout
    assert "a forked process has no part in its parent's group" in second.stdout
    assert segments() == []


RAISES = """
shm.reach(group)
call(group)
call(group, torch.randn(7, 3) if rank == 1 else x)  # rows that do not fit w; only the extension notices
call(group)
dist.barrier()
leave()
"""


@promise("rank-error")
def test_a_rank_that_raises_is_named_and_the_group_is_of_no_more_use():
    first, second = launch(START + RAISES, [{}] * 2, timeout=60)
    assert "failed on rank 0: rank 1 left the operator by an error of its own" in first.stdout, first.stderr
    assert "failed on rank 1: " in second.stdout
    for rank in (first, second):
        assert "an earlier call on this group failed; make the group anew" in rank.stdout
    assert segments() == []


ABSENT = """
part = dist.new_group([1, 2], group_desc="part")
if rank == 0:
    dist.barrier()
    leave()
if rank == 1:
    try:
        shm.reach(part, time_limit=1)
    except ap.CollectiveError as error:
        print(error)
dist.barrier(part)
shm._SHARED.pop(part, None)
other = dist.new_group([1, 2], group_desc="other", use_local_synchronization=True)
print("reached:", shm.reach(other, time_limit=20))
if rank == 1:
    call(other, time_limit=1)
    dist.barrier(other)
else:
    dist.barrier(other)
    call(other, time_limit=1)  # the other's rows are there: a right result
    call(other, time_limit=1)
dist.barrier()
leave()
"""


@promise("dead-rank")
@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_its_global_rank():
    _, waiting, late = launch(START + ABSENT, [{}] * 3, timeout=60)
    opening, reached, calling = waiting.stdout.splitlines()
    assert "rank 2 of group 'part' of ranks 1, 2 has not come to the opening of shared memory within 1 s" in opening
    assert reached == "reached: None"
    assert "failed on rank 1: rank 2 did not come within 1 s" in calling
    assert "rank 1 left the operator by an error of its own" in late.stdout, late.stdout + late.stderr
    assert segments() == []


NO_ROOM = """
shm.reach(group)
large = torch.zeros(64, 64)
if rank == 0:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
x, w = torch.zeros(4096, 1), torch.zeros(1, 1024)
call(group, x)
x, w = torch.randn(256, 64), torch.randn(64, 64)
print("then", call(group, x).shape)
dist.barrier()
leave()
"""


def test_no_room_to_grow_is_an_error_on_every_rank_and_smaller_calls_go_on():
    for rank in launch(START + NO_ROOM, [{}] * 2, timeout=60):
        assert "shm on group 'default_pg' of ranks 0, 1: no room for 2 x 16777216 bytes a rank" in rank.stdout, rank
        assert "rank 0: shared memory: " in rank.stdout
        assert "then torch.Size([256, 64])" in rank.stdout
    assert segments() == []


THREADS = """
groups = [dist.new_group() for _ in range(3)]
def many(made):
    for number in range(200):
        m = 16 * (number % 7 + 1) * (100 if number == 100 else 1)  # call 100 needs a larger segment
        x = torch.full((m, 4), float(rank + 1))
        y = shm.matmul_all_reduce(x, torch.ones(4, 512), made, (len(x),), time_limit=30).wait()
        assert y.shape == (m, 512) and bool((y == 12).all())
def work(made):
    assert shm.reach(made, time_limit=30) is None
    many(made)
    done.append(shm._SHARED[made].half_bytes)
done = []
threads = [threading.Thread(target=work, args=(made,)) for made in (groups if rank else groups[::-1])]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done), min(done) > shm.FIRST_BYTES)
dist.barrier()
leave()
"""


def test_groups_in_threads_open_and_grow_beside_one_another():
    for rank in launch(START + THREADS, [{}] * 2, timeout=100):
        assert rank.stdout.strip() == "3 True", rank.stdout + rank.stderr
    assert segments() == []


DIFFERENT = """
changes = {"rows": dict(m=128), "columns": dict(n=32), "dtype": dict(dtype=torch.bfloat16),
           "operator": dict(operator="matmul_reduce_scatter"), "room": dict(m=48000), "room of all": dict(m=64000)}
usual = dict(operator="matmul_all_reduce", m=256, k=64, n=64, dtype=torch.float32)
def come(group, operator, m, k, n, dtype, pieces=1):
    gathers = operator == "all_gather_matmul"
    x, w = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
    try:
        rows = m // group.size() if operator == "matmul_reduce_scatter" else m
        done = getattr(shm, operator)(x, w, group, (rows // pieces,) * pieces, time_limit=30)
        print("a result", (done[0] if gathers else done.wait()).shape)
    except ap.CollectiveError as error:
        print(error)
for gathers in (False, True):
    for what, change in changes.items():
        made = dist.new_group(group_desc=what)
        shm.reach(made, 30)
        call = usual | (dict(operator="all_gather_matmul") if gathers else {})
        call |= dict(m=48000) if what == "room of all" else {}
        own = dict(k=32) if gathers and what == "columns" else change
        call |= own if rank == dist.get_world_size() - 1 else {}
        come(made, **(usual | dict(operator="matmul_reduce_scatter", m=48)))  # all alike
        come(made, **call)
made = dist.new_group()
shm.reach(made, 30)
come(made, **usual | dict(m=2048, dtype=torch.bfloat16, pieces=8 if rank else 1))
dist.barrier()
leave()
"""


@promise("rank-settings")
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_come_with_different_calls_are_told_what_each_came_with(count):
    """Calls that differ in rows, columns, dtype or operator, in the need for a larger segment, or in pieces."""
    usual, last = "matmul_all_reduce of 256 rows of 64 columns, float32", count - 1
    for rank in launch(START + DIFFERENT, [{}] * count, timeout=100):
        lines = rank.stdout.splitlines()
        assert len(lines) == 2 * 12 + 1, rank.stdout + rank.stderr
        assert set(lines[:-1:2]) == {f"a result torch.Size([{48 // count}, 64])"}
        found = [line.partition(": ranks came with different calls: ")[2] for line in [*lines[1::2], lines[-1]]]
        alike = ["; ".join(f"rank {other}: {usual}" for other in range(last))] * 5
        alike.append(alike[0].replace("256", "48000"))
        theirs = [
            usual.replace("256", "128"),
            usual.replace("of 64", "of 32"),
            usual.replace("float32", "bfloat16"),
            usual.replace("all_reduce", "reduce_scatter"),
            usual.replace("256", "48000"),
            usual.replace("256", "64000"),
        ]
        expected = [f"{most}; rank {last}: {different}" for most, different in zip(alike, theirs, strict=True)]
        assert found[:6] == expected
        gathered = [text.replace("matmul_all_reduce", "all_gather_matmul") for text in expected]
        assert found[6:-1] == gathered
        pieces = usual.replace("256", "2048").replace("float32", "bfloat16")
        assert found[-1].startswith(f"rank 0: {pieces}; rank 1: {pieces}, in 8 pieces")
    assert segments() == []


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
shm.reach(group)
if rank == 0:
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        call(group)
    except KeyboardInterrupt:
        print("interrupted")
    dist.barrier()
else:
    dist.barrier()
    call(group)  # the other's rows are there: a right result
    call(group)
leave()
"""


def test_a_waiting_rank_can_be_interrupted():
    first, second = launch(START + INTERRUPTED, [{}] * 2, timeout=60)
    assert first.stdout.strip() == "interrupted", first.stderr + second.stderr
    assert "rank 0 left the operator by an error of its own" in second.stdout
