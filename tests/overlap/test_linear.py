"""column_linear and row_linear against the unsharded layer in float64: outputs and every gradient."""

import itertools

import pytest
import torch
from pool import on_ranks
from tolerances import close

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops import COUNTS

# Shapes of the whole input: odd row counts, fewer rows than chunks, one to four dimensions.
SHAPES = [(96, 24), (100, 24), (7, 24), (33, 3, 24), (6, 4, 2, 24), (24,)]
K = 24


def whole_layer(shape, n, dtype, seed=3):
    """Input, weight, bias and output gradient of the whole layer, in float64 but of `dtype`'s precision."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape, (n, shape[-1]), (n,), (*shape[:-1], n))
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes]
    x, weight, bias, dy = tensors
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    y = torch.nn.functional.linear(x, weight, bias)
    y.backward(dy)
    return x, weight, bias, y, dy


def part(tensor, group, dim):
    """Return this rank's shard of a whole tensor, as a leaf."""
    return tensor.detach().chunk(group.size(), dim)[group.rank()].clone()


def check_column(group, shape, dtype, settings, sequence_parallel, outputs=None):
    x, weight, bias, y, dy = whole_layer(shape, outputs or 12 * group.size(), dtype)
    x_r = (part(x, group, 0) if sequence_parallel else x.detach()).to(dtype).requires_grad_()
    w_r, b_r = part(weight, group, 0).to(dtype).requires_grad_(), part(bias, group, 0).to(dtype).requires_grad_()
    y_r = column_linear(x_r, w_r, b_r, group=group, settings=settings, sequence_parallel=sequence_parallel)
    y_r.backward(part(dy, group, -1).to(dtype))
    close(y_r, part(y, group, -1), dtype)
    close(x_r.grad, part(x.grad, group, 0) if sequence_parallel else x.grad, dtype)
    close(w_r.grad, part(weight.grad, group, 0), dtype)
    close(b_r.grad, part(bias.grad, group, 0), dtype)


def check_row(group, shape, dtype, settings, sequence_parallel, inputs=None, outputs=40):
    shape = (*shape[:-1], inputs or 12 * group.size())
    x, weight, bias, y, dy = whole_layer(shape, outputs, dtype)
    x_r, w_r = (part(t, group, -1).to(dtype).requires_grad_() for t in (x, weight))
    b_r = bias.detach().to(dtype).requires_grad_()
    y_r = row_linear(x_r, w_r, group=group, settings=settings, sequence_parallel=sequence_parallel) + b_r
    y_r.backward((part(dy, group, 0) if sequence_parallel else dy).to(dtype))
    close(y_r, part(y, group, 0) if sequence_parallel else y, dtype)
    close(x_r.grad, part(x.grad, group, -1), dtype)
    close(w_r.grad, part(weight.grad, group, -1), dtype)
    if not sequence_parallel:  # there each rank has the gradient of its own rows
        close(b_r.grad, bias.grad, dtype)


# float64 on every number of ranks, of the others each on one; the rest in `make stress`.
DTYPES = {2: torch.float32, 3: torch.bfloat16, 4: torch.float16}
CASES = [
    pytest.param(count, dtype, marks=[] if dtype in (torch.float64, DTYPES[count]) else pytest.mark.stress)
    for count in DTYPES
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
]


@pytest.mark.sample("2-torch.float32")
@pytest.mark.parametrize(("count", "dtype"), CASES, ids=str)
@on_ranks()
def test_every_path_matches_the_truth(group, dtype):
    for shape, chunks in itertools.product(SHAPES, (1, 2, 3, 4, 8)):
        settings = Settings(num_chunks=chunks, mode=2)
        check_column(group, shape, dtype, settings, False)
        check_row(group, shape, dtype, settings, False)
        if len(shape) > 1:
            rows = (shape[0] * group.size(), *shape[1:])
            check_row(group, rows, dtype, settings, True)
            for recompute, order in itertools.product((True, False), ("communicate_first", "compute_first")):
                variant = Settings(num_chunks=chunks, mode=2, recompute_all_gather=recompute, order=order)
                check_column(group, rows, dtype, variant, True)


@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_square_local_weights(group):
    """A square weight: only here a transposition guessed from sizes goes wrong."""
    settings = Settings(num_chunks=2)
    for sequence_parallel in (False, True):
        check_column(group, (96, 12), torch.float64, settings, sequence_parallel)
    x, weight, _, _, dy = whole_layer((64, 12 * group.size()), 12, torch.float64)
    x_r, w_r = (part(t, group, -1).requires_grad_() for t in (x, weight))
    row_linear(x_r, w_r, group=group, settings=settings).backward(dy)
    close(x_r.grad, part(x.grad, group, -1), torch.float64)


