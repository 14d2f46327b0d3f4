"""Chunks keep the bits of the plain layer wherever the probe promises it."""

import itertools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from by_settings import run_all_gather_matmul, start_matmul_all_reduce, start_matmul_reduce_scatter
from marks import promise
from pool import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel import Settings
from ascend_parallel.ops import Matmul, bits, choose, probing
from ascend_parallel.ops.bits import keep_bits
from ascend_parallel.ops.decision import OF_GROUPS
from ascend_parallel.ops.operators import decision_for
from ascend_parallel.ops.probing import ROW_MAJOR, TRANSPOSED, cancelling_operands
from ascend_parallel.overlap.linear import column_linear, row_linear

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def plain(operator, x, w, group):
    """Return the plain result: a whole matmul and one collective."""
    ranks, rank = group.size(), group.rank()
    if operator == "all_gather_matmul":
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x, group=group)
        return torch.matmul(torch.cat(parts), w)
    y = torch.matmul(x, w)
    dist.all_reduce(y, group=group)
    return y if operator == "matmul_all_reduce" else y.chunk(ranks)[rank]


def ours(operator, x, w, group, settings, layout):
    if operator == "all_gather_matmul":
        return run_all_gather_matmul(x, w, group, settings, layout=layout)[0]
    start = start_matmul_all_reduce if operator == "matmul_all_reduce" else start_matmul_reduce_scatter
    return start(x, w, group, settings, layout=layout).wait()


def promised(group, dtype, shapes):
    """Return for every call: operator, shape, layout, chunks, the promise about its bits, and whether it held."""
    found = []
    for (m, k, n), layout in itertools.product(shapes, (TRANSPOSED, ROW_MAJOR)):
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(m, k, generator=generator).to(dtype)
        w = torch.randn(n, k, generator=generator).to(dtype)
        w = w.t() if layout == TRANSPOSED else w.t().contiguous()
        for operator in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
            expected = plain(operator, x, w, group)
            gathered = m * group.size() if operator == "all_gather_matmul" else m
            problem = Matmul(operator, gathered, k, n, dtype, "cpu", group.size())
            for chunks in (2, 4, 8):
                settings = Settings(num_chunks=chunks)
                choice = decision_for(problem, group, settings, None, CPU, layout)
                same = torch.equal(ours(operator, x, w, group, settings, layout), expected)
                found.append((operator, (m, k, n), layout, choice.sizes, choice.exact, same, choice.reason))
    return found


SHAPES = {
    torch.float32: [(256, 1024, 256), (512, 1024, 1024), (1024, 2048, 256), (512, 8192, 256), (96, 64, 48)],
    torch.float64: [(256, 1024, 256), (512, 2048, 256), (96, 64, 48)],
    torch.bfloat16: [(256, 1024, 256), (512, 2048, 256), (96, 16, 16)],
    torch.float16: [(256, 1024, 64), (96, 16, 16)],
}


@promise("layer-bits")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("count", "dtype", "part"),
    [
        (2, torch.float32, slice(0, None, 2)),
        (2, torch.float32, slice(1, None, 2)),
        *((2, dtype, slice(None)) for dtype in DTYPES[1:]),
        (3, torch.float32, slice(0, None, 2)),
        (3, torch.bfloat16, slice(None)),
    ],
    ids=str,
)
def test_what_is_promised_holds_at_the_sizes_of_real_layers(ranks, count, dtype, part):
    shapes = [(m - m % count, k, n) for m, k, n in SHAPES[dtype][part]]
    first, *others = ranks(count).run(promised, dtype, shapes)
    for call in first:
        *what, exact, same, reason = call
        assert exact in (True, False), what
        assert same or not exact, what
        assert exact or count > 2 or "on this machine" in reason, what
    assert all([call[3:5] for call in found] == [call[3:5] for call in first] for found in others)
    asked = [call for call in first if count == 2 or call[0] == "all_gather_matmul"]
    assert sum(call[4] for call in asked) >= len(asked) / 3  # many calls of these shapes can be cut with their bits


def as_if(smallest, group, kept):
    """Return the ranks' choice if chunks of `smallest[rank]` rows and more keep the bits."""
    usual = probing.same_bits
    probing.same_bits = lambda cut, *rest: min(cut.sizes) >= smallest[group.rank()]
    try:
        problem = Matmul("matmul_all_reduce", 1024, 64, 32, torch.float32, "cpu", group.size())
        choice = keep_bits(choose(problem, kept), group, CPU, TRANSPOSED)
        return choice.sizes, choice.exact, choice.code
    finally:
        probing.same_bits = usual
        OF_GROUPS.clear()


def agreements(group):
    eight = Settings(num_chunks=8)
    shape = (1024, 64, 32)
    return [
        as_if((1, 1), group, eight),
        as_if((129, 129), group, eight),
        as_if((1, 200), group, eight),
        as_if((200, 1), group, eight),
        as_if((300, 2000), group, eight),
        as_if((129, 129), group, Settings(customized_coc={shape: (64, 960)})),
    ]


