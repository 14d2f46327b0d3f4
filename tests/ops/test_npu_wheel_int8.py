"""int8 by int8 with the real torch_npu wheel, on CPU implementations of its operators; nothing here runs on an NPU."""

import itertools

import npu_wheel
import pytest
import torch
from int8 import fitting
from test_npu import DTYPES
from test_npu_wheel import as_if_on_an_npu, on_meta, operands
from tolerances import close

from ascend_parallel import QuantisedWeight, Settings, int8_column_linear, int8_row_linear, quantise_weight
from ascend_parallel.ops import npu
from ascend_parallel.ops.quantised_rows import QuantisedRows, quantise_rows


def int8_operands(group, grains, m, dtype, k=384, n=40):
    """Every rank's int8 input and weight, and what they stand for in float64."""
    xs, ws, _, _ = operands(group, m, k, n, dtype)
    x = [quantise_rows(x.to(dtype), grains[0]) for x in xs]
    w = [quantise_weight(w.to(dtype), grains[1]) for w in ws]
    return x, w, [a.values.double() * a.scale.double() for a in x], [b.dequantise(torch.float64) for b in w]


def int8_by_int8(kernels, group):
    """The two operators on both layouts of the weight, and the two layers by their choice."""
    as_if_on_an_npu()
    ranks, rank = group.size(), group.rank()
    grains = itertools.product(("token", "tensor"), ("tensor", "channel"))
    for dtype, grain in itertools.product(DTYPES, grains):
        x, w, xs, ws = int8_operands(group, grain, 6 * ranks, dtype)
        total, y_gathered = sum(a @ b for a, b in zip(xs, ws, strict=True)), torch.cat(xs) @ ws[rank]
        transposed = QuantisedWeight(w[rank].values.t().contiguous().t(), w[rank].scale)
        for w_r in (w[rank], transposed):
            close(
                npu.matmul_reduce_scatter(x[rank], w_r, group, (), comm_mode="aiv").wait(),
                total.chunk(ranks)[rank],
                dtype,
            )
            y, gathered = npu.all_gather_matmul(x[rank], w_r, group, (), keep_gathered=False, comm_mode="aiv")
            close(y, y_gathered, dtype)
            assert gathered is None
        x_meta = QuantisedRows(x[rank].values.to("meta"), x[rank].scale.to("meta"), dtype)
        scattered = npu.matmul_reduce_scatter(x_meta, on_meta(w[rank]), group, (), comm_mode="aiv").wait()
        assert (scattered.shape, scattered.dtype) == (total.chunk(ranks)[rank].shape, dtype)
        y, _ = npu.all_gather_matmul(x_meta, on_meta(w[rank]), group, (), comm_mode="aiv")
        assert (y.shape, y.dtype) == (y_gathered.shape, dtype)
        int8_layers(kernels, group, grain, dtype)
    kernels.wrong = True  # the same check notices one rank's missing part
    wrong = npu.matmul_reduce_scatter(x[rank], w_r, group, (), comm_mode="aiv").wait()
    with pytest.raises(AssertionError, match="relative error"):
        close(wrong, total.chunk(ranks)[rank], dtype)


def int8_layers(kernels, group, grain, dtype):
    """Fused forward and backward; the input given here is already what int8 stands for, so it is the truth's."""
    ranks, rank = group.size(), group.rank()
    settings = Settings(fused=True, strict=True, enable_coc_in_column_backward=True)
    x, w, xs, ws = int8_operands(group, grain, 6 * ranks, dtype, n=320)
    inputs = [a.dequantise() for a in x]
    again = [quantise_rows(a, grain[0]) for a in inputs]
    xs = [a.values.double() * a.scale.double() for a in again]
    for layer, truth in (
        (int8_row_linear, sum(a @ b for a, b in zip(xs, ws, strict=True)).chunk(ranks)[rank]),
        (int8_column_linear, torch.cat(xs) @ ws[rank]),
    ):
        kernels.calls.clear()
        x_r = inputs[rank].clone().requires_grad_()
        y = layer(x_r, w[rank], group=group, settings=settings, grain=grain[0])
        y.sum().backward()
        close(y.detach(), truth, dtype)
        ones = torch.ones(x_r.shape[0], 320).double()
        dx = ones @ ws[rank].t() if layer is int8_row_linear else sum(ones @ b.t() for b in ws)
        close(x_r.grad, dx, dtype)
        called = [(name, set(options) >= npu_wheel.INT8, options.get("comm_mode")) for name, options in kernels.calls]
        scatter, gather = "npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"
        forward, backward = (scatter, gather) if layer is int8_row_linear else (gather, scatter)
        assert called == [(forward, True, "aiv"), (backward, False, None)], called


