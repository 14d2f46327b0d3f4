"""Operators by element, products and views, and how to draw their arguments."""

import torch
from rule_drawing import case

aten = torch.ops.aten


def unary(d):
    return (d.positive(*d.shape()),)


def binary(d):
    shape = d.shape()
    return d.positive(*shape), d.positive(*d.broadcast(shape))


def pointwise_cases():
    names = """abs acos atan cos erf exp exp2 expm1 gelu hardswish isnan leaky_relu log log1p logical_not mish
        reciprocal relu rsqrt sigmoid sign silu sin softplus sqrt square tan tanh zeros_like ones_like"""
    for name in names.split():
        case(getattr(aten, name).default, unary)
    for name in ("neg", "clone", "contiguous", "detach", "alias"):
        case(getattr(aten, name).default, unary, 5)
    for name in ("atan2", "maximum", "minimum"):
        case(getattr(aten, name).default, binary, 4)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        case(getattr(aten, name).Tensor, binary, 4)
        case(getattr(aten, name).Scalar, lambda d: (*unary(d), 0.5))
    for name in ("add", "sub", "mul", "div"):
        case(getattr(aten, name).Tensor, binary, 6)
        case(getattr(aten, name).Scalar, lambda d: (*unary(d), 0.5), 4)
        case(getattr(aten, name + "_").Tensor, lambda d: (x := d.float(*d.shape()), torch.rand_like(x)), 5)
    case(aten.add.Tensor, lambda d: (*unary(d), 2.0), 4, "a number")
    case(aten.mul.Tensor, lambda d: (*unary(d), 2.0), 5, "a number")
    case(aten.add.Tensor, binary, 6, "alpha", alpha=2.5)
    case(aten.div.Tensor_mode, binary, 4, rounding_mode="floor")
    case(aten.rsub.Scalar, lambda d: (*unary(d), 2.0))
    case(aten.relu_.default, unary)
    case(aten.pow.Tensor_Scalar, lambda d: (*unary(d), 3))
    case(aten.pow.Tensor_Tensor, binary, 4)
    case(aten.clamp.default, lambda d: (*unary(d), 0.3, None))
    case(aten.max.other, binary, 4)
    case(aten.addcmul.default, lambda d: (*binary(d), d.float(1)), 4)
    case(aten.lerp.Scalar, lambda d: (x := d.float(*d.shape()), torch.rand_like(x), 0.3))
    case(aten._to_copy.default, unary, 5, dtype=torch.float64)
    case(aten.to.dtype, lambda d: (*unary(d), torch.float64), 5)
    case(aten.to.dtype, lambda d: (d.ids(5, *d.shape()), torch.float64), 3, "of integers")
    case(aten.type_as.default, lambda d: (d.float(*(s := d.shape())), torch.zeros(s, dtype=torch.float64)), 5)
    case(aten.where.self, lambda d: (d.flags(*(s := d.shape())), d.float(*d.broadcast(s)), d.float(*s)), 6)
    case(aten.where.ScalarOther, lambda d: (d.flags(*(s := d.shape())), d.float(*s), 0.5))
    case(aten.masked_fill.Scalar, lambda d: (d.float(*(s := d.shape())), d.flags(*d.broadcast(s)), 0.0), 5, "zero")
    case(aten.masked_fill.Scalar, lambda d: (d.float(*(s := d.shape())), d.flags(*d.broadcast(s)), -1e3), 3)
    case(aten.masked_fill.Tensor, lambda d: (d.float(*(s := d.shape())), d.flags(*s), d.float()), 3)
    case(aten.dropout.default, lambda d: (*unary(d), 0.5, False))
    case(aten.broadcast_tensors.default, lambda d: (list(binary(d)),), 5)


