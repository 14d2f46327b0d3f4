"""torch's async tensor-parallel operators on CPU ranks: against float64, torch's own composition, and their errors."""

import itertools

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from marks import promise
from pairwise import base_choice, pairwise
from tolerances import close

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.call import matmul_of
from ascend_parallel.ops.operators import decision_for
from ascend_parallel.patches.symm_mem import devices

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(53, 24), (2, 37, 24), (33, 3, 24), (2, 3, 19, 16)]
CHUNKS = (1, 3)
CPU = torch.device("cpu")


def drawn(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gather(*args, **options):
    return torch.ops.symm_mem.fused_all_gather_matmul(*args, **options)


def scatter(*args):
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(*args)


class Registered:
    """The kernels with a number of chunks; both taken back at the end."""

    def __init__(self, num_chunks):
        self._num_chunks = num_chunks

    def __enter__(self):
        ascend_parallel.configure(num_chunks=self._num_chunks)
        ascend_parallel.register_symm_mem()
        COUNTS.clear()

    def __exit__(self, *_):
        ascend_parallel.unregister_symm_mem()
        ascend_parallel.configure()


def strided_alike(found, meta):
    """Assert the strides of the Meta kernel, on which compiled code relies; a dimension of size 1 has any."""
    assert found.shape == meta.shape
    pairs = zip(found.shape, found.stride(), meta.stride(), strict=True)
    assert all(size == 1 or mine == theirs for size, mine, theirs in pairs), (found.stride(), meta.stride())


def gather_matrix(group, shape, dtype, widths, num_chunks):
    """Every dimension of `shape`, with and without A, contiguous and as inductor strides it."""
    ranks, rank, name = group.size(), group.rank(), group.group_name
    with Registered(num_chunks):
        for dim, restride, keep in itertools.product(range(len(shape)), (False, True), (False, True)):
            shards = [drawn(*shape, seed=r, dtype=dtype) for r in range(ranks)]
            whole = torch.cat(shards, dim)
            bs = [drawn(whole.shape[-1], n, seed=90 + n, dtype=dtype) for n in widths]
            own = shards[rank]
            if restride:
                own = symmetric_memory.restride_A_shard_for_fused_all_gather_matmul(own, dim)
                bs = [b.t().contiguous().t() for b in bs]
            a, products = gather(own, bs, dim, name, return_A=keep)
            meta_a, metas = gather(own.to("meta"), [b.to("meta") for b in bs], dim, name, return_A=keep)
            assert (a is None) == (meta_a is None) == (not keep)
            if keep:
                assert torch.equal(a, whole)
                strided_alike(a, meta_a)
            for product, b, meta in zip(products, bs, metas, strict=True):
                close(product, whole.double() @ b.double(), dtype)
                strided_alike(product, meta)
        return COUNTS.as_dict().get("all_gather_matmul")  # on one rank nothing is counted


def scatter_matrix(group, shape, dtype, num_chunks):
    """Every dimension of `shape` (this rank's part, before the scatter R times as long), sums and averages."""
    ranks, rank, name = group.size(), group.rank(), group.group_name
    with Registered(num_chunks):
        for dim, restride, op in itertools.product(range(len(shape)), (False, True), ("sum", "avg")):
            last = dim == len(shape) - 1
            size = [n * ranks if i == dim and not last else n for i, n in enumerate(shape)]
            n = 5 * ranks if last else 21
            parts = [drawn(*size, seed=r, dtype=dtype) for r in range(ranks)]
            bs = [drawn(size[-1], n, seed=50 + r, dtype=dtype) for r in range(ranks)]
            total = sum(a.double() @ b.double() for a, b in zip(parts, bs, strict=True))
            truth = (total / ranks if op == "avg" else total).chunk(ranks, dim)[rank]
            own = parts[rank]
            if restride:
                own = symmetric_memory.restride_A_for_fused_matmul_reduce_scatter(own, dim)
            y = scatter(own, bs[rank], op, dim, name)
            close(y, truth, dtype)
            strided_alike(y, scatter(own.to("meta"), bs[rank].to("meta"), op, dim, name))
        return COUNTS.as_dict().get("matmul_reduce_scatter")


@pytest.mark.sample("2-torch.float64")
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (3, torch.float64)), ids=str)
def test_gathers_along_every_dimension(ranks, count, dtype):
    for index, shape in enumerate(SHAPES):
        for num_chunks, widths in itertools.product(CHUNKS, ([40], [8, 40, 16])):
            (counts, *_) = ranks(count).run(gather_matrix, shape, dtype, widths, num_chunks)
            assert counts["calls"] == 4 * (len(shape) - 1)  # along the last dimension the operator does not run
            assert (counts["chunks"] > counts["calls"]) == (num_chunks > 1), index


