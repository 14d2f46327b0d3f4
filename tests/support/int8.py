"""Weights in int8 for tests: operands of every rank, what a weight stands for, and how far off it may be."""

import torch

from ascend_parallel import CommScales, QuantisedWeight, quantise_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRAINS = {"tensor": 0, "channel": 0, "group": 32}  # and the group size
N = 80


def outliers(k, n, generator):
    """A weight some of whose columns, and in them some groups, are much larger than the others."""
    w = torch.randn(k, n, generator=generator, dtype=torch.float64)
    w[:, ::7] *= 20
    w[:32, ::3] *= 30
    return w


def steps(w):
    """The scale of every element of a quantised weight, as [K, N] in float64; written unlike the code under test."""
    k, n = w.shape
    scale = w.scale.double()
    if w.group_size:
        return torch.stack([scale[row // w.group_size] for row in range(k)])
    return scale.reshape(1, -1).expand(k, n)


def exact(w):
    """What a quantised weight stands for, in float64."""
    offset = 0 if w.offset is None else steps(QuantisedWeight(w.values, w.offset, None, w.group_size))
    return (w.values.double() + offset) * steps(w)


def operands(group, shape, grain, symmetric, dtype, n=N):
    """Every rank's x and weight in float64, and this rank's x in `dtype` and weight in int8."""
    generator = torch.Generator().manual_seed(2)
    x = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double() for _ in range(group.size())]
    originals = [outliers(shape[-1], n, generator).to(dtype) for _ in range(group.size())]
    weights = [quantise_weight(w, grain, group_size=GRAINS[grain], symmetric=symmetric) for w in originals]
    return x, [w.double() for w in originals], weights


def bound(x, weights, dtype):
    """What the grain lets each element of the sum over ranks be off by, before the dtype's own rounding.

    Half a step of each element of the weight, and half a unit of it for being rounded to 16 bits.
    """
    half_unit = torch.finfo(dtype).eps / 2
    return sum(
        a.abs() @ (steps(w) * (0.5 + 1e-4) + half_unit * exact(w).abs()) for a, w in zip(x, weights, strict=True)
    )


def fitting(xs, ws, dtype):
    """Scales of communication in int8 that clip nothing, and how far off they let each sum be.

    xs, ws: every rank's operands in float64. The second result [M, N] counts every rounding, the third [N] those to
    int8 alone.
    """
    ranks, margin = len(xs), 1.01  # the scales are rounded to the dtype
    products = torch.stack([a @ b for a, b in zip(xs, ws, strict=True)])
    partial = (products.abs().amax((0, 1)) / 127 * margin).to(dtype)
    largest = products.sum(0).abs().amax(0) + ranks * partial.double()
    total = (largest / 127 * margin).to(dtype)
    # Half a step of each rounding, and the rounding of each rank's product and of the result to the dtype.
    unit = torch.finfo(dtype).eps / 2
    terms = sum(a.abs() @ b.abs() for a, b in zip(xs, ws, strict=True))
    steps = (ranks * partial.double() + total.double()) / 2
    return CommScales(partial, total), steps * 1.001 + 4 * unit * (terms + largest), steps
