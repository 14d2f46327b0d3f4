"""COC_DETERMINISTIC=1: the same matmuls in tiles of rows, every sum over ranks in rank order, whatever the chunks."""

import itertools

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from by_settings import run_all_gather_matmul, start_matmul_all_reduce, start_matmul_reduce_scatter
from layers import Layers
from marks import promise
from pairwise import base_choice
from pool import on_ranks
from test_linear import SHAPES, check_column, check_row
from torch.utils._python_dispatch import TorchDispatchMode

import ascend_parallel
from ascend_parallel import Settings, ops
from ascend_parallel.ops import Matmul, choose, multiply, shm
from ascend_parallel.ops.rows import deterministic_tile

CHUNKS = (1, 2, 3, 8)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NO_EXTENSION = shm.extension() if isinstance(shm.extension(), str) else ""
SMALL = [(256, 64, 80), (250, 33, 17), (31, 64, 64), (1, 48, 96), (600, 8, 40)]
# Sizes of real layers, at which libraries take other routines for other numbers of rows.
LARGE = [(512, 1024, 256), (1024, 1024, 320), (768, 2048, 264), (256, 4096, 512), (200, 8192, 256)]


def ordered(**settings):
    return Settings(deterministic=True, mode=2, **settings)


def drawn(rank, shape, dtype, transposed):
    m, k, n = shape
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = torch.randn(n, k, generator=generator).to(dtype)
    return x, w.t() if transposed else w.t().contiguous()


def tiled(x, w, tile):
    """Multiply every block of `tile` rows separately: an independent implementation of the definition."""
    return torch.cat([torch.mm(x[i : i + tile], w) for i in range(0, x.shape[0], tile)])


def rank_order_sum(group, y):
    """Every rank's y, added in rank order, in fp32 for 16-bit types."""
    parts = [torch.empty_like(y) for _ in range(group.size())]
    dist.all_gather(parts, y, group=group)
    wide = torch.float32 if y.element_size() == 2 else y.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(y.dtype)


def bits(group, variants, dtype, shapes=SMALL):
    """Whether each call gives the rank-order sum of tiled matmuls, and how many distinct results there were."""
    ranks, right, distinct = group.size(), [], 0
    for shape, transposed in itertools.product(shapes, (False, True)):
        m = shape[0]
        x, w = drawn(group.rank(), shape, dtype, transposed)
        rows = torch.cat([x + r for r in range(ranks)])
        tile = deterministic_tile(m)
        expected = rank_order_sum(group, tiled(x, w, tile))
        tile = deterministic_tile(m * ranks)
        partial = torch.cat([tiled(block, w, tile) for block in rows.split(m)])
        own = rank_order_sum(group, partial)[group.rank() * m :][:m]
        gathered = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(gathered, x, group=group)
        y_all = torch.cat([tiled(block, w, tile) for block in gathered])
        results = [start_matmul_all_reduce(x, w, group, settings).wait() for settings in variants]
        right += [torch.equal(y, expected) for y in results]
        right += [torch.equal(start_matmul_reduce_scatter(rows, w, group, s).wait(), own) for s in variants]
        right += [torch.equal(run_all_gather_matmul(x, w, group, s)[0], y_all) for s in variants]
        distinct = max(distinct, len({y.double().numpy().tobytes() for y in results}))
    return all(right), distinct


@pytest.mark.sample("2-torch.float32")
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (3, torch.float32)), ids=str)
def test_bits_are_those_of_tiles_summed_in_rank_order(ranks, count, dtype):
    variants = [ordered(num_chunks=chunks) for chunks in CHUNKS] * 2
    assert ranks(count).run(bits, variants, dtype) == [(True, 1)] * count


@promise("deterministic-runs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "dtype"), [(3, torch.float32), (2, torch.float64), (2, torch.bfloat16), (3, torch.bfloat16)], ids=str
)
def test_sizes_of_real_layers(ranks, count, dtype):
    variants = [ordered(num_chunks=chunks) for chunks in (1, 4, 8)]
    shapes = LARGE if dtype == torch.float32 else LARGE[:2]
    assert ranks(count).run(bits, variants, dtype, shapes) == [(True, 1)] * count


@promise("deterministic-runs")
@pytest.mark.sample("3")
@pytest.mark.skipif(bool(NO_EXTENSION), reason=NO_EXTENSION)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_shared_memory_and_chunks_give_the_same_bits(ranks, count):
    variants = [ordered(fused=True), ordered(num_chunks=4)]
    assert ranks(count).run(bits, variants, torch.float32, SMALL + LARGE[:2]) == [(True, 1)] * count