@pytest.mark.sample("2-torch.float64", "3-torch.bfloat16")
@pytest.mark.parametrize(("count", "dtype"), base_choice([2, 3, 4], DTYPES, (3, torch.float64)), ids=str)
def test_scatters_along_every_dimension(ranks, count, dtype):
    for shape, num_chunks in itertools.product(SHAPES, CHUNKS):
        (counts, *_) = ranks(count).run(scatter_matrix, shape, dtype, num_chunks)
        assert counts["calls"] == 4 * len(shape)
        assert (counts["chunks"] > counts["calls"]) == (num_chunks > 1)


@pytest.mark.slow
def test_one_rank(ranks):
    for shape in SHAPES:
        ranks(1).run(gather_matrix, shape, torch.float32, [8, 40], 3)
        ranks(1).run(scatter_matrix, shape, torch.float32, 3)


def own_result(group):
    """On one rank A has the values of the argument; an operator must not return its argument."""
    with Registered(1):
        shard = drawn(8, 4, seed=0)
        a, _ = gather(shard, [drawn(4, 4, seed=1)], 0, group.group_name)
        a.zero_()
        return bool(shard.any())


def test_the_gathered_rows_are_not_the_argument(ranks):
    assert ranks(1).run(own_result) == [True]


def bits(group, shape, dim, dtype):
    """Return for each operator whether bits are promised, whether they held, and the chunks."""
    ranks, rank, name = group.size(), group.rank(), group.group_name
    settings = ascend_parallel.configure(num_chunks=4)
    found = []
    with Registered(4):
        shard, b = drawn(*shape, seed=rank, dtype=dtype), drawn(shape[-1], 192, seed=7, dtype=dtype)
        reference = symmetric_memory._fused_all_gather_matmul_fallback(shard, [b], dim, name)
        result = gather(shard, [b], dim, name)
        choice = decision_for(
            matmul_of("all_gather_matmul", shard.movedim(dim, 0), b, group), group, settings, None, CPU
        )
        held = torch.equal(result[0], reference[0]) and torch.equal(result[1][0], reference[1][0])
        found.append((choice.exact, held, len(choice.sizes)))
        size = [n * ranks if i == dim else n for i, n in enumerate(shape)]
        part, b = drawn(*size, seed=rank, dtype=dtype), drawn(shape[-1], 192, seed=rank + 9, dtype=dtype)
        reference = symmetric_memory._fused_matmul_reduce_scatter_fallback(part, b, "sum", dim, name)
        result = scatter(part, b, "sum", dim, name)
        choice = decision_for(
            matmul_of("matmul_reduce_scatter", part.movedim(dim, 0), b, group), group, settings, None, CPU
        )
        found.append((choice.exact, torch.equal(result, reference), len(choice.sizes)))
    return found


GATHERED = [((128, 256), 0), ((4, 64, 256), 1), ((64, 4, 256), 0)]  # shapes of a rank's rows, and the dimension


@promise("symm-mem-bits")
@pytest.mark.sample(4)
@pytest.mark.parametrize(("dtype", "rows", "count"), pairwise(DTYPES, GATHERED, [2, 3, 4]), ids=str)
def test_bits_are_those_of_a_whole_collective_and_a_whole_matmul(ranks, dtype, rows, count):
    """Gathers on any number of ranks; sums on two, since more are summed in another order than gloo's."""
    chunks = []
    for gathered, scattered in ranks(count).run(bits, *rows, dtype):
        assert gathered[1] or not gathered[0]
        assert scattered[1] or not scattered[0] or count > 2
        chunks += [gathered[2], scattered[2]]
    assert max(chunks) > 1


def refusals(group):
    """Return the error of each call that is not allowed."""
    name, a, b = group.group_name, torch.ones(4, 6, 8), torch.ones(8, 4)
    calls = {
        "gather dim": lambda: gather(a, [b], 3, name),
        "negative": lambda: gather(a, [b], -1, name),
        "vector": lambda: gather(torch.ones(8), [b], 0, name),
        "no B": lambda: gather(a, [], 0, name),
        "B": lambda: gather(a, [b, b.t()], 0, name),
        "last B": lambda: gather(a, [b], 2, name),
        "B dtype": lambda: gather(a, [b.double()], 0, name),
        "integers": lambda: gather(a.int(), [b.int()], 0, name),
        "op": lambda: scatter(a, b, "max", 0, name),
        "scatter dim": lambda: scatter(a, b, "sum", 3, name),
        "rows": lambda: scatter(torch.ones(5, 6, 8), b, "sum", 0, name),
        "group": lambda: scatter(a, b, "sum", 0, "no such group"),
    }
    found = {}
    with Registered(2):
        for what, call in calls.items():
            with pytest.raises((ValueError, RuntimeError)) as error:
                call()
            found[what] = str(error.value)
    return found