@pytest.mark.parametrize("count", [2, 3])
@on_ranks()
def test_operands_and_gradients_of_any_strides(group):
    settings = Settings(num_chunks=3)
    for sequence_parallel in (False, True):
        x, weight, bias, y, dy = whole_layer((48, 2, K), 12 * group.size(), torch.float64)
        x_r = part(x, group, 0) if sequence_parallel else x.detach().clone()
        leaf = x_r.transpose(0, 1).contiguous().requires_grad_()  # the layer sees a transposed view
        wide = part(weight, group, 0).t().contiguous().requires_grad_()
        y_r = column_linear(
            leaf.transpose(0, 1), wide.t(), group=group, settings=settings, sequence_parallel=sequence_parallel
        )
        dy_r = part(dy, group, -1).transpose(0, 1).contiguous().transpose(0, 1)
        y_r.backward(dy_r)
        close(y_r, part(y - bias, group, -1), torch.float64)
        close(leaf.grad.transpose(0, 1), part(x.grad, group, 0) if sequence_parallel else x.grad, torch.float64)
        close(wide.grad.t(), part(weight.grad, group, 0), torch.float64)
        x_r = x.detach().clone().requires_grad_()
        w_r = part(weight, group, 0).requires_grad_()
        column_linear(x_r, w_r, group=group, settings=settings).sum().backward()  # an expanded gradient, stride 0
        close(x_r.grad, torch.ones_like(dy) @ weight.detach(), torch.float64)


def wanted_gradients(group):
    """Required gradients are right; others cost no computation, memory or communication."""
    settings = Settings(num_chunks=2)
    found = []
    for sequence_parallel, input_wanted, weight_wanted in itertools.product((False, True), repeat=3):
        x, weight, bias, _, dy = whole_layer((96, K), 12 * group.size(), torch.float64)
        x_r = (part(x, group, 0) if sequence_parallel else x.detach().clone()).requires_grad_(input_wanted)
        w_r, b_r = part(weight, group, 0).requires_grad_(weight_wanted), part(bias, group, 0).requires_grad_()
        y = column_linear(x_r, w_r, b_r, group=group, settings=settings, sequence_parallel=sequence_parallel)
        saved = [t is not None for t in y.grad_fn.saved_tensors]
        y.backward(part(dy, group, -1))
        close(b_r.grad, part(bias.grad, group, 0), torch.float64)
        if input_wanted:
            close(x_r.grad, part(x.grad, group, 0) if sequence_parallel else x.grad, torch.float64)
        if weight_wanted:
            close(w_r.grad, part(weight.grad, group, 0), torch.float64)
        found.append((saved == [weight_wanted, input_wanted], x_r.grad is not None, w_r.grad is not None))
        x, weight, _, _, dy = whole_layer((96, 12 * group.size()), 20, torch.float64)
        x_r, w_r = (
            part(x, group, -1).requires_grad_(input_wanted),
            part(weight, group, -1).requires_grad_(weight_wanted),
        )
        y = row_linear(x_r, w_r, group=group, settings=settings, sequence_parallel=sequence_parallel)
        if y.requires_grad:
            y.backward(part(dy, group, 0) if sequence_parallel else dy)
        if input_wanted:
            close(x_r.grad, part(x.grad, group, -1), torch.float64)
        if weight_wanted:
            close(w_r.grad, part(weight.grad, group, -1), torch.float64)
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_each_gradient_may_be_unwanted(ranks, count):
    expected = [(True, i, w) for _, i, w in itertools.product((False, True), repeat=3)]
    assert ranks(count).run(wanted_gradients) == [expected] * count


@on_ranks(2)
def test_a_saved_tensor_changed_in_place_raises(group):
    settings = Settings(num_chunks=2)
    for make in (column_linear, row_linear):
        for spoil in ("weight", "input"):
            x, weight = torch.randn(32, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
            y = make(x * 1, weight, group=group, settings=settings)
            with torch.no_grad():
                (weight if spoil == "weight" else y.grad_fn.saved_tensors[0]).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@on_ranks(2)
def test_retain_graph_and_no_silent_second_derivative(group):
    settings = Settings(num_chunks=2)
    results = []
    for sequence_parallel in (False, True):
        x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        y = column_linear(x, weight, group=group, settings=settings, sequence_parallel=sequence_parallel)
        z = row_linear(y, weight, group=group, settings=settings, sequence_parallel=sequence_parallel)
        z.sum().backward(retain_graph=True)
        first = x.grad.clone(), weight.grad.clone()
        z.sum().backward()
        results.append(torch.equal(x.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1]))
        y = column_linear(x, weight, group=group, settings=settings, sequence_parallel=sequence_parallel)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    assert results == [True, True]


