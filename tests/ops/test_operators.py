"""The three operators against the unsharded truth in float64, on real gloo processes."""

import itertools
import runpy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from by_settings import start_matmul_all_reduce
from logged import logged
from pairwise import base_choice
from pool import on_ranks
from tolerances import LIMIT, close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

from ascend_parallel import Settings, ops

# Shapes of one rank's x: odd row counts, fewer rows than chunks, one to four dimensions, no rows.
SHAPES = [(64, 24), (100, 24), (7, 24), (33, 3, 24), (6, 4, 2, 24), (24,), (0, 24), (48, 1, 24)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CHUNKS = [1, 2, 3, 4, 8]


def operands(group, shape, n, dtype, seed=0):
    """Return every rank's x and w in float64, for the truth, and this rank's operands."""
    generator = torch.Generator().manual_seed(seed)
    ranks = group.size()
    x = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double() for _ in range(ranks)]
    w = [torch.randn(shape[-1], n, generator=generator, dtype=torch.float64).to(dtype).double() for _ in range(ranks)]
    return x, w, x[group.rank()].to(dtype), w[group.rank()].to(dtype)


def truth_all_reduce(x, w, rank):
    return sum(a @ b for a, b in zip(x, w, strict=True))


def truth_reduce_scatter(x, w, rank):
    return truth_all_reduce(x, w, rank).chunk(len(x))[rank]


def truth_all_gather(x, w, rank):
    return torch.cat(x) @ w[rank]


def every_case(group, dtype):
    worst = {}
    for shape, chunks in itertools.product(SHAPES, CHUNKS):
        x, w, x_r, w_r = operands(group, shape, 40, dtype)
        y = ops.matmul_all_reduce(x_r, w_r, group, num_chunks=chunks)
        worst["all_reduce"] = close(y, truth_all_reduce(x, w, group.rank()), dtype)
        if len(shape) == 1:
            continue
        y, gathered = ops.all_gather_matmul(x_r, w_r, group, num_chunks=chunks)
        assert torch.equal(gathered.double(), torch.cat(x))
        worst["all_gather"] = close(y, truth_all_gather(x, w, group.rank()), dtype)
        x, w, x_r, w_r = operands(group, (shape[0] * group.size(), *shape[1:]), 40, dtype)
        y = ops.matmul_reduce_scatter(x_r, w_r, group, num_chunks=chunks)
        worst["reduce_scatter"] = close(y, truth_reduce_scatter(x, w, group.rank()), dtype)
    return worst


@pytest.mark.sample("1-torch.float32", "3-torch.bfloat16")
@pytest.mark.parametrize(("count", "dtype"), base_choice([1, 2, 3, 4, 5], DTYPES, (3, torch.float32)), ids=str)
def test_every_shape_and_chunk_count_matches_the_truth(ranks, count, dtype):
    for worst in ranks(count).run(every_case, dtype):
        assert set(worst) == {"all_reduce", "all_gather", "reduce_scatter"}
        assert max(worst.values()) <= LIMIT[dtype]