def test_without_it_bits_depend_on_the_chunks(ranks):
    """The comparison above can fail: gloo's order of summing four ranks depends on the position in the buffer."""
    found = ranks(4).run(bits, [Settings(num_chunks=chunks, mode=2) for chunks in CHUNKS], torch.float32)
    assert all(distinct > 1 and not right for right, distinct in found)


class Matmuls(TorchDispatchMode):
    """Records for every matmul the position and number of its left rows, and its shapes."""

    def __init__(self, x):
        super().__init__()
        self.first, self.row = x.data_ptr(), x.stride(0) * x.element_size()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::bmm", "aten::addmm"):
            x, w = args[:2]
            self.seen.append(((x.data_ptr() - self.first) / self.row, tuple(x.shape), tuple(w.shape), w.stride()))
        return function(*args, **(kwargs or {}))


def calls(group, shape):
    """The matmuls of each operator, for every chunk count; those of a gather lie in buffers of its own."""
    x, w = drawn(group.rank(), shape, torch.float32, True)
    found = {}
    for chunks in CHUNKS:
        settings = ordered(num_chunks=chunks)
        for operator in ("matmul_all_reduce", "matmul_reduce_scatter"):
            with Matmuls(x) as mode:
                start = start_matmul_all_reduce if operator == "matmul_all_reduce" else start_matmul_reduce_scatter
                start(x, w, group, settings).wait()
            found.setdefault(operator, []).append(sorted(mode.seen))
        with Matmuls(x) as mode:
            run_all_gather_matmul(x, w, group, settings)
        found.setdefault("all_gather_matmul", []).append(sorted(shapes for _, *shapes in mode.seen))
    return found


@promise("deterministic-runs")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", [(1024, 64, 32), (2400, 16, 8), (96, 8, 8)])
def test_whole_and_chunked_make_the_same_calls(ranks, count, shape):
    """A proof without a library's help: one chunk and many chunks make the same calls on the same rows."""
    for found in ranks(count).run(calls, shape):
        for operator, (whole, *chunked) in found.items():
            assert len(whole) >= 2, operator
            assert all(seen == whole for seen in chunked), operator


@pytest.mark.parametrize("m", [1, 15, 16, 100, 256, 1000, 4096, 16384, 65536, 1 << 20])
def test_a_tile_depends_on_the_rows_of_all_ranks_alone(m):
    tile = deterministic_tile(m)
    assert 16 <= tile <= max(256, m // 64)
    for ranks, chunks in itertools.product((2, 4), (2, 8, 64)):
        for operator in ops.call.OPERATORS:
            if m % ranks == 0:
                choice = choose(Matmul(operator, m, 64, 32, torch.float32, "cpu", ranks), ordered(num_chunks=chunks))
                assert all(size % tile == 0 for size in choice.sizes[:-1])
                assert dict(choice.options)["row_tile"] == tile


def one_rank(shape, ranks):
    """What a group of `ranks` computes of `shape` gathered rows, with the same weight on every rank."""
    x, w = drawn(0, shape, torch.float32, True)
    y = torch.empty(shape[0], shape[2])
    for block, out in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
        multiply.multiply(block, w, out, deterministic_tile(shape[0]))
    return y


@promise("deterministic-ranks")
@pytest.mark.parametrize("shape", [(4096, 1024, 256), (2048, 2048, 256)])
def test_bits_do_not_depend_on_the_number_of_ranks(shape):
    """Only if each rank's rows are a multiple of the tile; the order of sums over ranks is tested elsewhere."""
    assert torch.equal(one_rank(shape, 1), one_rank(shape, 2))
    assert torch.equal(one_rank(shape, 1), one_rank(shape, 8))


def given_sizes(group):
    x, w = drawn(group.rank(), (600, 64, 32), torch.float32, True)
    shape = (600, 64, 32)
    sizes = [(600,), (48, 304, 248), (16, 584), (300, 300)]
    results = [
        start_matmul_all_reduce(x, w, group, ordered(customized_coc={shape: cut})).wait()
        for cut in sizes
        if all(size % 16 == 0 for size in cut[:-1])
    ]
    return all(torch.equal(results[0], y) for y in results[1:])


def test_sizes_that_were_given_are_cut_at_tiles(ranks):
    assert ranks(2).run(given_sizes) == [True, True]
    settings = ordered(customized_coc={(600, 64, 32): (48, 304, 248)})
    choice = choose(Matmul("matmul_all_reduce", 600, 64, 32, torch.float32, "cpu", 2), settings)
    assert choice.sizes == (64, 288, 248)
    assert choice.codes == ("sizes_of_shape", "tiles")


def every_path(group, dtype):
    for shape, chunks in itertools.product(SHAPES, CHUNKS):
        settings = ordered(num_chunks=chunks)
        check_column(group, shape, dtype, settings, False)
        check_row(group, shape, dtype, settings, False)
        if len(shape) > 1:
            rows = (shape[0] * group.size(), *shape[1:])
            check_row(group, rows, dtype, settings, True)
            check_column(group, rows, dtype, settings, True)


@promise("more-ranks")
@pytest.mark.sample("4-torch.bfloat16")
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (4, torch.float32)), ids=str)
def test_every_path_matches_the_truth(ranks, count, dtype):
    ranks(count).run(every_path, dtype)