def all_reduce(kernels, group):
    """The all-reduce in every grain and both layouts, with and without communication in int8, and its layer."""
    as_if_on_an_npu()
    rank = group.rank()
    grains = itertools.product(("token", "tensor"), ("tensor", "channel"))
    for dtype, grain, rounds in itertools.product(DTYPES, grains, (False, True)):
        x, w, xs, ws = int8_operands(group, grain, 7, dtype)
        scales, bound, steps = fitting(xs, ws, dtype) if rounds else (None, None, None)
        truth = sum(a @ b for a, b in zip(xs, ws, strict=True))
        for values in (w[rank].values, w[rank].values.t().contiguous().t()):
            w_r = QuantisedWeight(values, w[rank].scale)
            y = npu.matmul_all_reduce(x[rank], w_r, group, (), comm_scales=scales).wait()
            if rounds:
                error = (y.double() - truth).abs()
                assert y.dtype == dtype and (error <= bound).all() and error.max() > steps.min() / 8, error.max()
            else:
                close(y, truth, dtype)
            # The wheel's own kernel for shapes and dtypes, with the same arguments.
            name, options = kernels.calls[-1]
            meta = {
                key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in options.items()
            }
            on_meta = getattr(torch.ops.npu, name)(x[rank].values.to("meta"), values.to("meta"), "", **meta)
            assert (on_meta.shape, on_meta.dtype) == (y.shape, dtype)
        row_without_sequence_parallelism(kernels, group, (x, w, ws), grain[0], rounds)
    kernels.wrong = True  # the same checks notice one rank's missing part
    x, w, xs, ws = int8_operands(group, ("token", "channel"), 7, dtype)
    truth = sum(a @ b for a, b in zip(xs, ws, strict=True))
    scales, bound, _ = fitting(xs, ws, dtype)
    with pytest.raises(AssertionError, match="relative error"):
        close(npu.matmul_all_reduce(x[rank], w[rank], group, ()).wait(), truth, dtype)
    y = npu.matmul_all_reduce(x[rank], w[rank], group, (), comm_scales=scales).wait()
    assert not ((y.double() - truth).abs() <= bound).all()


def row_without_sequence_parallelism(kernels, group, drawn, grain, rounds):
    x, w, ws = drawn
    rank, dtype = group.rank(), x[0].dtype
    kernels.calls.clear()
    again = [quantise_rows(a.dequantise(), grain) for a in x]
    xs = [a.values.double() * a.scale.double() for a in again]
    scales, bound, _ = fitting(xs, ws, dtype) if rounds else (None, None, None)
    truth = sum(a @ b for a, b in zip(xs, ws, strict=True))
    x_r = x[rank].dequantise().requires_grad_()
    settings = Settings(fused=True, strict=True)
    y = int8_row_linear(
        x_r, w[rank], group=group, settings=settings, grain=grain, sequence_parallel=False, comm_scales=scales
    )
    y.sum().backward()
    if rounds:
        assert ((y.detach().double() - truth).abs() <= bound).all()
    else:
        close(y.detach(), truth, dtype)
    close(x_r.grad, torch.ones(y.shape).double() @ ws[rank].t(), dtype)
    ((name, options),) = kernels.calls
    given = npu_wheel.DEQUANT | npu_wheel.COMM_QUANT if rounds else npu_wheel.DEQUANT
    assert name == "npu_mm_all_reduce_base" and set(options) == given, (name, set(options))


@pytest.mark.slow
def test_an_all_reduce_of_int8_by_int8_reaches_the_operator(with_torch_npu):
    with_torch_npu(all_reduce)


@pytest.mark.slow
def test_int8_by_int8_reaches_the_operators(with_torch_npu):
    with_torch_npu(int8_by_int8)