def product_cases():
    for bias in (True, False):
        for lead in (0, 1, 2):
            case(
                aten.linear.default,
                lambda d, bias=bias, lead=lead: linear(d, bias, lead),
                3 + lead,
                f"{lead} {'bias' if bias else ''}",
            )
    case(aten.mm.default, lambda d: matrices(d, []), 5)
    case(aten.bmm.default, lambda d: matrices(d, [d.size()]), 6)
    case(
        aten.addmm.default,
        lambda d: (d.float(*d.broadcast([m := d.size(), n := d.size()])), d.float(m, k := d.size()), d.float(k, n)),
        5,
        beta=0.5,
        alpha=2.0,
    )
    case(
        aten.baddbmm.default,
        lambda d: (
            d.float(b := d.size(), m := d.size(), n := d.size()),
            d.float(b, m, k := d.size()),
            d.float(b, k, n),
        ),
        6,
    )
    case(aten.matmul.default, lambda d: matrices(d, d.sizes(2)), 7, "4-D")
    case(aten.matmul.default, lambda d: (d.float(*d.sizes(2), k := d.size()), d.float(k, d.size())), 6, "3-D by 2-D")
    case(
        aten.matmul.default,
        lambda d: (
            d.float(d.size(), c := d.size(), d.size(), k := d.size()),
            d.float(d.one(1, c), k, d.size()),
        ),
        7,
        "4-D by 3-D",
    )
    case(
        aten.matmul.default,
        lambda d: (d.float(*d.sizes(2), k := d.size()), d.float(k)),
        5,
        "3-D by 1-D",
    )
    case(aten.matmul.default, lambda d: (d.float(k := d.size()), d.float(d.size(), k, d.size())), 5, "1-D by 3-D")
    case(aten.mv.default, lambda d: (d.float(d.size(), k := d.size()), d.float(k)), 4)
    case(aten.dot.default, lambda d: (d.float(k := d.size()), d.float(k)), 3)
    case(aten.outer.default, lambda d: (d.float(d.size()), d.float(d.size())), 4)
    case(
        aten.einsum.default,
        lambda d: ("bld,bmd->blm", [d.float(b := d.size(), d.size(), k := d.size()), d.float(b, d.size(), k)]),
        6,
    )
    case(
        aten.einsum.default,
        lambda d: ("ij,jk,k", [d.float(d.size(), j := d.size()), d.float(j, k := d.size()), d.float(k)]),
        6,
        "of three",
    )
    case(
        aten.einsum.default,
        lambda d: (
            "...i,oi->...o",
            [
                d.float(
                    *d.sizes(d.one(0, 1, 2)),
                    i := d.size(),
                ),
                d.float(d.size(), i),
            ],
        ),
        4,
        "rest",
    )
    case(
        aten.einsum.default,
        lambda d: ("b...i,...ij", [d.float(2, b := d.size(), 3, i := d.size()), d.float(d.one(1, b), 1, i, d.size())]),
        3,
        "rest broadcast",
    )
    case(aten.einsum.default, lambda d: ("iij->j", [d.float(i := d.size(), i, d.size())]), 2, "diagonal")


def linear(d, bias, lead):
    n, k = d.sizes(2)
    return (d.float(*d.sizes(lead), k), d.float(n, k), *([d.float(n)] if bias else []))


def matrices(d, batch):
    m, k, n = d.sizes(3)
    return d.float(*batch, m, k), d.float(*batch, k, n)


