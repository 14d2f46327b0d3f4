"""Operators along dimensions, norms, attention, losses, and how to draw their arguments."""

from itertools import product

import torch
from rule_drawing import case

aten = torch.ops.aten
NONE, MEAN, TOTAL = 0, 1, 2  # ATen's numbers for a loss's reduction


def reduction_cases():
    for name in ("sum", "mean"):
        case(getattr(aten, name).default, lambda d: (d.float(*d.shape()),), 5)
        target = aten.sum.dim_IntList if name == "sum" else aten.mean.dim
        case(target, lambda d: (d.float(*(s := d.shape())), [d.dim(s)], d.one(True, False)), 5)
    for name in ("amax", "amin", "var"):
        target = aten.var.correction if name == "var" else getattr(aten, name).default
        case(target, lambda d: (d.float(*d.sizes(2), d.one(2, 6)), [d.one(-1, 2)]), 2)
    for name in ("softmax", "log_softmax", "cumsum"):
        target = aten.cumsum.default if name == "cumsum" else getattr(aten, name).int
        case(target, lambda d: (d.float(*(s := d.shape(2))), d.dim(s)), 2)
    case(aten._softmax.default, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), False), 2)
    case(aten.logsumexp.default, lambda d: (d.float(*(s := d.shape(2))), [d.dim(s)], d.one(True, False)), 2)
    case(aten.max.dim, lambda d: (d.float(*(s := d.shape(2))), d.dim(s), d.one(True, False)), 2)
    case(aten.argmax.default, lambda d: (d.float(*(s := d.shape(2))), d.dim(s)), 2)
    case(aten.any.dim, lambda d: (d.flags(*(s := d.shape(2))), d.dim(s)), 2)
    case(aten.topk.default, lambda d: (d.float(*(s := d.shape(2))), 1, d.dim(s)), 2)
    case(aten.sort.default, lambda d: (d.float(*(s := d.shape(2))), d.dim(s)), 2)
    case(aten.linalg_vector_norm.default, lambda d: (d.float(*(s := d.shape(2))), 2, [d.dim(s)]), 2)
    case(aten.max_pool2d.default, lambda d: (d.float(*d.sizes(2), 4, 4), [2, 2]), 2)
    case(aten.max_pool2d_with_indices.default, lambda d: (d.float(*d.sizes(2), 4, 4), [2, 2]), 2)
    case(aten.avg_pool2d.default, lambda d: (d.float(*d.sizes(2), 4, 4), [2, 2]), 4)
    case(aten.adaptive_avg_pool2d.default, lambda d: (d.float(*d.sizes(2), 4, 4), [2, 1]), 4)
    case(aten.upsample_nearest2d.vec, lambda d: (d.float(*d.sizes(2), 2, 2), [4, 4], None), 4)
    case(aten.upsample_bilinear2d.vec, lambda d: (d.float(*d.sizes(2), 2, 2), [4, 4], False, None), 4)


def sized(d):
    shape = d.shape(2, 3)
    return shape, d.dim(shape)


def written_along(d):
    """Return the arguments of scatter and of index_copy, no element written twice."""
    shape, dim = sized(d)
    order = torch.rand(shape, generator=d.generator).argsort(dim)
    ids = torch.randperm(shape[dim], generator=d.generator)
    return (d.float(*shape), dim, order, d.float(*shape)), (d.float(*shape), dim, ids, d.float(*shape))


def written(d, broadcast):
    shape = [d.size(), 6, d.size()]
    values = d.float(2, 1) if broadcast else d.float(shape[0], 2, shape[2])
    return d.float(*shape), [None, torch.randperm(6, generator=d.generator)[:2]], values


