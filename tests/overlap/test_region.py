"""Regions against the unsharded computation in float64, and against the layers one by one: every row and gradient."""

import contextlib
import functools

import pytest
import torch
from late import LateWork, late_collectives
from torch.nn import functional as F

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops.bits import ROW_MAJOR, TRANSPOSED
from ascend_parallel.overlap.region.cuts import RegionMatmul, region_cut
from ascend_parallel.overlap.region.mlp import ChunkedMlp, chunked_mlp
from ascend_parallel.overlap.region.rows import PendingRows
from ascend_parallel.overlap.region.tail import Tail
from ascend_parallel.overlap.weight_gradient import WeightGradient

SEQUENCE, BATCH, WIDTH, FFN = 48, 3, 24, 48  # FFN: divisible by 2, 3 and 4 ranks
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 6e-2}


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


def region(style, p, group, settings, sp=False):
    """Return the same of this rank, as a region."""
    activation, norm, _ = STYLES[style]
    cut = cut_of(p, group, settings, sp)
    options = {"group": group, "settings": cut.settings, "sequence_parallel": sp}
    with PendingRows(cut.sizes) as pending:
        y = row_linear(p["x"], p["proj"], finish=pending.take, **options)
        parameters = [p[name] for name in ("norm", "norm bias") if name in p]
        tail = Tail(add, normalise(norm, p), parameters, pending.rows, cut.sizes)
        s, n = tail.apply(y, p.get("proj bias"), p["residual"])
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


def compare_with_truth(group, style, dtype, sp, settings):
    gated = STYLES[style][0] is swiglu
    expected = leaves(whole(style, dtype), torch.float64)
    outputs = truth(style, expected)
    backward(outputs, torch.float64)
    mine = leaves({n: sharded(n, t.detach(), group, gated, sp) for n, t in expected.items()}, dtype)
    with late_collectives():
        results = region(style, mine, group, Settings(num_chunks=4, region_rows=4, **settings), sp)
        backward(results, dtype, own_rows(group, sp))
    assert LateWork.unfinished == 0
    if sp:  # each rank has the gradient of its own rows
        for name in {"norm", "norm bias", "proj bias"} & mine.keys():
            torch.distributed.all_reduce(mine[name].grad, group=group)
    pairs = {name: (results[i], sharded(name, outputs[i], group, gated, sp)) for i, name in enumerate(("s", "y"))}
    pairs |= {n: (mine[n].grad, sharded(n, expected[n].grad, group, gated, sp)) for n in mine}
    errors = {}
    for name, (found, true) in pairs.items():
        assert (found.dtype, found.shape) == (dtype, true.shape), name
        errors[name] = ((found.double() - true).abs().max() / true.abs().max()).item()
    # NaN compares as larger too.
    assert [name for name, error in errors.items() if not error <= LIMIT[dtype]] == [], errors


