"""ProcessGroupHCCL over the emulated HCCL: results, order, and errors that name the rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from emulated_ascend.ranks import Ranks


def device():
    return torch.device("npu", dist.get_rank())


def on_cpu(*tensors):
    return [x.cpu() for x in tensors]


def collectives(dtype):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(12, device=device()) + 100 * rank).to(dtype)
    total = x.clone()
    dist.all_reduce(total)
    most = x.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    gathered = torch.empty(12 * ranks, dtype=dtype, device=device())
    dist.all_gather_into_tensor(gathered, x)
    scattered = torch.empty(12 // ranks, dtype=dtype, device=device())
    dist.reduce_scatter_tensor(scattered, x)
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x)
    told = x.clone()
    dist.broadcast(told, 1)
    lists = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(lists, x)
    own = torch.empty_like(x)
    dist.scatter(own, [x + i for i in range(ranks)] if rank == 0 else None, 0)
    at_root = [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None
    dist.gather(x, at_root, 0)
    summed = x.clone()
    dist.reduce(summed, 1)
    return on_cpu(
        total,
        most,
        gathered,
        scattered,
        exchanged,
        told,
        torch.cat(lists),
        own,
        *(at_root or []),
        *([summed] if rank == 1 else []),
    )


@pytest.fixture(scope="module")
def pools():
    made = {}

    def pool(count):
        if count not in made or not made[count].alive:
            made[count] = Ranks(count)
        return made[count]

    yield pool
    for each in made.values():
        each.close()


@pytest.mark.parametrize(
    ("count", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (2, torch.int64), (3, torch.float16)]
)
def test_a_collective_gives_what_it_says(pools, count, dtype):
    xs = [(torch.arange(12) + 100 * rank).to(dtype) for rank in range(count)]
    total = torch.stack(xs).sum(0) if not dtype.is_floating_point else torch.stack(xs).float().sum(0).to(dtype)
    for rank, found in enumerate(pools(count).run(collectives, dtype)):
        parts = [x.chunk(count)[rank] for x in xs]
        expected = [
            total,
            xs[-1],
            torch.cat(xs),
            total.chunk(count)[rank],
            torch.cat(parts),
            xs[1],
            torch.cat(xs),
            xs[0] + rank,
        ]
        expected += xs if rank == 0 else [total] if rank == 1 else []
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


def uneven():
    rank = dist.get_rank()
    sent = [1, 3] if rank == 0 else [2, 4]
    x = torch.arange(sum(sent), device=device()) + 10.0 * rank
    taken = [[1, 2], [3, 4]][rank]
    out = torch.empty(sum(taken), device=device())
    dist.all_to_all_single(out, x, taken, sent)
    big = torch.full((3_000_000,), float(rank + 1), device=device())
    dist.all_reduce(big)
    parts = [torch.empty(3, device=device()), torch.empty(5, device=device())]
    dist.all_gather(parts, torch.full((3 + 2 * rank,), float(rank), device=device()))
    return on_cpu(out, big.unique(), *parts)


def test_uneven_and_large_messages(pools):
    first, second = pools(2).run(uneven)
    assert first[0].tolist() == [0, 10, 11] and second[0].tolist() == [1, 2, 3, 12, 13, 14, 15]
    for found in (first, second):
        assert found[1].tolist() == [3] and found[2].tolist() == [0] * 3 and found[3].tolist() == [1] * 5


def messages():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((700_000,), float(rank), device=device())
    y, z = torch.empty_like(x), torch.empty_like(x)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(y, 0)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, z, before)])
    for work in works:
        work.wait()
    return on_cpu(y[:1], z.unique())


def test_messages_between_ranks_alone_and_in_batches(pools):
    for rank, (y, z) in enumerate(pools(3).run(messages)):
        assert z.tolist() == [(rank - 1) % 3]
        assert rank != 1 or y.item() == 0


def coalesced():
    x = torch.full((5,), float(dist.get_rank() + 1), device=device())
    y, z = x + 1, torch.empty(10, device=device())
    with dist.distributed_c10d._coalescing_manager(device=x.device, async_ops=True) as works:
        dist.all_reduce(x)
        dist.all_reduce(y)
    works.wait()
    dist.all_gather_into_tensor(z, y)
    return on_cpu(x, y, z)


def test_collectives_of_a_group_run_in_order(pools):
    for x, y, z in pools(2).run(coalesced):
        assert x.tolist() == [3.0] * 5 and y.tolist() == [5.0] * 5 and z.tolist() == [5.0] * 10


def order(waits):
    """Rank 0's kernel is slow; wait() returns at once, and what follows it on the stream comes after the collective."""
    rank = dist.get_rank()
    x, y = torch.ones(1 << 20, device=device()), torch.zeros(8, device=device())
    dist.all_reduce(y)
    torch.npu.synchronize()
    began = time.perf_counter()
    if rank == 0:
        a = torch.ones(700, 700, device=device())
        for _ in range(40):
            a = a @ a * 1e-3
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    returned = time.perf_counter() - began
    z = x * 2
    torch.npu.synchronize()
    lasted = time.perf_counter() - began
    return returned, lasted, z.cpu().unique().tolist()


def test_wait_orders_streams_and_does_not_block_the_host(pools):
    for returned, lasted, values in pools(2).run(order, True):
        assert values == [4.0]
        assert returned < lasted / 2, (returned, lasted)


def test_a_missing_wait_is_a_wrong_number(pools):
    results = pools(2).run(order, False)
    assert any(values != [4.0] for _, _, values in results), results


def different():
    x = torch.ones(4, device=device())
    dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)
    torch.npu.synchronize()


def different_sizes():
    dist.all_reduce(torch.ones(4 + dist.get_rank(), device=device()))
    torch.npu.synchronize()


def failing():
    dist.all_reduce(torch.ones(4, device=device()))
    if dist.get_rank() == 0:
        torch.arange(6.0, device=device())[torch.tensor([77], device=device())]
    dist.all_reduce(torch.ones(4, device=device()))
    torch.npu.synchronize()


def dying():
    dist.all_reduce(torch.ones(4, device=device()))
    torch.npu.synchronize()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4, device=device()))
    torch.npu.synchronize()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (different, "of a group is in Hccl(AllReduce|Broadcast) of 4 fp32"),
        (different_sizes, "of a group is in HcclAllReduce of [45] fp32, rank [01] in HcclAllReduce of [45] fp32"),
        (failing, "(?s)aclnnIndex: IndexError.*rank 0 of its group failed: aclnnIndex"),
        # torch_npu's watchdog may see the error first, and aborts the process, as on a card.
        (dying, "HcclAllReduce of 4 fp32: rank 0 of its group has ended|rank 1:\\nended with -6"),
    ],
)
def test_ranks_that_do_not_meet_are_named(program, said):
    ranks = Ranks(2, seconds=60)
    with pytest.raises(AssertionError, match=said):
        ranks.run(program)
