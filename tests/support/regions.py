"""What stands between two attention cores, for tests: unsharded, layer by layer, and as a region."""

import functools

import torch
from torch.nn import functional as F

from ascend_parallel import column_linear, row_linear
from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.overlap.region.cuts import RegionMatmul, region_cut
from ascend_parallel.overlap.region.mlp import ChunkedMlp, chunked_mlp
from ascend_parallel.overlap.region.row import send_rows_on_demand
from ascend_parallel.overlap.region.rows import PendingRows
from ascend_parallel.overlap.region.tail import Tail
from ascend_parallel.overlap.weight_gradient import WeightGradient

SEQUENCE, BATCH, WIDTH, FFN = 48, 3, 24, 48  # FFN: divisible by 2, 3 and 4 ranks


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


STYLES = {"gelu, layer norm, biases": (F.gelu, F.layer_norm, True), "swiglu, rms norm": (swiglu, F.rms_norm, False)}


def whole(style, dtype):
    """Return the whole tensors by name, in float64 but of dtype's precision."""
    activation, _, biased = STYLES[style]
    generator = torch.Generator().manual_seed(5)
    up = 2 * FFN if activation is swiglu else FFN
    shapes = {"x": (SEQUENCE, BATCH, FFN), "residual": (SEQUENCE, BATCH, WIDTH), "proj": (WIDTH, FFN)}
    shapes |= {"norm": (WIDTH,), "fc1": (up, WIDTH), "fc2": (WIDTH, FFN)}
    if biased:
        shapes |= {"proj bias": (WIDTH,), "norm bias": (WIDTH,), "fc1 bias": (up,)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: (t / t.shape[-1] ** 0.5 if t.dim() == 2 else t).to(dtype).double() for name, t in drawn.items()}


def sharded(name, tensor, group, gated, sp=False):
    """Return this rank's part of a tensor; with `sp`, sequence parallelism, its own rows."""
    ranks, rank = group.size(), group.rank()
    if sp and name in ("residual", "s", "y"):
        return tensor.chunk(ranks)[rank]
    if name in ("x", "proj", "fc2"):
        return tensor.chunk(ranks, -1)[rank].contiguous()
    if name in ("fc1", "fc1 bias"):  # a gated activation's halves are cut one by one
        halves = tensor.chunk(2) if gated else [tensor]
        return torch.cat([half.chunk(ranks)[rank] for half in halves])
    return tensor.clone()


def normalise(norm, parameters):
    if norm is F.rms_norm:
        return lambda s: F.rms_norm(s, (WIDTH,), parameters["norm"], 1e-5)
    return lambda s: F.layer_norm(s, (WIDTH,), parameters["norm"], parameters["norm bias"])


def activate(activation, h, bias):
    return activation(h if bias is None else h + bias)


def add(y, bias, residual):
    return residual + (y if bias is None else y + bias)


def truth(style, p):
    """Return the sum behind the attention, and the MLP's output, unsharded."""
    activation, norm, _ = STYLES[style]
    s = add(p["x"] @ p["proj"].t(), p.get("proj bias"), p["residual"])
    h = normalise(norm, p)(s) @ p["fc1"].t()
    return s, activate(activation, h, p.get("fc1 bias")) @ p["fc2"].t()


def layers(style, p, group, settings, sp=False):
    """Return the same of this rank, layer by layer."""
    activation, norm, _ = STYLES[style]
    options = {"group": group, "settings": settings, "sequence_parallel": sp}
    s = add(row_linear(p["x"], p["proj"], **options), p.get("proj bias"), p["residual"])
    h = column_linear(normalise(norm, p)(s), p["fc1"], **options)
    return s, row_linear(activate(activation, h, p.get("fc1 bias")), p["fc2"], **options)


def cut_of(p, group, settings, sp=False):
    forward = [(w.shape[1], w.shape[0]) for w in (p["fc2"], p["fc1"], p["proj"])]
    matmuls = [RegionMatmul(k, n, TRANSPOSED) for k, n in forward]
    matmuls += [RegionMatmul(n, k, ROW_MAJOR) for k, n in forward[:2]]
    return region_cut(matmuls, SEQUENCE * BATCH // (group.size() if sp else 1), p["x"], group, settings, sp)


def region(style, p, group, settings, sp=False, finished=False):
    """Return the same of this rank, as a region; finished: the tail's rows are finished before the MLP reads them."""
    activation, norm, _ = STYLES[style]
    cut = cut_of(p, group, settings, sp)
    options = {"group": group, "settings": cut.settings, "sequence_parallel": sp}
    with PendingRows(cut.sizes) as pending:
        if sp:
            x, w = p["x"].detach(), p["proj"].detach()
            options["forward_wrapper"] = lambda _: send_rows_on_demand(x, w, group, cut, pending)
        y = row_linear(p["x"], p["proj"], finish=pending.take, **options)
        parameters = [p[name] for name in ("norm", "norm bias") if name in p]
        tail = Tail(add, normalise(norm, p), parameters, pending.rows, cut.sizes)
        s, n = tail.apply(y, p.get("proj bias"), p["residual"])
        if finished:
            tail.rows.finish()
        mlp = ChunkedMlp(
            group=group,
            cut=cut,
            activate=functools.partial(activate, activation),
            sequence_parallel=sp,
            source=tail.rows,
            fc1_gradient=WeightGradient(),
            fc2_gradient=WeightGradient(),
            before_communicating=lambda: None,
        )
        return s, chunked_mlp(n, p["fc1"], p.get("fc1 bias"), p["fc2"], mlp)


def leaves(tensors, dtype, frozen=()):
    return {name: t.to(dtype).requires_grad_(name not in frozen) for name, t in tensors.items()}


def backward(results, dtype, own=lambda whole: whole, **options):
    """Run backward from this rank's own rows of gradients that are the same everywhere."""
    generator, shape = torch.Generator().manual_seed(9), (SEQUENCE, BATCH, WIDTH)
    drawn = [own(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for _ in results]
    pairs = [(y, dy) for y, dy in zip(results, drawn, strict=True) if y.requires_grad]
    torch.autograd.backward(*map(list, zip(*pairs, strict=True)), **options)


def own_rows(group, sp):
    return lambda whole: sharded("y", whole, group, False, sp)
