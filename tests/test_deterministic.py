"""COC_DETERMINISTIC=1: every sum over ranks in rank order, whatever the chunks, the kernel and the run."""

import itertools

import pytest
import torch
import torch.distributed as dist
from layers import Layers
from test_linear import SHAPES, check_column, check_row

import ascend_parallel
from ascend_parallel import Settings, ops
from ascend_parallel.ops import Problem, choose, shm
from ascend_parallel.ops.operators import start_matmul_all_reduce, start_matmul_reduce_scatter

CHUNKS = (1, 2, 3, 8)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NO_EXTENSION = shm.extension() if isinstance(shm.extension(), str) else ""


def ordered(**settings):
    return Settings(deterministic=True, mode=2, **settings)


def rank_order_sum(group, y):
    """Every rank's y, added in rank order, in fp32 for 16-bit types."""
    parts = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(parts, y, group=group)
    wide = torch.float32 if y.element_size() == 2 else y.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(y.dtype)


def bits(group, variants, dtype):
    """Whether each call gives the rank-order sum of whole matmuls, and how many distinct results there were."""
    right, distinct = [], 0
    for m, k, n in [(256, 64, 80), (250, 33, 17), (31, 64, 64), (1, 48, 96), (600, 8, 40)]:
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(m, k, generator=generator).to(dtype)
        rows = torch.randn(m * group.size(), k, generator=generator).to(dtype)
        w = torch.randn(k, n, generator=generator).to(dtype)
        expected, scattered = rank_order_sum(group, torch.mm(x, w)), rank_order_sum(group, torch.mm(rows, w))
        own = scattered.chunk(group.size())[group.rank()]
        results = [start_matmul_all_reduce(x, w, group, settings).wait() for settings in variants]
        right += [torch.equal(y, expected) for y in results]
        right += [torch.equal(start_matmul_reduce_scatter(rows, w, group, s).wait(), own) for s in variants]
        distinct = max(distinct, len({y.float().numpy().tobytes() for y in results}))
    return all(right), distinct


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_bits_are_those_of_the_rank_order_sum(ranks, count, dtype):
    variants = [ordered(num_chunks=chunks) for chunks in CHUNKS] * 2
    assert ranks(count).run(bits, variants, dtype) == [(True, 1)] * count


@pytest.mark.skipif(bool(NO_EXTENSION), reason=NO_EXTENSION)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_shared_memory_and_chunks_give_the_same_bits(ranks, count):
    variants = [ordered(fused=True), ordered(num_chunks=4)]
    assert ranks(count).run(bits, variants, torch.float32) == [(True, 1)] * count


def test_without_it_bits_depend_on_the_chunks(ranks):
    """The comparison above can fail: gloo sums four ranks in an order that depends on the place."""
    found = ranks(4).run(bits, [Settings(num_chunks=chunks, mode=2) for chunks in CHUNKS], torch.float32)
    assert all(distinct > 1 and not right for right, distinct in found)


def every_path(group, dtype):
    for shape, chunks in itertools.product(SHAPES, CHUNKS):
        settings = ordered(num_chunks=chunks)
        check_column(group, shape, dtype, settings, False)
        check_row(group, shape, dtype, settings, False)
        if len(shape) > 1:
            rows = (shape[0] * group.size(), *shape[1:])
            check_row(group, rows, dtype, settings, True)
            check_column(group, rows, dtype, settings, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_path_matches_the_truth(ranks, count, dtype):
    ranks(count).run(every_path, dtype)


def off_gloo(group):
    """What runs where the backend is not gloo: an all-to-all and the sum."""
    from ascend_parallel.ops import collectives

    kept = collectives.on_gloo
    collectives.on_gloo = lambda group, device: False
    try:
        every_path(group, torch.float32)
        return bits(group, [ordered(num_chunks=chunks) for chunks in CHUNKS], torch.bfloat16)
    finally:
        collectives.on_gloo = kept


@pytest.mark.parametrize("count", [3, 4])
def test_backends_that_are_not_gloo(ranks, count):
    assert ranks(count).run(off_gloo) == [(True, 1)] * count


@pytest.mark.parametrize(
    ("operator", "device", "ranks", "settings", "kernel", "chunks"),
    [
        ("matmul_all_reduce", "cpu", 2, ordered(num_chunks=4), "chunked", 4),
        ("matmul_all_reduce", "cpu", 3, ordered(num_chunks=4), "ordered", 4),
        ("matmul_all_reduce", "cpu", 3, ordered(), "ordered", 1),
        ("matmul_all_reduce", "npu", 2, ordered(num_chunks=4), "ordered", 4),
        ("matmul_reduce_scatter", "cpu", 4, ordered(num_chunks=4), "ordered", 4),
        ("matmul_reduce_scatter", "cpu", 3, ordered(num_chunks=4), "ordered", 1),  # 170 rows a rank
        ("all_gather_matmul", "npu", 4, ordered(num_chunks=4), "chunked", 4),
        ("matmul_all_reduce", "cpu", 4, ordered(fused=True), "shm", 1),
    ],
)
def test_what_is_chosen(operator, device, ranks, settings, kernel, chunks):
    problem = Problem(operator, 512 if ranks != 3 else 510, 64, 32, torch.float32, device, ranks, shm=None)
    choice = choose(problem, settings)
    assert (choice.kernel, len(choice.sizes)) == (kernel, chunks)


def megatron(group):
    outputs = []
    with Layers(group.size()) as layers:
        for chunks in (2, 5):
            ascend_parallel.configure(num_chunks=chunks, deterministic=True)
            layer = layers.make("RowParallelLinear", config={"deterministic_mode": True})
            torch.manual_seed(group.rank())
            torch.nn.init.normal_(layer.weight)
            outputs.append(layer(torch.randn(500, layer.weight.shape[1]))[0].detach())
        ran = ops.COUNTS.as_dict()
    return torch.equal(*outputs), bool(ran)


@pytest.mark.parametrize("count", [3, 4])
def test_megatrons_deterministic_mode_runs_with_it(ranks, count):
    assert ranks(count).run(megatron) == [(True, True)] * count