@on_ranks(2)
def test_no_grad_and_inference_mode(group):
    settings = Settings(num_chunks=2)
    x, weight = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
    with_grad = column_linear(x, weight, group=group, settings=settings, sequence_parallel=True)
    with torch.no_grad():
        no_grad = column_linear(x, weight, group=group, settings=settings, sequence_parallel=True)
    with torch.inference_mode():
        inference = column_linear(x, weight, group=group, settings=settings, sequence_parallel=True)
    assert not no_grad.requires_grad
    assert inference.is_inference()
    assert torch.equal(with_grad, no_grad) and torch.equal(with_grad, inference)


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(2)
def test_activation_checkpointing(group, use_reentrant):
    settings = Settings(num_chunks=2)
    torch.manual_seed(0)
    x, weight = torch.randn(64, 8), torch.randn(8, 8)
    gradients = []
    for checkpointed in (False, True):
        x_r, w_r = x.clone().requires_grad_(), weight.clone().requires_grad_()

        def block(x, w_r=w_r):
            y = column_linear(x, w_r, group=group, settings=settings, sequence_parallel=True)
            return row_linear(torch.relu(y), w_r, group=group, settings=settings, sequence_parallel=True)

        y = torch.utils.checkpoint.checkpoint(block, x_r, use_reentrant=use_reentrant) if checkpointed else block(x_r)
        y.square().sum().backward()
        gradients.append((x_r.grad, w_r.grad))
    assert all(map(torch.equal, *gradients))


def under_autocast(group):
    """The same numbers as torch's linear under autocast."""
    settings = Settings(num_chunks=2)
    torch.manual_seed(group.rank())
    found = []
    for make in (column_linear, row_linear):
        x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = make(x, weight, group=group, settings=settings, sequence_parallel=True)
        y.float().sum().backward()
        found.append((y.dtype, x.grad.dtype, weight.grad.dtype))
    bias = torch.zeros(8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # an fp32 bias promotes the sum, as it does in Megatron
        found.append(column_linear(x, weight, bias, group=group, settings=settings).dtype)
    return found


def test_autocast(ranks):
    expected = [(torch.bfloat16, torch.float32, torch.float32)] * 2 + [torch.float32]
    assert ranks(2).run(under_autocast) == [expected] * 2


@on_ranks(3)
def test_a_bias_added_on_every_rank_is_caught(group):
    """The comparison detects a bias that every rank adds before the sum."""
    _, weight, bias, y, _ = whole_layer((64, 12 * group.size()), 20, torch.float32)
    x, *_ = whole_layer((64, 12 * group.size()), 20, torch.float32)
    x_r, w_r = (part(t, group, -1).float() for t in (x, weight))
    ones = torch.ones(64, 1)
    wrong = row_linear(
        torch.cat([x_r, ones], 1), torch.cat([w_r, bias.detach().float()[:, None]], 1),
        group=group, settings=Settings(num_chunks=4),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="relative error"):
        close(wrong, y, torch.float32)


@on_ranks(2)
def test_memory_beyond_the_serial_path_is_at_most_one_chunk(group):
    from allocations import peak_bytes

    x, weight = torch.randn(1024, 64), torch.randn(64, 64)
    extra = {}
    for name, layer, sequence_parallel in (
        ("row all-reduce", row_linear, False),
        ("row reduce-scatter", row_linear, True),
        ("column all-gather", column_linear, True),
    ):

        def run(chunks, layer=layer, sequence_parallel=sequence_parallel):
            settings = Settings(num_chunks=chunks, mode=2)
            return layer(x, weight, group=group, settings=settings, sequence_parallel=sequence_parallel)

        serial, chunked = (peak_bytes(lambda chunks=chunks: run(chunks)) for chunks in (1, 4))
        extra[name] = (chunked - serial) / (1024 // 4 * 64 * 4)
    assert max(extra.values()) <= 1, extra


@on_ranks(2)
def test_a_layer_of_few_rows_runs_in_chunks_if_asked(group):
    x, w = torch.randn(10, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    before = COUNTS.as_dict().get("matmul_all_reduce", {"chunks": 0})["chunks"]
    y = row_linear(x, w, group=group, settings=Settings(num_chunks=4, chunk_rows=1, customized_coc={}))
    parts = [torch.empty_like(y) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x @ w.t(), group=group)
    chunks = COUNTS.as_dict()["matmul_all_reduce"]["chunks"] - before
    error = float((y - sum(parts)).abs().max())
    assert error < 1e-12 and chunks > 1