@promise("probe-machines")
def test_ranks_take_chunks_that_keep_bits_on_all_their_machines(ranks):
    first, second = ranks(2).run(agreements)
    assert first == second
    asked, coarser, others, others_too, none, given = first
    assert (len(asked[0]), asked[1]) == (8, True)
    assert (len(coarser[0]), min(coarser[0]), coarser[1]) == (4, 176, True)
    assert coarser[2] == "bits_fewer"
    assert others[:2] == others_too[:2] == ((256, 512, 256), True)
    assert (len(none[0]), none[1]) == (8, False)  # the requested chunks: the run still overlaps
    assert none[2] == "bits_change"
    assert given[:2] == ((64, 960), False)
    assert given[2] == "bits_change"


def test_the_machine_is_really_asked(monkeypatch):
    """The probe detects a planted routine with other bits for few rows, and nothing else."""
    real = torch.mm

    def changing(x, w, *, out=None):
        y = real(x, w) if x.shape[0] > 100 else real(x.flip(1), w.flip(0))
        return y if out is None else out.copy_(y)

    problem = Matmul("matmul_all_reduce", 640, 512, 48, torch.float32, "cpu", 2)
    cuts = [(320, 320), (128, 256, 256), (80, 160, 160, 160, 80)]
    probing.same_bits.cache_clear()
    monkeypatch.setattr(torch, "mm", changing)
    try:
        found = [
            probing.same_bits(bits.CutMatmul(problem, "chunked", cut, 0, False), TRANSPOSED, CPU, 1) for cut in cuts
        ]
    finally:
        probing.same_bits.cache_clear()
    assert found == [True, True, False]


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.matmuls += function._schema.name == "aten::mm"
        return function(*args, **(kwargs or {}))


@promise("probe-no-trace")
@on_ranks(2)
def test_the_probe_leaves_no_trace(group):
    """The probe is invisible to modes, random numbers and autograd."""
    x, w = torch.randn(224, 40, requires_grad=True), torch.randn(24, 40, requires_grad=True)
    before = torch.get_rng_state()
    with Counting() as mode:
        y = row_linear(x, w, group=group, settings=Settings(num_chunks=4))
    y.sum().backward()
    assert mode.matmuls == 4
    assert torch.equal(before, torch.get_rng_state())
    assert x.grad is not None


@promise("layer-bits")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shape", [(2048, 1024, 256), (1024, 256, 1024)])
@on_ranks(2)
def test_whole_layers_keep_their_bits_on_two_ranks(group, shape, sequence_parallel):
    """On a machine where two chunks of 2,048 rows keep the bits, the ranks find such chunks."""
    m, k, n = shape
    results = []
    for chunks in (1, 8):
        settings = Settings(num_chunks=chunks, mode=2)
        common = {"group": group, "settings": settings, "sequence_parallel": sequence_parallel}
        for run, rows in ((column_linear, m // group.size() if sequence_parallel else m), (row_linear, m)):
            generator = torch.Generator().manual_seed(group.rank())
            x = torch.randn(rows, 1, k, generator=generator).requires_grad_()
            w = torch.randn(n, k, generator=generator).requires_grad_()
            y = run(x, w, **common)
            y.backward(torch.randn(y.shape, generator=generator))
            results.append((y.detach(), x.grad, w.grad))
    half = len(results) // 2
    pairs = zip(results[:half], results[half:], strict=True)
    assert all(torch.equal(a, b) for first, second in pairs for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", [TRANSPOSED, ROW_MAJOR])
@pytest.mark.parametrize("k", [1, 7, 512])
def test_the_operands_of_the_probe_cancel_and_show_an_order_of_sums(k, layout):
    problem = Matmul("matmul_all_reduce", 600, k, 520, torch.bfloat16, "cpu", 2)
    x, w = (operand.float() for operand in cancelling_operands(problem, layout, CPU))
    assert (x.shape, w.shape, w.is_contiguous()) == ((600, k), (k, 520), layout == ROW_MAJOR or k == 1)
    assert (x.double() @ w.double()).abs().max() < 1e-13 * max(k, 1)

    def share_that_differs(x, w):
        """The share of elements whose bits in 16 bits tell one order of the sums over K from another."""
        first, last = x[:, : k // 2] @ w[: k // 2], x[:, k // 2 :] @ w[k // 2 :]
        reversed_k = torch.arange(k - 1, -1, -1)
        other = x[:, reversed_k] @ w[reversed_k]
        return ((first + last).bfloat16() != other.bfloat16()).float().mean()

    if k == 512:
        assert share_that_differs(x, w) > 0.5
        generator = torch.Generator().manual_seed(1)
        usual = torch.randn(x.shape, generator=generator), torch.randn(w.shape, generator=generator)
        assert share_that_differs(*usual) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_operands_of_the_probe_have_products_that_are_rounded(dtype):
    """A routine that rounds each product, and one that fuses it with the sum, give other bits for them.

    MKL on an AMD EPYC takes the one for some columns in float64, and the other for all.
    """
    x, w = cancelling_operands(Matmul("matmul_all_reduce", 32, 64, 64, dtype, "cpu", 2), ROW_MAJOR, CPU)
    products = (x[0] * w[:, 0]).tolist()
    exact = [Fraction(a) * Fraction(b) for a, b in zip(x[0].tolist(), w[:, 0].tolist(), strict=True)]
    assert sum(Fraction(a) != b for a, b in zip(products, exact, strict=True)) > 48