def indexing_cases():
    def table(d, *shape, padding=-1):
        return d.float(v := d.one(2, 3, 6), d.size()), d.ids(v, *shape), padding

    case(aten.embedding.default, lambda d: table(d, *d.shape(1, 2)), 4)
    case(aten.embedding.default, lambda d: table(d, *d.shape(1, 2), padding=d.one(0, 1)), 4, "padding")
    case(aten.embedding.default, lambda d: (*table(d, 6), True), 1, "frequencies")
    case(aten.gather.default, lambda d: (d.float(*(s := d.shape(2, 3))), n := d.dim(s), d.ids(s[n], *s)), 4)
    case(aten.gather.default, lambda d: (d.float(s := d.size(), 6), 1, d.ids(6, s, 2)), 3, "fewer")
    case(aten.index_select.default, lambda d: (d.float(*(s := d.shape(2, 3))), n := d.dim(s), d.ids(s[n], d.size())), 4)
    case(aten.index.Tensor, lambda d: (d.float(d.size(), n := d.size(), d.size()), [None, d.ids(n, *d.sizes(2))]), 5)
    case(
        aten.index.Tensor,
        lambda d: (d.float(n := d.size(), m := d.size(), 6), [d.ids(n, d.size(), 1), d.ids(m, 6)]),
        3,
        "of two",
    )
    case(aten.scatter.src, lambda d: written_along(d)[0], 3)
    case(aten.scatter.value, lambda d: (*written_along(d)[0][:3], 2.0), 2)
    case(
        aten.scatter_add.default, lambda d: (lambda s, n: (d.float(*s), n, d.ids(s[n], *s), d.float(*s)))(*sized(d)), 3
    )
    case(aten.scatter_add.default, lambda d: (d.float(s := d.size(), 6), 1, d.ids(6, s, 2), d.float(s, 2)), 2, "fewer")
    case(aten.index_add.default, lambda d: written_along(d)[1], 3)
    case(aten.index_copy.default, lambda d: written_along(d)[1], 3)
    case(aten.index_fill.int_Scalar, lambda d: (*written_along(d)[1][:3], 0.5), 2)
    case(aten.index_put.default, lambda d: written(d, False), 2)
    case(aten.index_put.default, lambda d: (*written(d, False), True), 2, "added")
    case(aten.index_put.default, lambda d: written(d, True), 2, "broadcast")
    case(
        aten.index_put.default,
        lambda d: (d.float(6, 2, 4), [d.ids(6, 3, 1), d.ids(2, 5)], d.float(3, 5, d.one(1, 4)), True),
        1,
        "of two",
    )
    case(aten.one_hot.default, lambda d: (d.ids(3, *d.shape(1, 2)), 5), 2)


def normalisation_cases():
    def last(d, bias=True, width=1):
        shape = [*d.sizes(2), *([6] if width == 1 else [2, 3])]
        weights = [d.float(*shape[-width:]) for _ in range(1 + bias)]
        return d.float(*shape), shape[-width:], *weights

    def channels(d, training):
        c = d.size()
        return d.float(d.one(2, 6), c, 3), d.float(c), d.float(c), d.float(c), d.positive(c), training, 0.1, 1e-5

    case(aten.layer_norm.default, last, 2)
    case(aten.layer_norm.default, lambda d: last(d, width=2), 2, "over two")
    case(aten.layer_norm.default, lambda d: last(d)[:2], 2, "no weight")
    case(aten.native_layer_norm.default, lambda d: (*last(d), 1e-5), 2)
    case(aten.rms_norm.default, lambda d: last(d, bias=False), 2)
    case(aten._fused_rms_norm.default, lambda d: (*last(d, bias=False), 1e-5), 2)
    case(aten.group_norm.default, lambda d: (d.float(d.size(), 6, 4), 3, d.float(6), d.float(6)), 1)
    case(
        aten.native_group_norm.default,
        lambda d: (d.float(n := d.size(), 6, 4), d.float(6), d.float(6), n, 6, 4, 2, 1e-5),
        1,
    )
    case(
        aten.instance_norm.default,
        lambda d: (d.float(d.size(), 6, 4), d.float(6), d.float(6), None, None, True, 0.1, 1e-5, False),
        1,
    )
    case(aten.batch_norm.default, lambda d: (*channels(d, False), False), 3, "given statistics", constants=(3, 4))
    case(aten.batch_norm.default, lambda d: (*channels(d, True), False), 3, "own statistics", constants=(3, 4))
    case(aten._native_batch_norm_legit_functional.default, lambda d: channels(d, True), 3, constants=(3, 4))
    case(
        aten._native_batch_norm_legit_no_training.default,
        lambda d: (*channels(d, False)[:5], 0.1, 1e-5),
        3,
        constants=(3, 4),
    )