def layouts(x):
    """The same values with other strides: transposed, every second column, a slice of a wider tensor."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    padded = torch.nn.functional.pad(x, (3, 5))[:, 3 : 3 + x.shape[1]]
    return {"transposed": x.t().contiguous().t(), "strided": wide[:, ::2], "slice": padded, "expanded": x}


def strided_cases(group):
    x, w, x_r, w_r = operands(group, (96, 24), 24, torch.float32)  # a square weight too
    for x_s, w_s in itertools.product(layouts(x_r).values(), layouts(w_r).values()):
        close(ops.matmul_all_reduce(x_s, w_s, group, num_chunks=3), truth_all_reduce(x, w, 0), torch.float32)
        close(
            ops.all_gather_matmul(x_s, w_s, group, num_chunks=3)[0], truth_all_gather(x, w, group.rank()), torch.float32
        )
        if 96 % group.size() == 0:
            y = ops.matmul_reduce_scatter(x_s, w_s, group, num_chunks=3)
            close(y, truth_reduce_scatter(x, w, group.rank()), torch.float32)
    batch_first = x_r.view(8, 12, 24).transpose(0, 1)
    y = ops.matmul_all_reduce(batch_first, w_r, group, num_chunks=4)
    close(y, sum(a.view(8, 12, 24).transpose(0, 1) @ b for a, b in zip(x, w, strict=True)), torch.float32)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_strides(ranks, count):
    ranks(count).run(strided_cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_two_ranks_have_the_bits_of_one_chunk(group, dtype):
    _, _, x_r, w_r = operands(group, (512, 64), 48, dtype)
    results = {}
    for chunks in (1, 2, 3, 4, 8):
        results[chunks] = (
            ops.matmul_all_reduce(x_r, w_r, group, num_chunks=chunks),
            ops.matmul_reduce_scatter(x_r, w_r, group, num_chunks=chunks),
            ops.all_gather_matmul(x_r, w_r, group, num_chunks=chunks)[0],
        )
    for chunks in (2, 3, 4, 8):
        assert all(map(torch.equal, results[1], results[chunks])), chunks


@pytest.mark.parametrize("count", [3, 4])
@on_ranks()
def test_all_gather_is_bit_exact_on_any_number_of_ranks(group):
    _, _, x_r, w_r = operands(group, (160, 64), 48, torch.float32)
    whole = ops.all_gather_matmul(x_r, w_r, group, num_chunks=1)[0]
    for chunks in (2, 3, 4, 8):
        assert torch.equal(whole, ops.all_gather_matmul(x_r, w_r, group, num_chunks=chunks)[0]), chunks


@pytest.mark.sample("nccl-3", "hccl-3", "unknown-3")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["nccl", "hccl", "unknown"])
@on_ranks()
def test_the_way_of_a_backend_that_does_not_block_the_host(group, name):
    """Strided batches, gathers without lists, the backend's own reduce-scatter."""
    with as_backend(name, group):
        every_case(group, torch.float32)
        strided_cases(group)


@on_ranks(2)
def test_a_backend_without_a_row_is_said_once_on_rank_0(group):
    with logged(lambda record: record.getMessage()) as lines, as_backend("unknown", group):
        for rows in (64, 128):
            ops.matmul_all_reduce(torch.ones(rows, 8), torch.ones(8, 8), group, num_chunks=2)
    said = [line for line in lines if line.startswith("backend 'gloo' on cpu is not known to this package")]
    assert len(said) == (group.rank() == 0)


@on_ranks(2)
def test_tensors_of_a_gpu_are_not_sent_from_the_hosts_memory(group):
    """Of a tensor on a GPU gloo can run collectives, but neither send nor receive."""
    from ascend_parallel.ops.collectives import all_gathers, reduce_scatter_single, reduce_scatters

    with FakeTensorMode():
        x = torch.empty(8, 4, device="cuda")
        starts = reduce_scatters(x, (4, 4), group)
        gathers = all_gathers(x, (4, 4), group, keep=True)
    assert [start.func for start in starts] == [reduce_scatter_single] * 2
    assert [tuple(rows.shape) for rows in gathers.rows] == [(2, 4, 4)] * 2
    assert not gathers.in_place


class Refusing(dist.ProcessGroup):
    """A group that is written in Python, and has no name of its own."""

    def _get_backend(self, device):
        return self

    def name(self):
        return "refusing"

    def allreduce(self, tensors, options):
        raise RuntimeError("refused")


@on_ranks(2)
def test_an_error_names_a_group_that_is_written_in_python(group):
    if not hasattr(dist.Backend, "REFUSING"):  # the processes serve other tests too
        dist.Backend.register_backend("refusing", lambda _, rank, size, limit: Refusing(rank, size), devices=["cpu"])
    own = dist.new_group(backend="refusing")
    with pytest.raises(ops.CollectiveError, match=r"on group '\w+' of ranks 0, 1 failed on rank \d: refused"):
        start_matmul_all_reduce(torch.ones(64, 8), torch.ones(8, 8), own, Settings(num_chunks=2))
    with mock.patch.object(Refusing, "group_name", c10d._world.pg_names[own]):  # without it torch cannot destroy it
        dist.destroy_process_group(own)