def test_errors_name_operator_argument_and_what_is_allowed(ranks):
    expected = {
        "gather dim": "symm_mem::fused_all_gather_matmul: gather_dim=3 is not allowed for A of 3 dimensions: 0 to 2",
        "negative": "gather_dim=-1 is not allowed for A of 3 dimensions: 0 to 2",
        "vector": "A of shape [8] is not allowed: two dimensions or more",
        "no B": "Bs=[] is not allowed: give one matrix or more",
        "B": "Bs[1] of shape [4, 8] is not allowed: [8, N]",
        "last B": "Bs[0] of shape [8, 4] is not allowed: [16, N]",
        "B dtype": "Bs[0] of torch.float64 is not allowed with A of torch.float32: both of one floating dtype",
        "integers": "Bs[0] of torch.int32 is not allowed with A of torch.int32: both of one floating dtype",
        "op": "symm_mem::fused_matmul_reduce_scatter: reduce_op='max' is not allowed: sum or avg",
        "scatter dim": "scatter_dim=3 is not allowed for A of 3 dimensions: 0 to 2",
        "rows": "scatter_dim=0 of A @ B [5, 6, 4] is not allowed: its size must be divisible by the 2 ranks",
        "group": "no such group",
    }
    for found in ranks(2).run(refusals):
        assert {what: text in found[what] for what, text in expected.items()} == dict.fromkeys(expected, True), found


def disagreement(group):
    """Rank 1 has other chunks: both ranks raise before the first collective."""
    with Registered(2 + group.rank()), pytest.raises(ascend_parallel.DisagreementError) as error:
        scatter(torch.ones(64, 8), torch.ones(8, 4), "sum", 0, group.group_name)
    return str(error.value)


def test_ranks_with_other_settings_raise_an_error(ranks):
    for text in ranks(2).run(disagreement):
        assert "COC_PARALLEL_NUM is 2 on rank 0, 3 on rank 1" in text


def options(group):
    """COC_MODE=0 leaves matmuls whole; gradients are not recorded; autocast changes no dtype."""
    a, b, name = torch.ones(64, 8, requires_grad=True), torch.ones(8, 4, requires_grad=True), group.group_name
    chunks = []
    for settings in ({"num_chunks": 4, "mode": 0}, {"num_chunks": 4}, {"fused": True}):
        ascend_parallel.configure(**settings)
        COUNTS.clear()
        y = scatter(a, b, "sum", 0, name)
        with torch.autocast("cpu", torch.bfloat16):
            _, products = gather(a, [b, b], 0, name)
        assert [t.dtype for t in (y, *products)] == [torch.float32] * 3
        chunks.append(COUNTS.as_dict()["matmul_reduce_scatter"]["chunks"])
    return chunks[:2], y.unique().tolist()


def with_options(group):
    """`options`, with the kernels registered."""
    with Registered(1):
        return options(group)


def test_settings_gradients_and_autocast(ranks):
    for chunks, values in ranks(2).run(with_options):
        assert chunks == [1, 2]
        assert values == [16.0]


def kernels():
    return [devices.has_kernel(name, key) for name in (devices.GATHER, devices.SCATTER) for key in devices.KEYS]


def test_registering_is_idempotent_and_undone():
    before = torch.compiler.config.cache_key_tag
    assert kernels() == [False] * 4
    first = ascend_parallel.register_symm_mem()
    assert len(first) == 4
    assert ascend_parallel.register_symm_mem() == first
    assert kernels() == [True] * 4
    assert torch.compiler.config.cache_key_tag != before
    ascend_parallel.unregister_symm_mem()
    ascend_parallel.unregister_symm_mem()
    assert kernels() == [False] * 4
    assert torch.compiler.config.cache_key_tag == before
    with pytest.raises(NotImplementedError):
        scatter(torch.ones(4, 4), torch.ones(4, 4), "sum", 0, "0")


def test_kernels_serve_cpus_and_npus():
    served = {name: devices.key_of(torch.device(name)) for name in ("cpu", "privateuseone", "cuda", "meta")}
    assert served == {"cpu": "CPU", "privateuseone": "PrivateUse1", "cuda": None, "meta": None}


def test_a_kernel_that_exists_stays():
    library = torch.library.Library("symm_mem", "FRAGMENT")
    library.impl(devices.SCATTER, lambda a, b, *_: a @ b + 1, "CPU")
    try:
        assert f"symm_mem::{devices.SCATTER} on CPU" not in ascend_parallel.register_symm_mem()
        assert scatter(torch.ones(1, 1), torch.ones(1, 1), "sum", 0, "0").item() == 2
        ascend_parallel.unregister_symm_mem()
        assert scatter(torch.ones(1, 1), torch.ones(1, 1), "sum", 0, "0").item() == 2
        assert devices.has_kernel(devices.SCATTER, "CPU")
    finally:
        ascend_parallel.unregister_symm_mem()
        library._destroy()
    assert kernels() == [False] * 4