def attention_cases():
    def heads(d, group=1, keys=4):
        b, h = d.size(), d.size()
        return d.float(b, h * group, 6, 2), d.float(b, h, keys, 2), d.float(b, h, keys, 3)

    sdpa = aten.scaled_dot_product_attention.default
    case(sdpa, heads, 3)
    case(sdpa, lambda d: (*heads(d, keys=d.one(4, 6, 9)), None, 0.0, True), 3, "causal")
    case(sdpa, lambda d: (*(x := heads(d)), d.float(*d.broadcast([*x[0].shape[:3], 4]))), 3, "mask")
    case(
        sdpa,
        lambda d: (*(x := heads(d)), d.flags(x[0].shape[0], 1, 6, 4).index_fill(3, torch.tensor(0), True)),
        3,
        "flags",
    )
    case(sdpa, lambda d: heads(d, group=2), 3, "grouped", enable_gqa=True)
    case(sdpa, lambda d: (*heads(d, group=2, keys=6), None, 0.0, True), 3, "grouped causal", enable_gqa=True)
    case(sdpa, lambda d: (d.float(b := d.size(), 6, 4), d.float(b, 3, 4), d.float(b, 3, 4)), 2, "3-D")
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    case(flash, lambda d: (*[d.float(*s) for s in [(*d.sizes(2), 4, 8)] for _ in range(3)], 0.0, True), 2)


def six_classes(d, dims):
    shape = [d.size(), 6, *d.sizes(dims - 2)]
    target = d.ids(6, *shape[:1], *shape[2:])
    target.view(-1)[0] = 2  # counts, where 1 is ignored
    return d.float(*shape), target


def loss_cases():
    def classes(d, *rest, ignored=True):
        n, c = d.one(2, 3, 6), 5
        target = d.ids(c, n, *rest)
        if ignored:
            target.view(-1)[0] = -100
        return d.float(n, c, *rest), target

    for name, reduction, least in (("none", NONE, 1), ("mean", MEAN, 1), ("sum", TOTAL, 1)):
        target = aten.cross_entropy_loss.default
        for count, smoothing in product((2, 3, 4), (0.0, 0.1)):  # dimensions of the logits, cut along classes too
            case(
                target,
                lambda d, r=reduction, c=count, s=smoothing: (*six_classes(d, c), None, r, 1, s),
                2,
                f"{name}, {count}-D, 6 classes, {smoothing}",
            )
        case(target, lambda d, r=reduction: (*classes(d), None, r), least, name)
        case(target, lambda d, r=reduction: (*classes(d), None, r, -100, 0.1), least, f"{name}, smoothed")
        case(target, lambda d, r=reduction: (*classes(d, d.size()), None, r), least + 1, f"{name}, 3-D")
        case(
            target,
            lambda d, r=reduction: (d.float(n := d.size(), 5), d.float(n, 5).softmax(1), None, r),
            least,
            f"{name}, probabilities",
        )
        case(aten.nll_loss_nd.default, lambda d, r=reduction: (*classes(d), None, r), least, name)
        case(aten.mse_loss.default, lambda d, r=reduction: (d.float(*(s := d.shape())), d.float(*s), r), 3, name)
    case(
        aten.binary_cross_entropy_with_logits.default,
        lambda d: (d.float(*(s := d.shape())), d.positive(*s), None, d.float(s[-1])),
        3,
        constants=(2,),
    )


def creation_cases():
    case(aten.arange.default, lambda d: (d.size(),), 0, dtype=torch.float64)
    case(aten.zeros.default, lambda d: (d.shape(),), 0)
    case(aten.full.default, lambda d: (d.shape(), 2.0), 0)
    case(aten.new_zeros.default, lambda d: (d.float(*d.shape()), [2, 3]), 3)


for _cases in (
    reduction_cases,
    indexing_cases,
    normalisation_cases,
    attention_cases,
    loss_cases,
    creation_cases,
):
    _cases()