def convolution_cases():
    def convolution(d, dims=2, bias=True, transposed=False, depthwise=False):
        into, out = d.size(), d.size()
        weight = [into, out] if transposed else [into * 2, 1] if depthwise else [out, into]
        bias = [d.float(into * 2 if depthwise else out)] if bias else [None]
        return (d.float(d.size(), into, *[4] * dims), d.float(*weight, *[2] * dims), *bias)

    case(aten.conv2d.default, lambda d: (*convolution(d), [1, 1], [1, 1]), 4)
    case(aten.conv2d.default, lambda d: convolution(d, bias=False), 4, "no bias")
    case(aten.conv2d.padding, lambda d: (*convolution(d), [1, 1], "same"), 4)
    case(
        aten.conv2d.default,
        lambda d: (*(x := convolution(d, depthwise=True)), [1, 1], [0, 0], [1, 1], x[0].shape[1]),
        3,
        "depthwise",
    )
    case(aten.conv1d.default, lambda d: convolution(d, 1), 4)
    case(aten.convolution.default, lambda d: (*convolution(d), [1, 1], [0, 0], [1, 1], False, [0, 0], 1), 4)
    case(
        aten.convolution.default,
        lambda d: (*convolution(d, transposed=True), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        4,
        "transposed",
    )
    case(aten.conv_transpose2d.input, lambda d: convolution(d, transposed=True), 4)


def view_cases():
    def split(d):
        a, b, c, e = d.sizes(4)
        return d.float(a * b, c, e), [a, b, c * e]

    case(aten.view.default, split, 4)
    case(
        aten.reshape.default,
        lambda d: (
            d.float(a := d.size(), b := d.size(), c := d.size()),
            d.one([c, b, a], [a * b, c], [a, 1, b * c], [-1], [b * c, a], [a, b, 1, c]),
        ),
        4,
    )
    case(aten._unsafe_view.default, split, 4)
    case(aten.flatten.using_ints, lambda d: (d.float(*d.sizes(4)), 1, 2), 4)
    case(aten.unflatten.int, lambda d: (d.float(d.size(), (a := d.size()) * 2), 1, [a, 2]), 4)
    case(aten.unsqueeze.default, lambda d: (d.float(*(s := d.shape())), d.dim(s)), 5)
    case(aten.squeeze.dim, lambda d: (d.float(*(s := d.shape())), d.dim(s)), 5)
    case(aten.squeeze.default, lambda d: (d.float(*d.shape()),), 5)
    case(aten.expand.default, lambda d: (d.float(*d.broadcast(s := d.shape())), s), 5)
    case(aten.transpose.int, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), d.dim(s)), 5)
    case(aten.t.default, lambda d: (d.float(*d.shape(1, 2)),), 4)
    case(aten.permute.default, lambda d: (d.float(*d.sizes(3)), d.one([2, 0, 1], [1, 2, 0], [-1, 0, 1])), 5)
    case(aten.movedim.int, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), d.dim(s)), 5)
    case(aten.movedim.intlist, lambda d: (d.float(*d.sizes(4)), [0, 3], d.one([2, 1], [3, 0], [1, 3])), 6)
    case(aten.numpy_T.default, lambda d: (d.float(*d.shape(2, 2)),), 4)
    case(aten.mT.default, lambda d: (d.float(*d.sizes(3)),), 5)
    case(
        aten.slice.Tensor,
        lambda d: (d.float(*(s := d.shape())), n := d.dim(s), d.one(0, s[n] // 2), d.one(s[n], 2**62)),
        5,
    )
    case(aten.select.int, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), 0), 4)
    case(aten.narrow.default, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), 0, 1), 4)
    case(aten.unbind.int, lambda d: (d.float(*(s := d.shape(2))), d.dim(s)), 4)
    case(aten.split.Tensor, lambda d: (d.float(*(s := d.shape(2))), d.one(1, 2), d.dim(s)), 4)
    case(aten.split_with_sizes.default, lambda d: (d.float(*d.sizes(2), 6), [1, 5], 2), 4)
    case(aten.chunk.default, lambda d: (d.float(*(s := d.shape(2))), 2, d.dim(s)), 4)
    case(aten.cat.default, lambda d: ([d.float(*(s := d.shape(2))), d.float(*s)], d.dim(s)), 4)
    case(aten.diff.default, lambda d: (d.float(*(s := d.shape(2))), 1, d.dim(s), d.float(*s)), 4)
    case(aten.stack.default, lambda d: ([d.float(*(s := d.shape())), d.float(*s)], d.dim(s)), 4)
    case(aten.roll.default, lambda d: (d.float(*(s := d.shape(2))), [1], [d.dim(s)]), 4)
    case(aten.flip.default, lambda d: (d.float(*(s := d.shape(2))), [d.dim(s)]), 4)
    case(aten.triu.default, lambda d: (d.float(*d.sizes(3)), 1), 3)
    case(aten.tril.default, lambda d: (d.float(*d.sizes(3)),), 3)
    case(aten.constant_pad_nd.default, lambda d: (d.float(*d.sizes(3)), [1, 2, 0, 0], d.one(0, 1.5)), 4)
    case(aten.pad.default, lambda d: (d.float(*d.sizes(3)), [1, 0, 0, 1]), 3)
    case(aten.repeat.default, lambda d: (d.float(*d.sizes(2)), [d.one(1, 2, 6) for _ in range(3)]), 5)
    case(aten.repeat_interleave.self_int, lambda d: (d.float(*(s := d.shape())), d.one(2, 3), d.dim(s)), 5)
    case(aten.repeat_interleave.self_int, lambda d: (d.float(*d.shape()), d.one(2, 3)), 3, "flat")


for _cases in (pointwise_cases, product_cases, convolution_cases, view_cases):
    _cases()
