"""COC_DETERMINISTIC=tp: the same bits of y, dX, dW and db at every tensor-parallel degree, whatever the chunks."""

import pytest
import torch
import torch.distributed as dist
from backends import as_backend
from every_degree import at_degrees, digest
from marks import promise

from ascend_parallel import DegreeError, Settings, column_linear, row_linear
from ascend_parallel.ops import Matmul, choose
from ascend_parallel.overlap.row_blocks import RowBlocks

TREE = Settings(deterministic="tp")
ROWS = (1, 2, 4, 33, 512)


def drawn(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gathered(tensor, dim, group):
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def shares(features, parts, group):
    """Where this rank's features lie among all: its share of every part."""
    places, start = [], 0
    for part in parts or (features,):
        share = part // group.size()
        places.append(torch.arange(start + group.rank() * share, start + (group.rank() + 1) * share))
        start += part
    return torch.cat(places)


def whole_features(tensor, dim, parts, group):
    """A tensor of all ranks' features, in the order of one rank."""
    order = [torch.empty(tensor.shape[dim], dtype=torch.long) for _ in range(group.size())]
    dist.all_gather(order, shares(tensor.shape[dim] * group.size(), parts, group), group=group)
    return gathered(tensor, dim, group).index_select(dim, torch.cat(order).argsort())


def pair(group, rows, shape, dtype, settings, sequence_parallel=False, parts=()):
    """A column layer, an activation and a row layer: digests of the outputs and all gradients, gathered."""
    hidden, inner = shape
    x, dy = drawn((rows, hidden), dtype, 1), drawn((rows, hidden), dtype, 2)
    w1, w2, b1 = drawn((inner, hidden), dtype, 3), drawn((hidden, inner), dtype, 4), drawn((inner,), dtype, 5)
    mine = shares(inner, parts, group)
    w1, b1, w2 = w1[mine].requires_grad_(), b1[mine].requires_grad_(), w2[:, mine].requires_grad_()
    if sequence_parallel:
        x, dy = (t.chunk(group.size())[group.rank()].clone() for t in (x, dy))
    x.requires_grad_()
    options = {"group": group, "settings": settings, "sequence_parallel": sequence_parallel}
    options["parts"] = tuple(part // group.size() for part in parts)
    z = column_linear(x, w1, b1, **options)
    z.retain_grad()
    y = row_linear(z, w2, **options)
    y.backward(dy)
    found = {"y": y, "dx": x.grad}
    if sequence_parallel:
        found = {name: gathered(t, 0, group) for name, t in found.items()}
    features = {"z": (z, 1), "dz": (z.grad, 1), "dw1": (w1.grad, 0), "db1": (b1.grad, 0), "dw2": (w2.grad, 1)}
    found |= {name: whole_features(t.detach(), dim, parts, group) for name, (t, dim) in features.items()}
    return {name: digest(t) for name, t in found.items()}


def of_all(group, cases):
    return [pair(group, *case) for case in cases]


@promise("degree-layers")
@pytest.mark.sample("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_one_rank(ranks, dtype):
    """Also with chunks, and with sequence parallelism where the rows can be shared."""
    shape = (512, 512)
    cases = [(rows, shape, dtype, TREE) for rows in ROWS]
    cases += [(512, shape, dtype, Settings(deterministic="tp", num_chunks=chunks)) for chunks in (3, 8)]
    cases += [(512, shape, dtype, Settings(deterministic="tp", num_chunks=chunks), True) for chunks in (1, 4)]
    cases += [(rows, shape, dtype, Settings(deterministic="tp", num_chunks=2), True) for rows in (8, 72)]
    one, *others = at_degrees(ranks, of_all, cases)
    for degree in others:
        assert degree == one
    assert len({frozenset(case.items()) for case in one[4:9]}) == 1  # 512 rows: chunks and rows change nothing


def off_gloo(group, case):
    """What runs where the backend is not gloo: an all-to-all in place of sends and receives."""
    with as_backend("nccl", group):
        return pair(group, *case)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backends_that_are_not_gloo_have_the_same_bits(ranks, sequence_parallel):
    case = (64, (128, 256), torch.bfloat16, Settings(deterministic="tp", num_chunks=3), sequence_parallel)
    (one,) = at_degrees(ranks, of_all, [case], degrees=(1,))
    for count in (2, 4):
        assert ranks(count).run(off_gloo, case) == one * count


@pytest.mark.slow
def test_plain_bits_depend_on_the_degree(ranks):
    """The comparison above can fail."""
    for dtype in (torch.float32, torch.bfloat16):
        found = at_degrees(ranks, of_all, [(512, (1024, 1024), dtype, Settings(deterministic=True))])
        assert all(len({degree[0][name] for degree in found}) == 3 for name in ("y", "dx"))


@promise("degree-layers")
@pytest.mark.parametrize("parts", [(1024, 1024), (1024, 256, 256)])
def test_fused_weights(ranks, parts):
    """[gate; up] and [q; k; v]: block b has the b-th share of each part; without its parts a weight has other bits."""
    inner = sum(parts)
    cases = [
        (64, (256, inner), torch.float32, TREE, False, parts),
        (64, (256, inner), torch.float32, TREE, True, parts),
    ]
    one, two, four = at_degrees(ranks, of_all, cases)
    assert one == two == four
    assert one[0] == one[1]


def of_rows(group, dim, dtype, shared, in_tree, computed=None):
    """The gradients of a norm's parameters and of a bias, of rows that ranks share or that each has."""
    blocks = RowBlocks(group=group if shared else None, dim=dim)
    x, dy = (drawn((4, 96, 64), dtype, seed).to(computed or dtype) for seed in (1, 2))
    if shared:
        x, dy = (t.chunk(group.size(), dim)[group.rank()].clone() for t in (x, dy))
    weight, bias, added = (drawn((64,), dtype, seed).to(computed or dtype).requires_grad_() for seed in (3, 4, 5))

    def norm(block, parameters):
        return torch.nn.functional.layer_norm(block, (64,), parameters["weight"], parameters["bias"])

    parameters = {"weight": weight, "bias": bias}
    y = blocks.run(x, parameters, norm) if in_tree else norm(x, parameters)
    y = y + (blocks.expand(added, y) if in_tree else added)
    y.backward(dy)
    gradients = [weight.grad, bias.grad, added.grad]
    if shared and not in_tree:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
    whole = gathered(y, dim, group) if shared else y
    return [whole.detach(), *gradients]


@promise("degree-norms")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_norms_and_biases_of_shared_rows(ranks, dim, dtype):
    """The tree over tokens: alike on ranks that share the rows and on ranks that have them all; plain sums differ."""
    cases = [(ranks(count).run(of_rows, dim, dtype, True, True), count) for count in (1, 2, 4)]
    one = cases[0][0][0]
    for found, count in cases:
        assert all(torch.equal(a, b) for each in found for a, b in zip(one, each, strict=True)), count
    assert all(map(torch.equal, one, ranks(2).run(of_rows, dim, dtype, False, True)[1]))
    plain = [ranks(count).run(of_rows, dim, dtype, True, False)[0] for count in (1, 2, 4)]
    assert not all(map(torch.equal, plain[0][1:], plain[2][1:]))
    truth = ranks(1).run(of_rows, dim, dtype, True, False, torch.float64)[0]
    for found, whole, true in zip(one, plain[0], truth, strict=True):
        error, other = ((each - true).norm() / true.norm() for each in (found, whole))
        assert error <= max(1.05 * other, 1e-6)


@promise("degree-layers")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"), [((1024, 8192), torch.float32), ((4096, 1024), torch.float32), ((8192, 2048), torch.bfloat16)]
)
def test_sizes_of_real_layers_on_eight_ranks(ranks, dtype, shape):
    cases = [(rows, shape, dtype, TREE) for rows in (1, 33)] + [(512, shape, dtype, TREE, True)]
    one, eight = at_degrees(ranks, of_all, cases, degrees=(1, 8))
    assert eight == one


def errors(group, settings):
    """The largest and the mean relative error of a row layer in bf16 against float64."""
    x, w = drawn((256, 4096), torch.bfloat16, 1), drawn((512, 4096), torch.bfloat16, 2)
    mine = shares(4096, (), group)
    y = row_linear(x[:, mine], w[:, mine], group=group, settings=settings)
    truth = x.double() @ w.double().t()
    error = (y.double() - truth).abs()
    return float(error.norm() / truth.norm()), float(error.max() / truth.abs().max())


@promise("degree-error")
def test_sums_in_16_bits_are_as_exact_as_one_whole_call(ranks):
    whole = ranks(1).run(errors, Settings(mode=1))[0]
    for degree in (1, 2, 4):
        for error, limit in zip(ranks(degree).run(errors, TREE)[0], whole, strict=True):
            assert error <= 1.05 * limit


def sent(group, dtype, chunks):
    """The bytes that a rank sends for a sum over ranks, as a share of the tensor's bytes."""
    from ascend_parallel.ops import tree

    counted, isend, gather = [], dist.isend, tree.all_gather_single

    def counting_isend(tensor, *args, **options):
        counted.append(tensor.nbytes)
        return isend(tensor, *args, **options)

    def counting_gather(out, own, group):
        counted.append(own.nbytes * (group.size() - 1))
        return gather(out, own, group)

    dist.isend, tree.all_gather_single = counting_isend, counting_gather
    try:
        mine = 256 // group.size()
        settings = Settings(deterministic="tp", num_chunks=chunks)
        y = row_linear(drawn((64, mine), dtype, 1), drawn((96, mine), dtype, 2), group=group, settings=settings)
    finally:
        dist.isend, tree.all_gather_single = isend, gather
    return sum(counted) / y.nbytes


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_a_sum_sends_no_more_than_a_ring(ranks, count, chunks):
    """In 16 bits the slices are in fp32."""
    share = (count - 1) / count
    assert ranks(count).run(sent, torch.float32, chunks) == [2 * share] * count
    assert ranks(count).run(sent, torch.bfloat16, chunks) == [3 * share] * count


@promise("degree-refusals")
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (("matmul_all_reduce", 64, 96, 32, 3), "3 ranks are not 1, 2, 4 or 8"),
        (("matmul_all_reduce", 64, 66, 32, 2), "66 features of a rank cannot be cut into 4 equal blocks"),
        (("matmul_reduce_scatter", 36, 64, 32, 2), "36 rows, which ranks share, are not a multiple of 8"),
        (("all_gather_matmul", 64, 32, 20, 1), "20 features of a rank cannot be cut into 8 equal blocks"),
    ],
)
def test_what_cannot_be_cut_is_an_error(problem, words):
    operator, m, k, n, ranks = problem
    with pytest.raises(DegreeError, match=words):
        choose(Matmul(operator, m, k, n, torch.float32, "cpu", ranks), TREE)