def gradients(group, operator, chunks):
    shape = (group.size() * 16, 3, 24)
    x, w, x_r, w_r = operands(group, shape, 40, torch.float64)
    x_r.requires_grad_()
    w_r.requires_grad_()
    for tensor in (*x, *w):
        tensor.requires_grad_()
    rank = group.rank()
    if operator == "matmul_all_reduce":
        y, truth = ops.matmul_all_reduce(x_r, w_r, group, num_chunks=chunks), truth_all_reduce(x, w, rank)
        factor = torch.linspace(-1, 1, truth.numel(), dtype=torch.float64).view_as(truth)
        (truth * factor).sum().backward()
        (y * factor).sum().backward()
    elif operator == "matmul_reduce_scatter":
        y = ops.matmul_reduce_scatter(x_r, w_r, group, num_chunks=chunks)
        truth = truth_all_reduce(x, w, rank)
        factor = torch.linspace(-1, 1, truth.numel(), dtype=torch.float64).view_as(truth)
        (truth * factor).sum().backward()
        (y * factor.chunk(group.size())[rank]).sum().backward()
    else:
        y = ops.all_gather_matmul(x_r, w_r, group, num_chunks=chunks)[0]
        truth = [truth_all_gather(x, w, r) for r in range(group.size())]
        factor = [torch.linspace(-1, r + 1, t.numel(), dtype=torch.float64).view_as(t) for r, t in enumerate(truth)]
        sum((t * f).sum() for t, f in zip(truth, factor, strict=True)).backward()
        (y * factor[rank]).sum().backward()
    close(x_r.grad, x[rank].grad, torch.float64)
    close(w_r.grad, w[rank].grad, torch.float64)


