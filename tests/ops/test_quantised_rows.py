"""Inputs in int8: rounding errors, refusals, and the three operators that multiply int8 by int8."""

import itertools

import pytest
import torch
from by_settings import run_all_gather_matmul, start_matmul_all_reduce, start_matmul_reduce_scatter
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import DTYPES, exact
from pairwise import base_choice
from pool import on_ranks
from tolerances import close

from ascend_parallel import QuantisedWeight, Settings, explain, quantise_weight
from ascend_parallel.ops import Matmul, choose
from ascend_parallel.ops.quantised_rows import INPUT_GRAINS, QuantisedRows, quantise_rows

K, N = 70, 24


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 70), (5, 3), (2, 3, 33), (0, 4), (7,)]),
    grain=st.sampled_from(INPUT_GRAINS),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    magnitude=st.sampled_from([0.0, 1e-30, 1e-7, 1.0, 1e3]),
    seed=st.integers(0, 2**20),
)
def test_at_most_half_a_step_is_rounded_off(shape, grain, dtype, magnitude, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    rounded = quantise_rows(x, grain)
    assert rounded.dtype == dtype and rounded.shape == x.shape
    scale = rounded.scale.double()
    stands_for = rounded.values.double() * scale
    assert ((stands_for - x.double()).abs() <= scale * (0.5 + 1e-4)).all()
    if x.numel() and magnitude >= 1e-7:  # all of int8 is used; else the bound says little
        largest = x.double().abs().amax(-1, keepdim=True)
        largest = largest if grain == "token" else largest.amax().expand(largest.shape)
        torch.testing.assert_close(scale, largest / 127, rtol=1e-6, atol=1e-38)
    unit = torch.finfo(dtype).eps / 2
    error = (rounded.dequantise().double() - stands_for).abs()
    assert (error <= 1.001 * unit * stands_for.abs() + torch.finfo(dtype).tiny).all()


def test_values_that_are_not_finite_stay_not_finite():
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(3, 4)
        x[1, 2] = bad
        finite = quantise_rows(x, "token").dequantise().isfinite().all(1)
        assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": torch.zeros(4, 8)}, r"int8 values, not torch.float32 \[4, 8\]"),
        ({"scale": torch.ones(4)}, r"torch.float32 scale of shape \[4, 1\], not torch.float32 \[4\]"),
        ({"scale": torch.ones(4, 1).half()}, "not torch.float16"),
        ({"dtype": torch.int32}, "floating dtype, not torch.int32"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changed, message):
    fits = {"values": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1), "dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        QuantisedRows(**{**fits, **changed})


def test_inputs_that_cannot_be_rounded_are_refused():
    with pytest.raises(ValueError, match="grain='channel' is not allowed for an input: give one of token, tensor"):
        quantise_rows(torch.ones(4, 8), "channel")
    with pytest.raises(ValueError, match=r"floating, \[..., K\]; it is torch.int32 \[4\]"):
        quantise_rows(torch.ones(4, dtype=torch.int32), "token")


def drawn(group, rows, grain, dtype, offset=False):
    """Every rank's rounded input and weight; their products of float64 are the truth."""
    generator = torch.Generator().manual_seed(4)

    def of(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, shape[0])[:, None]

    x = [quantise_rows(of(rows, K).to(dtype), grain[0]) for _ in range(group.size())]
    w = [quantise_weight(of(K, N).to(dtype), grain[1], symmetric=not offset) for _ in range(group.size())]
    return x, w, [a.values.double() * a.scale.double() for a in x], [exact(b) for b in w]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("count", "dtype"), base_choice([2, 3, 4], [*DTYPES, torch.float64], (3, torch.float32)), ids=str
)
@on_ranks()
def test_products_of_int8_match_the_truth(group, dtype):
    ranks, rank = group.size(), group.rank()
    grains = itertools.product(INPUT_GRAINS, ("tensor", "channel"))
    for grain, rows, chunks, exactly in itertools.product(grains, (1, 17), (1, 3), (False, True)):
        run = Settings(num_chunks=chunks, mode=2, deterministic=exactly)
        x, w, xs, ws = drawn(group, ranks * rows, grain, dtype)
        total = sum(a @ b for a, b in zip(xs, ws, strict=True))
        y = start_matmul_reduce_scatter(x[rank], w[rank], group, run).wait()
        close(y, total.chunk(ranks)[rank], dtype)
        x, w, xs, ws = drawn(group, rows, grain, dtype)
        y, _ = run_all_gather_matmul(x[rank], w[rank], group, run, keep_gathered=False)
        close(y, torch.cat(xs) @ ws[rank], dtype)
        y = start_matmul_all_reduce(x[rank], w[rank], group, run).wait()
        close(y, sum(a @ b for a, b in zip(xs, ws, strict=True)), dtype)


@on_ranks(2)
def test_operands_that_do_not_fit_are_refused(group):
    x, w, *_ = drawn(group, 4 * group.size(), ("token", "channel"), torch.float32)
    x, w = x[group.rank()], w[group.rank()]
    run, wanted = Settings(num_chunks=2), "scales per tensor or channel and no offset, not "
    shifted = QuantisedWeight(w.values, w.scale, torch.ones_like(w.scale))
    grouped = quantise_weight(torch.randn(K, N), "group", group_size=32)
    for weight, offered in (
        (torch.ones(K, N), "another one"),
        (grouped, "scales per group"),
        (shifted, "scales per channel, and an offset"),
    ):
        with pytest.raises(ValueError, match=wanted + offered):
            start_matmul_reduce_scatter(x, weight, group, run)
        with pytest.raises(ValueError, match=wanted + offered):
            start_matmul_all_reduce(x, weight, group, run)
    with pytest.raises(ValueError, match="matmul_reduce_scatter takes no int8 weight"):
        start_matmul_reduce_scatter(torch.ones(4, K), w, group, run)


def test_what_is_chosen():
    call = Matmul("matmul_reduce_scatter", 64, 512, 1024, torch.bfloat16, "cpu", 2, int8_input=True)
    choice = choose(call, Settings(num_chunks=4))
    assert (choice.kernel, len(choice.sizes)) == ("chunked", choose_plain(call))
    text = str(explain(call, Settings(num_chunks=4)))
    assert text.startswith("matmul_reduce_scatter [64, 512, 1024] bfloat16 of int8 by int8 on 2 cpu ranks: chunked")


def choose_plain(call):
    plain = Matmul(call.operator, call.m, call.k, call.n, call.dtype, call.device, call.ranks)
    return len(choose(plain, Settings(num_chunks=4)).sizes)
