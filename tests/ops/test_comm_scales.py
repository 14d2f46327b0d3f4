"""An all-reduce in int8: its roundings one by one, its error against the truth in float64, its choice and refusals."""

import re

import pytest
import torch
from by_settings import start_matmul_all_reduce
from int8 import DTYPES, fitting
from pool import on_ranks
from test_quantised_rows import N, drawn

from ascend_parallel import CommScales, Matmul, Settings, UnmetRequestError, explain
from ascend_parallel.ops import choose


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_halves_go_to_the_even_number_and_the_rest_is_clipped(dtype):
    scales = CommScales(torch.tensor([2.0, 0.5], dtype=dtype), torch.tensor([4.0, 1.0], dtype=dtype))
    y = torch.tensor([[1, 0.25], [3, -0.25], [-5, 0.75], [900, -900], [torch.inf, -torch.inf]], dtype=dtype)
    q = scales.round_partial(y)
    assert q.dtype == torch.int8 and q.tolist() == [[0, 0], [2, 0], [-2, 2], [127, -128], [127, -128]]
    three = torch.tensor([[[1, 3]], [[0, 127]], [[0, 127]]], dtype=torch.int8)
    assert scales.round_total(three).tolist() == [[0, 127]]  # 1 * 2 / 4 is a half; 257 * 0.5 / 1 is more than 127
    assert scales.round_total(three[:2]).tolist() == [[0, 65]]  # 130 does not wrap to -126
    result = scales.dequantise(torch.tensor([[5, -128]], dtype=torch.int8))
    assert result.dtype == dtype and result.tolist() == [[20, -128]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
@on_ranks()
def test_sums_are_off_by_no_more_than_the_roundings(group, dtype):
    ranks, rank = group.size(), group.rank()
    for rows, exactly, grain in (
        (1, False, ("token", "channel")),
        (17, False, ("tensor", "tensor")),
        (12, True, ("token", "tensor")),
    ):
        run = Settings(mode=2, deterministic=exactly)
        x, w, xs, ws = drawn(group, rows, grain, dtype)
        scales, bound, steps = fitting(xs, ws, dtype)
        y = start_matmul_all_reduce(x[rank], w[rank], group, run, comm_scales=scales).wait()
        assert (y.dtype, y.shape) == (dtype, (rows, N))
        error = (y.double() - sum(a @ b for a, b in zip(xs, ws, strict=True))).abs()
        assert (error <= bound).all(), (error / bound).max()
        assert error.max() > steps.min() / 8, "the sums were not rounded to int8"
        everywhere = [torch.empty_like(y) for _ in range(ranks)]
        torch.distributed.all_gather(everywhere, y, group=group)
        assert all(torch.equal(y, other) for other in everywhere)
        # Scales of a fourth of the size clip, and exceed the bound of scales that fit.
        clipping = CommScales(scales.partial / 4, scales.total / 4)
        clipped = start_matmul_all_reduce(x[rank], w[rank], group, run, comm_scales=clipping).wait()
        assert ((clipped.double() - y.double()).abs() > 2 * bound).any()
    x, w, *_ = drawn(group, 0, ("token", "channel"), dtype)
    assert start_matmul_all_reduce(x[rank], w[rank], group, run, comm_scales=scales).wait().shape == (0, N)


@on_ranks(1)
def test_a_single_rank_rounds_nothing(group):
    x, w, xs, ws = drawn(group, 5, ("token", "channel"), torch.float64)
    coarse = CommScales(torch.full((N,), 1e3).double(), torch.full((N,), 1e3).double())
    y = start_matmul_all_reduce(x[0], w[0], group, Settings(), comm_scales=coarse).wait()
    torch.testing.assert_close(y, xs[0] @ ws[0])


def refused(group):
    x, w, *_ = drawn(group, 4, ("token", "channel"), torch.float32)
    x, w, run = x[group.rank()], w[group.rank()], Settings(mode=2)
    ones = torch.ones(N)
    for scale, given in ((torch.ones(N + 1), r"\[25\], torch.float32"), (ones.half(), r"\[24\], torch.float16")):
        with pytest.raises(ValueError, match=rf"comm_scales are \[24\], torch.float32 on cpu .*not {given}"):
            start_matmul_all_reduce(x, w, group, run, comm_scales=CommScales(scale, scale))
    only = "with a floating input takes no comm_scales, only matmul_all_reduce of int8 by int8 does"
    with pytest.raises(ValueError, match=only):
        start_matmul_all_reduce(x.dequantise(), w, group, run, comm_scales=CommScales(ones, ones))


def test_operands_that_do_not_fit_are_refused(ranks):
    ranks(2).run(refused)
    with pytest.raises(ValueError, match="matmul_reduce_scatter with an int8 input takes no comm_scales"):
        Matmul("matmul_reduce_scatter", 8, 8, 8, torch.float32, "cpu", 2, int8_input=True, comm_quant=True)


@pytest.mark.parametrize(
    ("partial", "total", "message"),
    [
        (torch.ones(1, 4), torch.ones(4), "partial is floating, [N], not torch.float32 [1, 4]"),
        (torch.ones(4), torch.ones(4, dtype=torch.int8), "total is floating, [N], not torch.int8 [4]"),
        (torch.tensor([1.0, 0.0]), torch.ones(2), "partial is finite and positive"),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), "total is finite and positive"),
        (torch.ones(2), torch.tensor([1.0, torch.inf]), "total is finite and positive"),
        (torch.ones(4), torch.ones(5), "alike, not torch.float32 [4] on cpu and torch.float32 [5] on cpu"),
        (torch.ones(4), torch.ones(4).half(), "alike, not torch.float32 [4] on cpu and torch.float16 [4] on cpu"),
    ],
)
def test_scales_that_cannot_be_are_refused(partial, total, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CommScales(partial, total)


def test_what_is_chosen():
    call = Matmul(
        "matmul_all_reduce", 64, 512, 1024, torch.float32, "cpu", 4, shm=None, int8_input=True, comm_quant=True
    )
    for settings in (Settings(mode=2), Settings(num_chunks=4), Settings(fused=True), Settings(deterministic=True)):
        choice = choose(call, settings)
        assert (choice.kernel, choice.sizes, choice.exact) == ("reference", (64,), False)
    text = str(explain(call, Settings(num_chunks=4)))
    assert "float32 of int8 by int8 with communication in int8 on 4 cpu ranks: reference, chunks: 1" in text
    assert "1, because communication in int8 is not cut" in text
    assert text.count("cannot: it has no communication in int8") == 4
    for settings in (Settings(num_chunks=4, strict=True), Settings(fused=True, strict=True)):
        with pytest.raises(UnmetRequestError, match="communication in int8"):
            choose(call, settings)