@pytest.mark.sample("3")
@pytest.mark.parametrize("count", [3, 4])
@on_ranks()
def test_backends_that_are_not_gloo(group):
    """What runs where the backend is not gloo: an all-to-all and the sum."""
    with as_backend("nccl", group):
        every_path(group, torch.float32)
        assert bits(group, [ordered(num_chunks=chunks) for chunks in CHUNKS], torch.bfloat16) == (True, 1)


@pytest.mark.parametrize(
    ("operator", "device", "ranks", "settings", "kernel", "chunks"),
    [
        ("matmul_all_reduce", "cpu", 2, ordered(num_chunks=4), "chunked", 4),
        ("matmul_all_reduce", "cpu", 3, ordered(num_chunks=4), "ordered", 4),
        ("matmul_all_reduce", "cpu", 3, ordered(), "ordered", 1),
        ("matmul_all_reduce", "npu", 2, ordered(num_chunks=4), "ordered", 4),
        ("matmul_all_reduce", "npu", 2, ordered(fused=True), "ordered", 4),
        ("matmul_reduce_scatter", "cpu", 4, ordered(num_chunks=4), "ordered", 4),
        ("all_gather_matmul", "npu", 4, ordered(num_chunks=4), "chunked", 4),
        ("all_gather_matmul", "npu", 4, ordered(fused=True), "chunked", 4),  # a fused matmul is not in our tiles
        ("matmul_all_reduce", "cpu", 4, ordered(fused=True), "shm", 1),
    ],
)
def test_what_is_chosen(operator, device, ranks, settings, kernel, chunks):
    shape = (510 if ranks == 3 else 512, 64, 32) if device == "cpu" else (8192, 1024, 2048)  # chunks fill a device
    problem = Matmul(operator, *shape, torch.float32, device, ranks, shm=None)
    choice = choose(problem, settings)
    assert (choice.kernel, len(choice.sizes)) == (kernel, chunks)


def test_it_switches_on_by_itself():
    """One chunk must have the same bits as four."""
    assert Settings(deterministic=True).enabled
    assert choose(Matmul("matmul_all_reduce", 512, 64, 32, torch.float32, "cpu", 2), Settings(deterministic=True))


@promise("deterministic-megatron")
@pytest.mark.parametrize("count", [3, 4])
@on_ranks()
def test_megatrons_deterministic_mode_asks_for_it(group):
    outputs = []
    with Layers(group.size()) as layers:
        for settings in ({"num_chunks": 2}, {"num_chunks": 5}, {"deterministic": True}, {"fused": True}):
            ascend_parallel.configure(**settings)
            layer = layers.make("RowParallelLinear", config={"deterministic_mode": True})
            torch.manual_seed(group.rank())
            torch.nn.init.normal_(layer.weight)
            outputs.append(layer(torch.randn(500, layer.weight.shape[1]))[0].detach())
        ran = ops.COUNTS.as_dict()
    assert all(torch.equal(outputs[0], y) for y in outputs[1:])
    assert bool(ran)


def moved(tensor, elements):
    """Return the same values and strides at an offset of some elements in memory."""
    rows, columns = (tensor if tensor.is_contiguous() else tensor.t()).shape
    memory = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)[elements : elements + tensor.numel()]
    found = memory.view(rows, columns) if tensor.is_contiguous() else memory.view(rows, columns).t()
    return found.copy_(tensor)


@promise("deterministic-runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_where_operands_lie(dtype):
    """On an AMD EPYC torch.mm alone fails this: fp32, rows that do not begin at multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(0)
    for m, k, n in [(217, 114, 10), (143, 73, 1), (211, 11, 11), (64, 1024, 256)]:
        x = torch.randn(m, k, generator=generator).to(dtype)
        for w in (
            torch.randn(k, n, generator=generator).to(dtype),
            torch.randn(n, k, generator=generator).to(dtype).t(),
        ):
            for row_tile in (0, 16):
                expected = x.new_empty(m, n)
                multiply.multiply(x, w, expected, row_tile)
                for elements in (1, 2, 3, 5, 8, 16):
                    for which in range(3):
                        at = [elements if place == which else 0 for place in range(3)]
                        y = moved(x.new_zeros(m, n), at[2])
                        multiply.multiply(moved(x, at[0]), moved(w, at[1]), y, row_tile)
                        assert torch.equal(y, expected), (m, k, n, row_tile, at)