MODES = {"all-reduce": False, "sequence parallel": True}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("sp", MODES.values(), ids=MODES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_region_matches_the_unsharded_truth(ranks, count, sp, style, dtype):
    ranks(count).run(compare_with_truth, style, dtype, sp, {})


def test_a_region_keeps_the_gathered_input(ranks):
    settings = {"recompute_all_gather": False}
    ranks(3).run(compare_with_truth, "swiglu, rms norm", torch.float64, True, settings)


def compare_bits(group, style, frozen, late, sp):
    gated = STYLES[style][0] is swiglu
    found, settings = [], Settings(num_chunks=4, region_rows=16)
    for run in (layers, region):
        tensors = whole(style, torch.float32)
        mine = leaves({n: sharded(n, t, group, gated, sp) for n, t in tensors.items()}, torch.float32, frozen)
        with late_collectives() if late and run is region else contextlib.nullcontext():
            results = run(style, mine, group, settings, sp)
            backward(results, torch.float32, own_rows(group, sp))
        found.append({"s": results[0].detach(), "y": results[1].detach(), **{n: t.grad for n, t in mine.items()}})
    assert len(cut_of(mine, group, settings, sp).sizes) > 1, "the machine gives other bits to every cut"
    return [n for n in found[0] if not (found[0][n] is found[1][n] is None or torch.equal(found[0][n], found[1][n]))]


FROZEN = {
    "nothing": (),
    "fc1": ("fc1", "fc1 bias"),
    "fc2": ("fc2",),
    "proj, residual and x": ("proj", "proj bias", "residual", "x"),
    "weights": ("proj", "fc1", "fc2", "norm"),
    "all but fc2": ("x", "residual", "proj", "proj bias", "norm", "norm bias", "fc1", "fc1 bias"),
    "all before fc1": ("x", "residual", "proj", "proj bias", "norm", "norm bias"),
}


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("sp", MODES.values(), ids=MODES)
@pytest.mark.parametrize("style", STYLES)
def test_a_region_has_the_layers_bits(ranks, style, sp, late):
    assert ranks(2).run(compare_bits, style, (), late, sp) == [[], []]


@pytest.mark.parametrize("sp", MODES.values(), ids=MODES)
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_tensors(ranks, frozen, sp):
    assert ranks(2).run(compare_bits, "gelu, layer norm, biases", frozen, False, sp) == [[], []]


def leaves_nothing_behind(group, broken):
    """Raise inside the MLP's third chunk, or never call the MLP; then use the group again."""
    style = "gelu, layer norm, biases"
    mine = leaves({n: sharded(n, t, group, False) for n, t in whole(style, torch.float32).items()}, torch.float32)
    settings, seen = Settings(num_chunks=4, region_rows=16), []
    cut = cut_of(mine, group, settings)

    def fails(h, bias):
        seen.append(h)
        if len(seen) == 3:
            raise ArithmeticError("third chunk")
        return activate(F.gelu, h, bias)

    with late_collectives():
        try:
            with PendingRows(cut.sizes) as pending:
                y = row_linear(mine["x"], mine["proj"], group=group, settings=cut.settings, finish=pending.take)
                if broken:
                    gradients = {"fc1_gradient": WeightGradient(), "fc2_gradient": WeightGradient()}
                    mlp = ChunkedMlp(
                        group=group, cut=cut, activate=fails, before_communicating=lambda: None, **gradients
                    )
                    chunked_mlp(mine["residual"], mine["fc1"], None, mine["fc2"], mlp)
        except ArithmeticError:
            assert broken
    expected = row_linear(mine["x"], mine["proj"], group=group, settings=settings)
    return LateWork.unfinished, torch.equal(y, expected), len(seen)


@pytest.mark.parametrize("broken", [True, False], ids=["an exception", "no consumer"])
def test_abandoned_rows_are_finished(ranks, broken):
    assert ranks(2).run(leaves_nothing_behind, broken) == [(0, True, 3 if broken else 0)] * 2


def backward_twice(group):
    style = "swiglu, rms norm"
    mine = leaves({n: sharded(n, t, group, True) for n, t in whole(style, torch.float32).items()}, torch.float32)
    results = region(style, mine, group, Settings(num_chunks=4, region_rows=16))
    backward(results, torch.float32, retain_graph=True)
    once = {n: t.grad.clone() for n, t in mine.items()}
    backward(results, torch.float32)
    refused = ""
    try:
        backward(results, torch.float32)
    except RuntimeError as error:
        refused = str(error)
    return [n for n in mine if not torch.equal(mine[n].grad, 2 * once[n])], "a second time" in refused


def test_a_retained_graph_runs_backward_again(ranks):
    assert ranks(2).run(backward_twice) == [([], True)] * 2


def recomputed(group, reentrant):
    from torch.utils.checkpoint import checkpoint

    style = "gelu, layer norm, biases"
    found = []
    for run in (layers, region):
        mine = leaves({n: sharded(n, t, group, False) for n, t in whole(style, torch.float32).items()}, torch.float32)
        names, settings = list(mine), Settings(num_chunks=4, region_rows=16)

        def forward(*tensors, run=run, names=names, settings=settings):
            return run(style, dict(zip(names, tensors, strict=True)), group, settings)

        backward(checkpoint(forward, *mine.values(), use_reentrant=reentrant), torch.float32)
        found.append({n: t.grad for n, t in mine.items()})
    return [n for n in found[0] if not torch.equal(found[0][n], found[1][n])]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(ranks, reentrant):
    assert ranks(2).run(recomputed, reentrant) == [[], []]


def cuts(group):
    style = "gelu, layer norm, biases"
    p = {n: sharded(n, t, group, False).float() for n, t in whole(style, torch.float32).items()}
    return {
        "least rows": len(cut_of(p, group, Settings(num_chunks=8, region_rows=48)).sizes),
        "too few rows": cut_of(p, group, Settings(num_chunks=8, region_rows=145)).sizes,
        "one chunk": cut_of(p, group, Settings(num_chunks=1, mode=2)).sizes,
        "deterministic": cut_of(p, group, Settings(num_chunks=4, deterministic=True)).sizes,
        "given": cut_of(
            p, group, Settings(customized_coc={(144, FFN // 2, WIDTH): [64, 80]}, mode=2, region_rows=16)
        ).sizes,
    }


def test_the_cut_follows_the_settings(ranks):
    (found, other) = ranks(2).run(cuts)
    assert found == other
    assert found == {
        "least rows": 3,
        "too few rows": (144,),
        "one chunk": (144,),
        "deterministic": (144,),
        "given": (64, 80),
    }