@pytest.mark.parametrize("operator", ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_of_the_operators(ranks, count, operator):
    for chunks in (1, 4):
        ranks(count).run(gradients, operator, chunks)


@on_ranks(2)
def test_a_bias_added_on_each_rank_is_caught(group):
    """The comparison detects a bias that every rank adds before the sum."""
    x, w, x_r, w_r = operands(group, (64, 24), 40, torch.float32)
    bias = torch.full((40,), 0.01)
    y = ops.matmul_all_reduce(torch.cat([x_r, torch.ones(64, 1)], 1), torch.cat([w_r, bias[None]]), group, num_chunks=4)
    with pytest.raises(AssertionError):
        close(y, truth_all_reduce(x, w, 0) + bias, torch.float32)


@on_ranks(3)
def test_nan_on_one_rank_reaches_all(group):
    x = torch.ones(64, 8)
    if group.rank() == 1:
        x[40, 3] = float("nan")
    y = ops.matmul_all_reduce(x, torch.ones(8, 8), group, num_chunks=4)
    assert y.isnan().any(dim=1).nonzero().tolist() == [[40]]


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(group):
    x, w = torch.ones(64, 8), torch.ones(8, 4)
    cases = [
        (lambda: ops.matmul_all_reduce(torch.ones(64, 7), w, group), r"\[64, 7\].*\[8, 4\].*not a matmul"),
        (lambda: ops.matmul_all_reduce(x.double(), w, group), "float64.*float32.*one floating dtype"),
        (lambda: ops.matmul_all_reduce(x.long(), w.long(), group), "int64"),
        (lambda: ops.matmul_all_reduce(x, torch.ones(2, 8, 4), group), "not a matmul"),
        (lambda: ops.matmul_reduce_scatter(torch.ones(65, 8), w, group), "65.*not divisible by the 2 ranks"),
        (lambda: ops.matmul_reduce_scatter(torch.ones(8), w, group), "before the last"),
        (lambda: ops.all_gather_matmul(torch.ones(8), w, group), "before the last"),
        (lambda: ops.matmul_all_reduce(x, w, group, num_chunks=0), "num_chunks=0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@on_ranks(2)
def test_operators_trace(group):
    x = torch.randn(32, 2, 16, requires_grad=True)
    w = torch.randn(16, 24, requires_grad=True)

    def step(x, w):
        y = ops.matmul_reduce_scatter(x, w, group, num_chunks=2)
        z, _ = ops.all_gather_matmul(torch.relu(y), w.t(), group, num_chunks=2)
        return ops.matmul_all_reduce(z, w, group, num_chunks=2)

    eager = step(x, w)
    eager.sum().backward()
    expected = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w)
    compiled.sum().backward()
    assert torch.equal(compiled, eager)
    torch.testing.assert_close((x.grad, w.grad), expected)

    class Step(torch.nn.Module):
        def forward(self, x, w):
            return step(x, w)

    program = torch.export.export(Step(), (x.detach(), w.detach()))
    assert torch.equal(program.module()(x.detach(), w.detach()), eager)
    targets = sorted(str(node.target) for node in program.graph.nodes if "ascend_parallel" in str(node.target))
    assert [target.split(".")[1] for target in targets] == [
        "all_gather_matmul",
        "matmul_all_reduce",
        "matmul_reduce_scatter",
    ]


@on_ranks(2)
def test_operators_pass_opcheck(group):
    x = torch.randn(32, 16, requires_grad=True)
    w = torch.randn(16, 24, requires_grad=True)
    for operator in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
        torch.library.opcheck(getattr(torch.ops.ascend_parallel, operator).default, (x, w, group.group_name, [2]))


def given_sizes(group):
    """Rows of each chunk in place of a count: the same numbers, and as many chunks."""
    x, w, x_r, w_r = operands(group, (160, 24), 40, torch.float64)
    ops.COUNTS.clear()
    close(ops.matmul_all_reduce(x_r, w_r, group, num_chunks=[16, 64, 80]), truth_all_reduce(x, w, 0), torch.float64)
    own = 160 // group.size()
    rows = [16, own - 16]
    y = ops.matmul_reduce_scatter(x_r, w_r, group, num_chunks=rows)
    close(y, truth_reduce_scatter(x, w, group.rank()), torch.float64)
    y, _ = ops.all_gather_matmul(x_r, w_r, group, num_chunks=[32, 128])
    close(y, truth_all_gather(x, w, group.rank()), torch.float64)
    with pytest.raises(ValueError, match=r"num_chunks=\[160\] is not allowed"):
        ops.matmul_all_reduce(x_r, w_r, group, num_chunks=[160])
    with pytest.raises(ValueError, match="150 rows together"):
        ops.matmul_all_reduce(x_r, w_r, group, num_chunks=[80, 70])
    with pytest.raises(ValueError, match="all but the last multiples of 16"):
        ops.matmul_all_reduce(x_r, w_r, group, num_chunks=[70, 90])
    return {name: count["chunks"] for name, count in ops.COUNTS.as_dict().items()}


@pytest.mark.parametrize("count", [2, 4])
def test_the_rows_of_each_chunk_can_be_given(ranks, count):
    expected = {"matmul_all_reduce": 3, "matmul_reduce_scatter": 2, "all_gather_matmul": 2}
    assert ranks(count).run(given_sizes) == [expected] * count


def counted(group):
    ops.COUNTS.clear()
    ops.matmul_all_reduce(torch.ones(64, 8), torch.ones(8, 8), group, num_chunks=4)
    ops.matmul_all_reduce(torch.ones(20, 8), torch.ones(8, 8), group, num_chunks=4)
    return ops.COUNTS.as_dict()


def test_counts(ranks):
    assert ranks(2).run(counted)[0] == {"matmul_all_reduce": {"calls": 2, "chunks": 5, "collectives": 5}}


def test_the_folder_is_not_imported_twice():
    with pytest.raises(ImportError, match=r"import ascend_parallel\.ops"):
        runpy.run_path(ops.__file__, run_name="ops")
