"""Regions against the unsharded computation in float64, and against the layers one by one: every row and gradient."""

import contextlib
import functools
from unittest.mock import patch

import pytest
import torch
from late import LateWork, late_collectives
from regions import (
    FFN,
    STYLES,
    WIDTH,
    activate,
    backward,
    cut_of,
    layers,
    leaves,
    own_rows,
    region,
    sharded,
    swiglu,
    truth,
    whole,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ascend_parallel import Settings, row_linear
from ascend_parallel.ops.pending import Pending
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.overlap.region.mlp import ChunkedMlp, chunked_mlp
from ascend_parallel.overlap.region.rows import PendingRows
from ascend_parallel.overlap.weight_gradient import WeightGradient

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 6e-2}


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


def order_of_sends(group, sp, backward_order=None):
    """Return the operators of a region's forward, or backward, in the order in which its collectives are started."""
    style, order = "gelu, layer norm, biases", []
    mine = leaves({n: sharded(n, t, group, False, sp) for n, t in whole(style, torch.float32).items()}, torch.float32)
    launch = Pending.launch

    def launched(self, *args, **kwargs):
        order.append(self._operator)
        launch(self, *args, **kwargs)

    with patch.object(Pending, "launch", launched):
        results = region(style, mine, group, Settings(num_chunks=4, region_rows=4, order=backward_order or "auto"), sp)
        if backward_order:
            order.clear()
            backward(results, torch.float32, own_rows(group, sp))
    return order, {name: tensor.grad for name, tensor in mine.items()}


def test_with_sequence_parallelism_the_first_gather_does_not_wait_behind_all_rows_of_proj(ranks):
    for order, _ in ranks(2).run(order_of_sends, True):
        assert len(order) == 12
        assert order.index(ALL_GATHER) == 2, order
        assert order[:8].count(ALL_GATHER) == 4 - order[8:].count(ALL_GATHER) >= 2, order
    assert [order for order, _ in ranks(2).run(order_of_sends, False)] == [[ALL_REDUCE] * 8] * 2


def test_order_in_backward(ranks):
    """The gather of fc1's input starts before or behind the reduce-scatters of its gradient; the bits are the same."""
    gradient, gather, reduce = [ALL_GATHER] * 4, [ALL_GATHER] * 4, [REDUCE_SCATTER] * 4
    first, second = (ranks(2).run(order_of_sends, True, order) for order in ("communicate_first", "compute_first"))
    for (order, ours), (other, theirs) in zip(first, second, strict=True):
        assert order[:12] == gradient + gather + reduce
        assert other[:12] == gradient + reduce + gather
        assert all(torch.equal(ours[name], theirs[name]) for name in ours if ours[name] is not None)


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


def save_all(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


KINDS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_all),
    },
}


def recomputed(group, kind, sp, finished=False):
    style = "gelu, layer norm, biases"
    found = []
    for run in (layers, functools.partial(region, finished=finished)):
        tensors = whole(style, torch.float32)
        mine = leaves({n: sharded(n, t, group, False, sp) for n, t in tensors.items()}, torch.float32)
        names, settings = list(mine), Settings(num_chunks=4, region_rows=16)

        def forward(*tensors, run=run, names=names, settings=settings):
            return run(style, dict(zip(names, tensors, strict=True)), group, settings, sp)

        backward(checkpoint(forward, *mine.values(), **KINDS[kind]), torch.float32, own_rows(group, sp))
        found.append({n: t.grad for n, t in mine.items()})
    return [n for n in found[0] if not torch.equal(found[0][n], found[1][n])]


@pytest.mark.parametrize("sp", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_recompute(ranks, kind, sp):
    assert ranks(2).run(recomputed, kind, sp) == [[], []]


def test_recompute_of_rows_that_a_reader_finishes_that_does_not_ask(ranks):
    """Nothing else hides the filling of the tail's rows from the policy: without that, recompute would skip it."""
    assert ranks(2).run(recomputed, "selective", False, True) == [[], []]


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
