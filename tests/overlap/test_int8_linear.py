"""Layers of int8 by int8: outputs and input gradients against the unsharded truth in float64."""

import itertools

import pytest
import torch
from int8 import DTYPES, exact, fitting
from pairwise import base_choice
from pool import on_ranks
from tolerances import LIMIT, close

from ascend_parallel import CommScales, Settings, int8_column_linear, int8_row_linear, quantise_weight
from ascend_parallel.ops.quantised_rows import INPUT_GRAINS, quantise_rows

GRAINS = list(itertools.product(INPUT_GRAINS, ("tensor", "channel")))


def drawn(group, column, shape, grains, dtype, n=24, k=70):
    """Every rank's input and weight; what they stand for in float64, per rank; and dy of the whole output."""
    ranks, generator = group.size(), torch.Generator().manual_seed(5)

    def of(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [of(*shape, k) for _ in range(ranks)]
    weights = [quantise_weight(of(k, n), grains[1]) for _ in range(ranks)]
    rounded = [quantise_rows(x, grains[0]) for x in inputs]
    stands_for = [x.values.double() * x.scale.double() for x in rounded]
    dy = of(shape[0] * ranks if column else shape[0], *shape[1:], n).double()
    return inputs, weights, stands_for, dy


def column(group, shape, grains, dtype, settings):
    ranks, rank = group.size(), group.rank()
    inputs, weights, xs, _ = drawn(group, True, shape, grains, dtype)
    dys = [
        torch.randn(shape[0] * ranks, *shape[1:], 24, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    dys = [dy.to(dtype).double() for dy in dys]
    x = inputs[rank].clone().requires_grad_()
    y = int8_column_linear(x, weights[rank], group=group, settings=settings, grain=grains[0])
    close(y.detach(), torch.cat(xs) @ exact(weights[rank]), dtype)
    y.backward(dys[rank].to(dtype))
    dx = sum(dy @ exact(w).t() for dy, w in zip(dys, weights, strict=True))
    close(x.grad, dx.chunk(ranks)[rank], dtype)
    return y, torch.cat(inputs).double() @ exact(weights[rank])


def row(group, shape, grains, dtype, settings):
    ranks, rank = group.size(), group.rank()
    shape = (shape[0] * ranks, *shape[1:])
    inputs, weights, xs, dy = drawn(group, False, shape, grains, dtype)
    x = inputs[rank].clone().requires_grad_()
    y = int8_row_linear(x, weights[rank], group=group, settings=settings, grain=grains[0])
    total = sum(a @ exact(w) for a, w in zip(xs, weights, strict=True))
    close(y.detach(), total.chunk(ranks)[rank], dtype)
    y.backward(dy.chunk(ranks)[rank].to(dtype))
    close(x.grad, dy @ exact(weights[rank]).t(), dtype)
    unrounded = sum(a.double() @ exact(w) for a, w in zip(inputs, weights, strict=True))
    return y, unrounded.chunk(ranks)[rank]


def row_without_sequence_parallelism(group, shape, grains, dtype, settings):
    rank = group.rank()
    inputs, weights, xs, dy = drawn(group, False, shape, grains, dtype)
    x = inputs[rank].clone().requires_grad_()
    y = int8_row_linear(x, weights[rank], group=group, settings=settings, grain=grains[0], sequence_parallel=False)
    ws = [exact(w) for w in weights]
    close(y.detach(), sum(a @ b for a, b in zip(xs, ws, strict=True)), dtype)
    y.backward(dy.to(dtype))
    close(x.grad, dy @ ws[rank].t(), dtype)
    with_rounded_sums(group, inputs, weights, (xs, ws, dy), grains[0], settings)
    return y, sum(a.double() @ b for a, b in zip(inputs, ws, strict=True))


def with_rounded_sums(group, inputs, weights, truths, grain, settings):
    """The same layer with communication in int8: within its bound, and the same gradient."""
    rank, dtype = group.rank(), inputs[0].dtype
    xs, ws, dy = truths
    rows = [x.flatten(0, -2) for x in xs]
    scales, bound, steps = fitting(rows, ws, dtype)
    x = inputs[rank].clone().requires_grad_()
    options = {"group": group, "settings": settings, "grain": grain, "sequence_parallel": False}
    y = int8_row_linear(x, weights[rank], **options, comm_scales=scales)
    error = (y.detach().double().flatten(0, -2) - sum(a @ b for a, b in zip(rows, ws, strict=True))).abs()
    assert (error <= bound).all() and error.max() > steps.min() / 8, (error / bound).max()
    y.backward(dy.to(dtype))
    close(x.grad, dy @ ws[rank].t(), dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("count", "dtype"), base_choice([2, 3, 4], [*DTYPES, torch.float64], (3, torch.float32)), ids=str
)
@on_ranks()
def test_layers_match_the_truth(group, dtype):
    kinds = (column, row, row_without_sequence_parallelism)
    for layer, shape, grains, chunks in itertools.product(kinds, ((12,), (5, 3)), GRAINS, (1, 3)):
        y, unrounded = layer(group, shape, grains, dtype, Settings(num_chunks=chunks, mode=2))
        # The input was rounded: in a dtype finer than int8 the result is not that of the unrounded input.
        error = (y.detach().double() - unrounded).abs().max() / unrounded.abs().max()
        assert error < 0.05 and (LIMIT[dtype] > 1e-3 or error > 1e-3), error


@on_ranks(2)
def test_autocast_and_refusals(group):
    weight = quantise_weight(torch.randn(70, 24), "channel")
    x = torch.randn(4 * group.size(), 70, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = int8_row_linear(x, weight, group=group, settings=Settings(num_chunks=2))
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    ones = torch.ones(24)
    with pytest.raises(ValueError, match="comm_scales is allowed only with sequence_parallel=False"):
        int8_row_linear(x, weight, group=group, settings=Settings(), comm_scales=CommScales(ones, ones))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the scales are of the dtype of the result
        scales, options = CommScales(ones.bfloat16(), ones.bfloat16()), {"group": group, "sequence_parallel": False}
        y = int8_row_linear(x, weight, settings=Settings(), comm_scales=scales, **options)
        assert y.dtype == torch.bfloat16 and y.shape == (4 * group.size(), 24)
        with pytest.raises(ValueError, match=r"comm_scales are \[24\], torch.bfloat16 on cpu"):
            int8_row_linear(x, weight, settings=Settings(), comm_scales=CommScales(ones, ones), **options)
    weight.scale.requires_grad_()
    for layer in (int8_row_linear, int8_column_linear):
        with pytest.raises(ValueError, match="the scale of an int8 weight requires a gradient"):
            layer(x, weight, group=group, settings=Settings(num_chunks=2))
        with pytest.raises(ValueError, match="grain='row' is not allowed for an input"), torch.no_grad():
            layer(x, weight, group=group, settings=Settings(num_chunks=2), grain="row")
